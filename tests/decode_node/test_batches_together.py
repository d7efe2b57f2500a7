"""Batches of a source that wait when their reader comes to them are read in one go; each is answered for itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sluice.v1 import wire_pb2

from decode_node.batch_reader import TOGETHER
from decode_node.pull_plan import PullPlanner, SourceMap
from tests.decode_node.pull_rig import Node, Prefill
from tests.kv_peers import CKV, K_ROPE, LAYOUT, SLOT_OF_LAYER, Stats, entry, eventually
from transfer.checksum import checksums
from transfer.memfabric import Copies

SINGLE = 48  # bytes of a block of ckv and k_rope
WORD = 8


@contextmanager
def reader_held(node: Node, prefill: Prefill) -> Iterator[None]:
    """Meanwhile the reader of this source is busy; what is offered waits, and is there when the block ends.

    The first answer is then that of the batch it was busy with, one in the slot of layer 1.
    """
    before, held, go_on = node.engine.before_read, threading.Event(), threading.Event()

    def hold(session: str, sizes: Sequence[int]) -> None:
        node.engine.before_read = before
        held.set()
        assert go_on.wait(10)

    node.expect("first", [9], [9])
    node.engine.before_read = hold
    prefill.offer(1, [entry("first", [7])])
    assert held.wait(10)
    yield
    prefill.send(prefill.hello())  # counted as unexpected: what was sent before has been received, too
    eventually(lambda: node.puller.counters().bad_messages == 1)
    go_on.set()


def test_batches_that_wait_are_read_in_one_go(node: Node) -> None:
    node.expect("r", [0, 1], [0, 1])
    prefill = node.prefill()
    with reader_held(node, prefill):
        for layer in range(LAYOUT.num_layers):
            indexer = [0, 1] if layer in LAYOUT.indexer_layers else []
            last = ["r"] if layer == LAYOUT.num_layers - 1 else []
            prefill.offer(layer, [entry("r", [2, 3], indexer=indexer)], last)
    assert [prefill.errors() for _ in range(1 + LAYOUT.num_layers)] == [{}] * (1 + LAYOUT.num_layers)
    assert node.events.next_terminal() == ("r", 1, None)
    assert node.memory.block(1, CKV, 1) == prefill.memory.block(1, CKV, 3)
    (_, sizes), (_, words) = node.engine.reads[-2:]
    assert len(sizes) > LAYOUT.num_layers and words == [WORD] * LAYOUT.num_layers
    assert node.puller.counters().batches == 1 + LAYOUT.num_layers


def test_the_next_batches_are_checked_while_bytes_move(node: Node) -> None:
    """One that does not fit is refused before the read of the first is over."""
    node.expect("s", [0], [0])
    prefill = node.prefill()
    refused: list[tuple[str, int, str | None]] = []

    def look(session: str, sizes: Sequence[int]) -> None:
        if not refused:
            refused.append(node.events.terminal.get_nowait())

    with reader_held(node, prefill):
        node.engine.after_read = look
        prefill.offer(2, [entry("s", [0], start=3, indexer=[0])])
    assert prefill.errors() == {}
    assert "were never announced" in prefill.errors()["s"]
    assert [request for request, _, _ in refused] == ["s"]


def test_a_defect_while_a_batch_is_checked_costs_that_batch_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered, and no claim is left, not even of the entry before."""
    for number, request in enumerate("rst"):
        node.expect(request, [number], [number])
    prefill = node.prefill()
    plan = PullPlanner.entry

    def defective(planner: PullPlanner, source: SourceMap, layer: int, one: wire_pb2.ReadEntry, *rest: Any) -> object:
        if one.request_id == "s":
            raise IndexError("a defect")
        return plan(planner, source, layer, one, *rest)

    monkeypatch.setattr(PullPlanner, "entry", defective)
    with reader_held(node, prefill):
        prefill.offer(0, [entry("r", [0], indexer=[0])])
        prefill.offer(1, [entry("r", [0]), entry("s", [0])])
        prefill.offer(2, [entry("t", [0], indexer=[0])])
    assert [prefill.errors() for _ in range(4)] == [{}, {}, {"": "IndexError('a defect')"}, {}]
    for request in "rst":
        node.puller.release(request)
    assert {node.events.quiescent.get(timeout=5) for _ in "rst"} == {"r", "s", "t"}


def test_of_batches_read_in_one_go_a_stale_one_fails_alone(node: Node) -> None:
    node.expect("r", [0], [0])
    node.expect("s", [1], [1])
    prefill = node.prefill()
    slots = SLOT_OF_LAYER[0], SLOT_OF_LAYER[1]
    assert slots[0] != slots[1]
    with reader_held(node, prefill):
        prefill.offer(0, [entry("r", [0], indexer=[0])])
        prefill.offer(1, [entry("s", [0])])
        prefill.words[slots[1]] += 1
    assert "first" in prefill.errors()  # it is in that slot, too
    assert prefill.errors() == {}
    assert "reused slot" in prefill.errors()["s"]
    assert node.puller.counters().stale_generation == 2


def test_batches_that_cannot_be_read_in_one_go_are_read_one_by_one(node: Node) -> None:
    node.expect("r", [0], [0])
    node.expect("s", [1], [1])
    prefill = node.prefill()

    def fail(session: str, sizes: Sequence[int]) -> None:
        if sum(sizes) != SINGLE and WORD not in sizes:
            raise RuntimeError("code -1")

    with reader_held(node, prefill):
        node.engine.after_read = lambda session, sizes: setattr(node.engine, "before_read", fail)
        prefill.offer(0, [entry("r", [0], indexer=[0])])  # fails alone as well: it has indexer keys
        prefill.offer(1, [entry("s", [0])])
    assert prefill.errors() == {}
    assert "code -1" in prefill.errors()["r"]
    assert prefill.errors() == {}


def test_a_request_ends_after_those_of_its_batches_that_are_read_again(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def damage(session: str, sizes: Sequence[int]) -> None:
        if sum(sizes) == SINGLE or WORD in sizes:
            return
        node.engine.after_read = lambda session, sizes: None
        node.memory.buffers[1, CKV][0] = bytes([node.memory.buffers[1, CKV].raw[0] ^ 1])

    with reader_held(node, prefill):
        node.engine.after_read = damage
        for layer in range(LAYOUT.num_layers):
            one = entry("r", [2], indexer=[2] if layer in LAYOUT.indexer_layers else [])
            if layer == 1:
                one.summed_main.append(0)
                tensors = [prefill.memory.tensor(1, kind) for kind in (CKV, K_ROPE)]
                sizes = [each.block_bytes for each in tensors]
                one.main_sums.extend(checksums([each.address + 2 * each.block_bytes for each in tensors], sizes))
            prefill.offer(layer, [one], ["r"] if layer == LAYOUT.num_layers - 1 else [])
    assert [prefill.errors() for _ in range(1 + LAYOUT.num_layers)] == [{}] * (1 + LAYOUT.num_layers)
    assert node.events.next_terminal() == ("r", 1, None)
    assert node.puller.counters().wrong_checksums == node.puller.counters().read_retries == 1


def test_what_was_read_together_with_a_new_beginning_does_not_count(node: Node) -> None:
    """It is over before the new beginning is heard of, so that this discards it."""
    node.expect("r", [0], [0])
    prefill = node.prefill()
    again = entry("r", [0], indexer=[0])
    again.begun_again = 1
    with reader_held(node, prefill):
        prefill.offer(1, [entry("r", [0])])
        prefill.offer(0, [again])
    assert [prefill.errors() for _ in range(3)] == [{}] * 3
    assert "blocks 0..0 of layer 1 are missing" in prefill.publish(2, [again], ["r"])["r"]


def test_a_batch_whose_destination_comes_late_keeps_no_other_waiting(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    with reader_held(node, prefill):
        prefill.offer(1, [entry("r", [0])])
        prefill.offer(2, [entry("late", [0], indexer=[0])])
    assert prefill.errors() == prefill.errors() == {}
    node.expect("late", [1], [1])
    assert prefill.errors() == {}


@pytest.mark.parametrize("count", [TOGETHER + 1, 3 * TOGETHER])
def test_a_long_queue_is_read_part_by_part(node: Node, count: int) -> None:
    prefill = node.prefill()
    for number in range(count):
        node.expect(f"r{number}", [number % 9], [number % 9])
    with reader_held(node, prefill):
        for number in range(count):
            prefill.offer(number % LAYOUT.num_layers, [entry(f"r{number}", [], start=0)])
    assert [prefill.errors() for _ in range(1 + count)] == [{}] * (1 + count)


def test_two_chunks_of_a_layer_that_come_together_are_in_order(node: Node) -> None:
    node.expect("r", [0, 1], [0, 1])
    prefill = node.prefill()
    with reader_held(node, prefill):
        prefill.offer(1, [entry("r", [2])])
        prefill.offer(1, [entry("r", [3], start=1)])
    assert [prefill.errors() for _ in range(3)] == [{}] * 3


def test_a_lease_that_ends_soon_cuts_no_other_batch_short(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may take 5 s here."""
    for number, request in enumerate("rst"):
        node.expect(request, [number], [number])
    prefill = node.prefill()
    real, deadlines = node.engine.read, []

    def read(session: str, copies: Copies, *, deadline_s: float, then: Copies | None = None, **rest: Any) -> Stats:
        if then is not None:
            deadlines.append(deadline_s)
            if deadline_s < 5.0:
                node.engine.busy.add(session)
                raise TimeoutError("its deadline is over")
        return real(session, copies, deadline_s=deadline_s, then=then, **rest)

    with reader_held(node, prefill):
        monkeypatch.setattr(node.engine, "read", read)
        prefill.offer(0, [entry("r", [0], indexer=[0])], lease_ms=4_000)
        prefill.offer(1, [entry("s", [0])], lease_ms=60_000)
        prefill.offer(2, [entry("t", [0], indexer=[0])], lease_ms=60_000)
    assert prefill.errors() == {}
    assert "r" in prefill.errors()
    assert [prefill.errors(), prefill.errors()] == [{}, {}]
    assert deadlines[-1] == 2 * 5.0


def test_a_lease_that_ran_down_during_the_read_before_cuts_no_other_batch_short(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read may take 5 s here, which the first of the two has when it is checked, but not when it is its turn."""
    for number, request in enumerate("rs"):
        node.expect(request, [number], [number])
    prefill = node.prefill()
    real, deadlines = node.engine.read, []

    def read(session: str, copies: Copies, *, deadline_s: float, then: Copies | None = None, **rest: Any) -> Stats:
        if then is not None:
            deadlines.append(deadline_s)
        return real(session, copies, deadline_s=deadline_s, then=then, **rest)

    def last_long(session: str, sizes: Sequence[int]) -> None:
        node.engine.after_read = lambda session, sizes: None
        time.sleep(0.5)

    monkeypatch.setattr(node.engine, "read", read)
    with reader_held(node, prefill):
        node.engine.after_read = last_long
        prefill.offer(0, [entry("r", [0], indexer=[0])], lease_ms=5_400)
        prefill.offer(1, [entry("s", [0])], lease_ms=60_000)
    assert [prefill.errors() for _ in range(3)] == [{}] * 3
    assert 0 < deadlines[1] < 5.0 and deadlines[2] == 5.0


def test_what_was_read_well_is_answered_before_others_are_tried_again(node: Node) -> None:
    node.expect("r", [0], [0])
    node.expect("s", [1], [1])
    prefill = node.prefill()
    answered = threading.Event()
    damaged = entry("s", [0])
    damaged.summed_main.append(0)
    damaged.main_sums.extend([1, 2])

    def hold(session: str, sizes: Sequence[int]) -> None:
        if sum(sizes) == SINGLE:
            assert answered.wait(20)

    with reader_held(node, prefill):
        node.engine.after_read = lambda session, sizes: setattr(node.engine, "before_read", hold)
        prefill.offer(1, [damaged])
        prefill.offer(0, [entry("r", [0], indexer=[0])])
    assert prefill.errors() == prefill.errors() == {}
    answered.set()
    assert "checksums are wrong" in prefill.errors()["s"]
