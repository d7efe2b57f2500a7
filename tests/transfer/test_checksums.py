"""Checksums of pulls: what arrives is what prefill wrote, or it is read again, or the request fails."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv_peers import CKV, LAYOUT, entry
from tests.transfer_cluster import INDEXER_BLOCKS, MAIN, PREFILL_BLOCKS, Checksum, TransferCluster
from transfer.checksum import BlocksOf, block_checksums, checksums

CHUNKS = [(0, 2), (2, 5)]


def sum_of(data: bytes, *, portable: bool = False) -> int:
    buffer = ctypes.create_string_buffer(data, len(data))
    return checksums([ctypes.addressof(buffer)], [len(data)], portable=portable)[0]


def slow_crc32c(crc: int, data: bytes) -> int:
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def mix(value: int) -> int:
    value = value * 0x9E3779B97F4A7C15 % (1 << 64)
    return value ^ (value >> 32)


def by_definition(data: bytes) -> int:
    whole = len(data) // 32 * 32
    streams = []
    for stream in range(4):
        words = [data[at : at + 8] for at in range(8 * stream, whole, 32)]
        streams.append(slow_crc32c((1 << 32) - 1 - stream, b"".join(words)))
    streams[0] = slow_crc32c(streams[0], data[whole:])
    mixed = len(data)
    for value in streams:
        mixed = mix(mixed ^ value)
    return mixed >> 32


@given(st.binary(max_size=300))
def test_a_checksum_is_what_its_definition_says_on_every_machine(data: bytes) -> None:
    assert sum_of(data) == sum_of(data, portable=True) == by_definition(data)


@given(st.integers(0, (1 << 64) - 1), st.binary(min_size=1, max_size=80), st.binary(min_size=1, max_size=80))
def test_a_blocks_checksum_is_that_of_its_parts_in_order(seed: int, first: bytes, second: bytes) -> None:
    """Three blocks in each tensor, of which the second is taken."""
    memories = [ctypes.create_string_buffer(bytes(len(data)) + data + bytes(len(data))) for data in (first, second)]
    parts = [
        BlocksOf(ctypes.addressof(memory), len(data), [1])
        for memory, data in zip(memories, (first, second), strict=True)
    ]
    expected = mix(mix(mix(seed) ^ by_definition(first)) ^ by_definition(second)) >> 32
    for portable in (False, True):
        assert list(block_checksums(seed, 1, parts, portable=portable)) == [expected]


def test_any_damaged_byte_and_any_swapped_word_changes_the_checksum() -> None:
    draws = random.Random(3)
    data = draws.randbytes(1152)
    for at in range(len(data)):
        assert sum_of(data[:at] + bytes([data[at] ^ (1 << draws.randrange(8))]) + data[at + 1 :]) != sum_of(data)
    for _ in range(200):
        a, b = sorted(draws.sample(range(len(data) // 8), 2))
        words = [data[8 * word : 8 * word + 8] for word in range(len(data) // 8)]
        words[a], words[b] = words[b], words[a]
        assert sum_of(b"".join(words)) != sum_of(data)


def test_checksum_arguments_are_checked() -> None:
    assert checksums([], []) == []
    with pytest.raises(ValueError, match="2 addresses, but 1 sizes"):
        checksums([1, 2], [3])
    with pytest.raises(ValueError, match="2 blocks where 3 are to be summed"):
        block_checksums(0, 3, [BlocksOf(0, 8, [0, 1])])


@pytest.mark.parametrize("mode", ["sample", "all"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (4, 2)])
def test_every_share_is_verified_by_who_reads_it(mode: Checksum, prefill_tp: int, decode_tp: int) -> None:
    cluster = TransferCluster(prefill_tp, decode_tp, checksum=mode)
    verified = []
    for decode in cluster.decode[0]:
        decode.expect("r")
    for prefill in cluster.prefill[0]:
        publisher = prefill.publisher
        stamp = publisher._stamp

        def keep(layer, endpoint, entries, stamp=stamp) -> None:  # type: ignore[no-untyped-def]
            stamp(layer, endpoint, entries)
            verified.extend((layer, each.main_blocks[at]) for each in entries for at in each.summed_main)

        publisher._stamp = keep
    cluster.run("r", CHUNKS)
    for decode in cluster.decode[0]:
        assert decode.events.next_terminal() == ("r", 1, None)
        assert decode.puller.counters().wrong_checksums == 0
    cluster.assert_complete("r")
    every_block = sorted((layer, block) for layer in range(LAYOUT.num_layers) for block in PREFILL_BLOCKS)
    assert sorted(verified) == every_block if mode == "all" else set(verified) < set(every_block) and verified
    cluster.close()


@pytest.mark.parametrize("damages", [1, 10])
def test_a_damaged_copy_is_read_again_and_fails_the_request_on_both_sides_if_that_does_not_help(damages: int) -> None:
    cluster = TransferCluster(1, 1, checksum="all")
    (decode,), (prefill,) = cluster.decode[0], cluster.prefill[0]
    decode.expect("r")
    left = iter(range(damages))

    def damage(session: str, sizes: Sequence[int]) -> None:
        if 8 not in sizes and next(left, None) is not None:
            destination = decode.host.tensor(0, CKV)
            ctypes.c_ubyte.from_address(destination.address + MAIN[0] * destination.block_bytes).value ^= 1

    decode.engine.after_read = damage
    cluster.run("r", CHUNKS)
    _, _, error = decode.events.next_terminal()
    counters = decode.puller.counters()
    if damages == 1:
        assert error is None
        assert (counters.wrong_checksums, counters.read_retries) == (1, 1)
        cluster.assert_complete("r")
    else:
        assert "1 of 6 checksums are wrong" in (error or "")
        assert (counters.wrong_checksums, counters.read_retries) == (3, 2)
        assert "checksums are wrong" in prefill.errors.get(timeout=5)[1]
    cluster.close()


def test_checksums_that_do_not_fit_the_blocks_are_refused_before_any_byte_moves() -> None:
    cluster = TransferCluster(1, 1)
    (decode,), (prefill,) = cluster.decode[0], cluster.prefill[0]
    endpoint = cluster.connect()[0]
    for number, changes in enumerate(
        [
            {"summed_main": [0], "main_sums": [1]},
            {"summed_main": [5], "main_sums": [1, 2]},
            {"summed_main": [1, 0], "main_sums": [1, 2, 3, 4]},
            {"summed_main": [0, 0], "main_sums": [1, 2, 3, 4]},
            {"summed_indexer": [0], "indexer_sums": [1, 2]},
            {"indexer_sums": [1]},
        ]
    ):
        decode.expect(f"r{number}")
        sent = entry(f"r{number}", PREFILL_BLOCKS, indexer=INDEXER_BLOCKS)
        for name, values in changes.items():
            getattr(sent, name)[:] = values
        prefill.publisher.publish(0, 0, endpoint, [sent])
        assert "checksums" in (decode.events.next_terminal()[2] or "")
        decode.release(f"r{number}")
    assert all(sizes == [8] for _, sizes in decode.engine.reads)
    cluster.close()
