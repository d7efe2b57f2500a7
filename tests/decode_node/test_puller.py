"""The puller against a scripted prefill rank on a real socket: what is read, refused, and when a request is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from sluice.v1 import wire_pb2

from tests.decode_node.pull_rig import Node
from tests.kv_peers import (
    CKV,
    EPOCH,
    INDEXER_KEY,
    K_ROPE,
    LAYOUT,
    Memory,
    entry,
    eventually,
    small_layout,
)


def test_a_request_is_pulled_into_its_own_blocks_and_ends_once(node: Node) -> None:
    node.expect("r", [9, 2, 4], [1, 0, 5])
    prefill = node.prefill()
    assert prefill.publish_all("r", [3, 6, 0]) == {}
    assert node.events.next_terminal() == ("r", 1, None)
    for layer in range(LAYOUT.num_layers):
        for remote, local in ((3, 9), (6, 2), (0, 4)):
            for kind in (CKV, K_ROPE):
                assert node.memory.block(layer, kind, local) == prefill.memory.block(layer, kind, remote)
    for layer in LAYOUT.indexer_layers:
        for remote, local in ((4, 1), (1, 0), (7, 5)):
            assert node.memory.block(layer, INDEXER_KEY, local) == prefill.memory.block(layer, INDEXER_KEY, remote)
    untouched = Memory(10)
    for block in {0, 1, 3, 5, 6, 7, 8}:
        assert node.memory.block(1, CKV, block) == untouched.block(1, CKV, block)
    counters = node.puller.counters()
    assert (counters.batches, counters.failures) == (3, 0)
    assert counters.bytes_pulled == sum(sum(sizes) for _, sizes in node.copied())
    node.puller.release("r")
    assert node.events.quiescent.get(timeout=5) == "r"
    assert node.puller.pending() == 0
    assert node.events.terminal.empty()


def test_chunks_continue_where_the_last_one_ended_and_a_gap_is_an_error(node: Node) -> None:
    node.expect("r", range(4), range(4))
    prefill = node.prefill()
    assert prefill.publish(1, [entry("r", [0, 1])]) == {}
    assert prefill.publish(1, [entry("r", [2], start=2)]) == {}
    errors = prefill.publish(0, [entry("r", [1, 2], start=1, indexer=[1, 2])])
    assert "blocks 0..0 of layer 0 were never announced" in errors["r"]
    assert node.copied()[2:] == []
    assert node.events.next_terminal() == ("r", 1, errors["r"])


def test_finishing_with_missing_blocks_fails_the_request(node: Node) -> None:
    node.expect("r", [0, 1], [0, 1])
    prefill = node.prefill()
    assert prefill.publish(0, [entry("r", [0, 1], indexer=[0, 1])]) == {}
    assert "blocks 0..1 of layer 1 are missing" in prefill.publish(2, [entry("r", [])], ["r"])["r"]
    assert "layer 1" in (node.events.next_terminal()[2] or "")


def test_a_batch_that_outruns_the_reservation_is_waited_for(node: Node) -> None:
    prefill = node.prefill()
    prefill.offer(1, [entry("late", [0])])
    time.sleep(0.1)
    node.expect("late", [0], [0])
    assert prefill.errors() == {}


@pytest.mark.parametrize("generation", [0, 2])
def test_unknown_requests_and_generations_fail_alone(node: Node, generation: int) -> None:
    node.expect("good", [0], [0])
    node.expect("other", [1], [1])
    prefill = node.prefill()
    errors = prefill.publish(1, [entry("ghost", [1]), entry("good", [2]), entry("other", [3], generation=generation)])
    assert sorted(errors) == ["ghost", "other"]
    assert "generation" in errors["ghost"] and "generation" in errors["other"]
    assert node.memory.block(1, CKV, 0) == prefill.memory.block(1, CKV, 2)
    assert node.memory.block(1, CKV, 1) == Memory(10).block(1, CKV, 1)
    assert node.events.terminal.empty()  # a stranger's message does not end a good reservation


def test_a_released_request_is_refused_at_once(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    node.puller.release("r")
    assert node.events.quiescent.get(timeout=5) == "r"
    started = time.monotonic()
    assert "is over" in prefill.publish(1, [entry("r", [0])])["r"]
    assert time.monotonic() - started < 0.25  # the registration wait is 0.3 s
    assert node.copied() == []


@pytest.mark.parametrize(
    ("layer", "sent", "text"),
    [
        (1, entry("r", [0xFFFFFFFF]), "prefill block 4294967295 of ckv is not in 0..7"),  # -1 in 32 bits
        (1, entry("r", [0, 8]), "prefill block 8 of ckv is not in 0..7"),
        (1, entry("r", [0, 1, 2]), "main destination range is incomplete: blocks 0..2, but 2 are reserved"),
        (0, entry("r", [0, 1]), "indexer presence mismatch: 0 indexer blocks from 0, but 2 main blocks"),
        (0, entry("r", [0], indexer=[9]), "prefill block 9 of indexer_key is not in 0..7"),
        (1, entry("r", [0], indexer=[0]), "layer 1 has no indexer"),
    ],
)
def test_wrong_numbers_fail_the_request_before_any_byte_moves(
    node: Node, layer: int, sent: wire_pb2.ReadEntry, text: str
) -> None:
    node.expect("r", [0, 1], [0, 1])
    node.expect("good", [2], [2])
    prefill = node.prefill()
    good = entry("good", [5], indexer=[5] if layer == 0 else [])
    errors = prefill.publish(layer, [sent, good])
    assert list(errors) == ["r"]
    assert text in errors["r"]
    assert text in (node.events.next_terminal()[2] or "")
    assert len(node.copied()) == 1  # the good request's
    assert node.memory.block(layer, CKV, 2) == prefill.memory.block(layer, CKV, 5)
    assert "failed already" in prefill.publish(1, [entry("r", [0])])["r"]
    assert node.events.terminal.empty()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer": 3}, "layer 3 is not in 0..2"),
        ({"slot": 0}, "layer 1 in slot 0, not 1"),
        ({"member": 1}, "contributor 1 of 1"),
        ({"members": 2}, "contributor 0 of 2"),
        ({"finished": ["stranger"]}, "'stranger'"),
        ({"entries": [entry("r", [0]), entry("r", [1])]}, "more than one entry"),
    ],
)
def test_a_wrong_batch_is_refused_as_a_whole(node: Node, changes: dict[str, object], text: str) -> None:
    node.expect("r", [0, 1], [0, 1])
    prefill = node.prefill()
    node.expect("other", [2], [2])
    assert text in prefill.publish(1, [entry("r", [0])], **changes)[""]
    assert node.copied() == []
    request, _, error = node.events.next_terminal()
    assert request == "r" and text in (error or ""), "decode hears of it at once"
    assert prefill.publish(1, [entry("other", [0])]) == {}


def test_hand_shakes_that_do_not_fit_are_refused_naming_both_values(node: Node) -> None:
    def refusal(tp: int = 1, **changes: object) -> str:
        prefill = node.prefill(greet=False, tp=tp)
        prefill.tp = tp
        return prefill.greet(**changes)

    assert "'old'" in (text := refusal(expected_epoch="old")) and f"'{EPOCH}'" in text
    assert "block_size: 2 (decode-0/dp0/tp0) != 4 (prefill-0/tp0)" in refusal(layout=small_layout(block_size=4))
    assert "protocol: sdma" in refusal(layout=small_layout(protocol="device_rdma"))
    assert "prefill rank 3" in refusal(tp_rank=3)
    assert "layers [0, 1]" in refusal(layers=Memory(8, 1).layer_layouts()[:2])
    wrong = Memory(8, 1).layer_layouts()
    wrong[1].tensors[0].block_bytes += 1
    assert "layer 1: ckv has blocks of 33 bytes; decode-0/dp0/tp0 expects 32" in refusal(layers=wrong)
    wrong = Memory(8, 1).layer_layouts()
    del wrong[2].tensors[2]
    assert "layer 2 consists of ckv, k_rope; it must be ckv, k_rope, indexer_key" in refusal(layers=wrong)
    wrong = Memory(8, 1).layer_layouts()
    wrong[0].tensors[0].address = (1 << 64) - 8
    assert "at address 0xfffffffffffffff8" in refusal(layers=wrong)
    wrong[0].tensors[0].kind = 77  # type: ignore[assignment]
    assert "unknown tensor kind 77" in refusal(layers=wrong)
    assert "generation_address" in refusal(generation_address=3)
    assert "without worker_id" in refusal(session_id="")
    node.prefill()  # a good one is welcome after all of them


def test_more_sources_than_the_limit_are_refused_and_a_lost_one_makes_room(node: Node) -> None:
    prefills = [node.prefill() for _ in range(4)]
    assert "4 prefill ranks already" in node.prefill(greet=False).greet()
    prefills[0].connection.close()
    eventually(lambda: node.prefill(greet=False).greet() == "")
    assert node.puller.counters().lost_sources == 1


def test_memory_that_cannot_be_read_refuses_the_hand_shake(node: Node) -> None:
    def unreachable(session: str, sizes: Sequence[int]) -> None:
        raise RuntimeError("link is down")

    node.engine.before_read = unreachable
    assert "cannot read memory of prefill-0/tp0 (session-0): link is down" in node.prefill(greet=False).greet()


def test_malformed_messages_cost_no_thread(node: Node) -> None:
    prefill = node.prefill(greet=False)
    for payload in (b"", b"\xff" * 40, b"x" * (9 << 20)):
        prefill.connection.socket.send(payload)
    prefill.send(wire_pb2.ReadDone(sequence=1))
    prefill.offer(1, [entry("r", [0])])
    assert "no hand-shake" in prefill.errors()[""]
    other = wire_pb2.WireMessage(version=9, hello=prefill.hello())
    prefill.connection.socket.send(other.SerializeToString())
    reply = prefill.answer()
    assert isinstance(reply, wire_pb2.HelloReply) and "version 9" in reply.error
    assert node.puller.counters().bad_messages == 5
    assert prefill.greet() == ""
    node.expect("r", [0], [0])
    assert prefill.publish_all("r", [0]) == {}


def test_releasing_an_unknown_request_is_quiescent_at_once(node: Node) -> None:
    node.puller.release("never seen")
    assert node.events.quiescent.get_nowait() == "never seen"


def test_a_dead_source_fails_its_requests_at_once_and_others_go_on(node: Node) -> None:
    node.expect("r", [0, 1], [0, 1])
    node.expect("s", [2], [2])
    dying, healthy = node.prefill(), node.prefill()
    assert dying.publish(1, [entry("r", [0])]) == {}
    dying.connection.close()
    request, _, error = node.events.next_terminal()
    assert request == "r" and "prefill-0/tp0" in (error or "") and "disconnected" in (error or "")
    assert healthy.publish_all("s", [3]) == {}
    assert node.events.next_terminal() == ("s", 1, None)


def test_silence_beyond_the_lease_fails_the_request(node: Node) -> None:
    node.expect("r", [0], [0], lease_s=0.2)
    assert "sent nothing for 0.2 s; missing contributors: [0]" in (node.events.next_terminal()[2] or "")


def test_another_process_cannot_take_over_a_contributors_part(node: Node) -> None:
    node.expect("r", [0], [0])
    first, second = node.prefill(), node.prefill()
    assert first.publish(1, [entry("r", [0])]) == {}
    assert "another prefill process" in second.publish(0, [entry("r", [0], indexer=[0])])["r"]
    assert first.publish(0, [entry("r", [0], indexer=[0])]) == {}


def test_a_slow_source_does_not_hold_up_another(node: Node) -> None:
    for request in ("r", "s"):
        node.expect(request, [0], [0], contributors=2)
    slow, quick = node.prefill(rank=0, tp=2), node.prefill(rank=1, tp=2)
    go_on = threading.Event()

    def hold(session: str, sizes: Sequence[int]) -> None:
        if session == "session-0":
            assert go_on.wait(10)

    node.engine.before_read = hold
    slow.offer(1, [entry("r", [0])])
    assert quick.publish(0, [entry("s", [0], indexer=[0])]) == {}
    go_on.set()
    assert slow.errors() == {}


def test_every_contributor_must_finish_even_one_with_an_empty_share(node: Node) -> None:
    node.expect("r", [4], [4], contributors=2)
    ranks = [node.prefill(rank=rank, tp=2) for rank in range(2)]
    assert ranks[0].publish_all("r", [3]) == {}
    assert node.events.terminal.empty()
    before = len(node.copied())
    assert ranks[1].publish_all("r", [3]) == {}
    assert len(node.copied()) == before  # one indexer block goes to member 0, and main KV only comes from there
    assert node.events.next_terminal() == ("r", 1, None)
    assert "declared this request finished" in ranks[1].publish(0, [entry("r", [3], indexer=[3])])["r"]


def test_expectations_are_checked(node: Node) -> None:
    with pytest.raises(ValueError, match=r"main blocks \[10\] are not in 0..9"):
        node.expect("r", [10], [0])
    with pytest.raises(ValueError, match=r"indexer blocks \[-1\]"):
        node.expect("r", [0], [-1])
    with pytest.raises(ValueError, match="0 contributors"):
        node.expect("r", [0], [0], contributors=0)
    node.expect("r", [0], [0])
    with pytest.raises(ValueError, match="still expected"):
        node.expect("r", [0], [0])
