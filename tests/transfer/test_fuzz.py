"""Whatever comes over the wire is understood or refused: no crash, no memory without bound, no byte moved outside."""

from __future__ import annotations

import ctypes
import resource
import time
import zlib
from collections.abc import Sequence

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice.v1 import client_pb2, registry_pb2, wire_pb2, worker_pb2

from decode_node.batch_queue import Announced, BatchQueue
from decode_node.batch_reader import SOURCE_SCRATCH_BYTES, BatchReader, Reply, Source
from decode_node.pull_counters import Counts
from decode_node.pull_plan import PullPlanner, PullRefused
from decode_node.pull_requests import PullRequest, PullRequests
from tests.kv_peers import LAYOUT, NUM_SLOTS, SLOT_OF_LAYER, LocalEngine, Memory, Stats
from transfer.memfabric import Copies, Meanwhile
from transfer.wire import MAX_MESSAGE_BYTES, Body, WireError, decode, encode

MIB = 1 << 20
GENERATION = 41
SOURCE_BLOCKS, DESTINATION_BLOCKS = 8, 10


def signed(serialized: bytes) -> bytes:
    """As a message with a right checksum, so that it gets past that."""
    return serialized + zlib.crc32(serialized).to_bytes(4, "little")


def hello(**changes: object) -> wire_pb2.Hello:
    fields: dict[str, object] = {
        "worker_id": "prefill-0/tp0",
        "epoch": "p",
        "expected_epoch": "d",
        "session_id": "s",
        "tp_size": 1,
        "layout": LAYOUT,
        "layers": PREFILL.layer_layouts(),
        "generation_address": ctypes.addressof(WORDS),
    }
    return wire_pb2.Hello(**fields | changes)  # type: ignore[arg-type]


PREFILL = Memory(SOURCE_BLOCKS, seed=1)
WORDS = (ctypes.c_uint64 * NUM_SLOTS)(*[GENERATION] * NUM_SLOTS)
VALID: list[Body] = [
    hello(),
    wire_pb2.HelloReply(error="no", epoch="e"),
    wire_pb2.ReadReady(
        sequence=3,
        layer=2,
        slot=1,
        generation=GENERATION,
        members=1,
        lease_ms=1000,
        entries=[
            wire_pb2.ReadEntry(request_id="r", destination_generation=1, main_blocks=[1, 2], indexer_blocks=[3, 4])
        ],
        finished=["r"],
    ),
    wire_pb2.ReadFailed(sequence=3, requests=[wire_pb2.RequestError(request_id="r", error="why")]),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid message with bytes changed, cut off, doubled or inserted, and its checksum made right again."""
    data = bytearray(encode(draw(st.sampled_from(VALID)))[:-4])
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(["change", "cut", "double", "insert"]))
        if what == "change" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif what == "cut":
            del data[at:]
        elif what == "double":
            data[at:at] = data[at : at + 40]
        else:
            data[at:at] = draw(st.binary(max_size=12))
    return signed(bytes(data))


@settings(max_examples=250, deadline=None)
@given(st.one_of(st.binary(max_size=400), st.binary(max_size=400).map(signed), mutated()))
def test_bytes_are_a_message_or_refused(payload: bytes) -> None:
    try:
        body = decode(payload)
    except WireError:
        return
    assert decode(encode(body)) == body


class GuardedEngine(LocalEngine):
    """Refuses to touch any byte but prefill's tensors and generations, and decode's tensors."""

    def __init__(self, destination: Memory, scratch: int) -> None:
        super().__init__()
        words = ctypes.addressof(WORDS)
        self._sources = [*_ranges(PREFILL), (words, words + ctypes.sizeof(WORDS))]
        self._destinations = [*_ranges(destination), (scratch, scratch + SOURCE_SCRATCH_BYTES)]

    def read(
        self,
        session_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        then: Copies | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Stats:
        for to, source, size in zip(*copies, strict=True):
            inside = _within(self._destinations, to, size) and _within(self._sources, source, size)
            if not inside:
                raise SystemExit(f"{size} bytes from {source:#x} to {to:#x} are outside of all tensors")
        return super().read(session_id, copies, deadline_s=deadline_s, then=then, meanwhile=meanwhile)


def _ranges(memory: Memory) -> list[tuple[int, int]]:
    return [(ctypes.addressof(array), ctypes.addressof(array) + len(array)) for array in memory.buffers.values()]


def _within(ranges: Sequence[tuple[int, int]], address: int, size: int) -> bool:
    return any(start <= address and address + size <= end for start, end in ranges)


NUMBERS = st.one_of(st.integers(0, 12), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1]))
BLOCKS = st.lists(NUMBERS, max_size=6)
ENTRIES = st.builds(
    wire_pb2.ReadEntry,
    request_id=st.sampled_from(["r", "r", "r", "s", ""]),
    destination_generation=st.sampled_from([0, 1, 1, 1, 2**64 - 1]),
    main_start=NUMBERS,
    main_blocks=BLOCKS,
    indexer_start=NUMBERS,
    indexer_blocks=BLOCKS,
    summed_main=st.lists(NUMBERS, max_size=3),
    main_sums=st.lists(NUMBERS, max_size=4),
    summed_indexer=st.lists(NUMBERS, max_size=2),
    indexer_sums=st.lists(NUMBERS, max_size=2),
)
BATCHES = st.builds(
    wire_pb2.ReadReady,
    sequence=NUMBERS,
    layer=st.sampled_from([0, 1, 2, 3, 2**32 - 1]),
    slot=st.sampled_from([0, 1, 1, 2**32 - 1]),
    generation=st.sampled_from([GENERATION, GENERATION, 0, 2**64 - 1]),
    member=st.sampled_from([0, 0, 0, 1, 2**32 - 1]),
    members=st.sampled_from([1, 1, 1, 0, 2, 2**32 - 1]),
    lease_ms=st.sampled_from([1000, 1000, 0, 2**32 - 1]),
    entries=st.lists(ENTRIES, max_size=3),
    finished=st.lists(st.sampled_from(["r", "s"]), max_size=2),
)


@settings(max_examples=250, deadline=None)
@given(BATCHES, st.lists(st.integers(0, DESTINATION_BLOCKS - 1), min_size=1, max_size=4, unique=True))
def test_no_announcement_moves_a_byte_from_or_to_anywhere_else(batch: wire_pb2.ReadReady, blocks: list[int]) -> None:
    destination, scratch = Memory(DESTINATION_BLOCKS), (ctypes.c_ubyte * SOURCE_SCRATCH_BYTES)()
    planner = PullPlanner(LAYOUT, destination.layer_memory(), name="decode-0/dp0/tp0", tp_rank=0, tp_size=1)
    requests = PullRequests(planner.layers_owed_by, lambda *_: None, lambda _: None)
    now = time.monotonic()
    requests.expect(PullRequest("r", 1, tuple(blocks), tuple(blocks), 1, range(len(blocks)), 9.0, now + 9.0))
    engine = GuardedEngine(destination, ctypes.addressof(scratch))
    reader = BatchReader(
        engine, planner, requests, Counts(), read_timeout_s=1.0, read_retries=0, registration_wait_s=0.0
    )
    source = Source(planner.source(hello()), ctypes.addressof(scratch), lambda _: True)
    replies: list[Reply] = []
    reader.read(source, Announced(batch, now + batch.lease_ms / 1000), BatchQueue(), replies.append)
    (reply,) = replies
    assert reply.sequence == batch.sequence
    if isinstance(reply, wire_pb2.ReadFailed):
        assert reply.error or all(named.error for named in reply.requests)
    elif batch.entries:
        assert batch.slot == SLOT_OF_LAYER[batch.layer]
    strangers = set(range(DESTINATION_BLOCKS)) - set(blocks)
    for layer, kind in destination.buffers:
        for block in strangers:
            assert not any(destination.block(layer, kind, block)), "another request's block was written"


@settings(max_examples=150, deadline=None)
@given(mutated())
def test_a_hand_shake_fits_or_is_refused(payload: bytes) -> None:
    try:
        body = decode(payload)
    except WireError:
        return
    planner = PullPlanner(LAYOUT, Memory(2).layer_memory(), name="decode-0/dp0/tp0", tp_rank=0, tp_size=1)
    if isinstance(body, wire_pb2.Hello):
        try:
            source = planner.source(body)
        except PullRefused as refused:
            assert str(refused)
            return
        assert [layer.slot for layer in source.layers] == [each.slot for each in sorted(body.layers, key=_by_layer)]


def _by_layer(described: wire_pb2.LayerLayout) -> int:
    return described.layer


def test_the_largest_message_costs_bounded_memory() -> None:
    """Packed small numbers blow up most: a byte on the wire is four in memory."""
    count = MAX_MESSAGE_BYTES - 200
    entry = wire_pb2.ReadEntry(request_id="r", destination_generation=1, main_blocks=bytes(count))
    payload = encode(wire_pb2.ReadReady(sequence=1, entries=[entry]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = decode(payload)
    assert isinstance(body, wire_pb2.ReadReady) and len(body.entries[0].main_blocks) == count
    planner = PullPlanner(LAYOUT, Memory(2).layer_memory(), name="decode-0/dp0/tp0", tp_rank=0, tp_size=1)
    with pytest.raises(PullRefused, match="destination range is incomplete"):
        planner.entry(planner.source(hello()), 1, body.entries[0], [0], [0])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 40 * MAX_MESSAGE_BYTES


def test_deep_nesting_is_refused() -> None:
    nested = b""
    for _ in range(5000):  # field 2 of WireMessage and of what it holds: a message within a message
        nested = b"\x12" + _varint(len(nested)) + nested
    with pytest.raises(WireError):
        decode(signed(nested))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(
        [
            client_pb2.GenerateRequest,
            registry_pb2.RegisterRequest,
            registry_pb2.HeartbeatRequest,
            worker_pb2.PrefillRequest,
            worker_pb2.DecodeSessionRequest,
        ]
    ),
    st.binary(max_size=300),
)
def test_grpc_requests_parse_or_are_refused(kind: type[Message], data: bytes) -> None:
    """gRPC answers a DecodeError with INTERNAL and goes on; anything else would end the call's task."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return
    assert kind.FromString(message.SerializeToString()) == message or b"\xff" in data  # NaN is not equal to itself
