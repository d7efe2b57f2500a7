"""One batch read by the puller: overwritten, late, repeated, failing or stuck, and what is tried again."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Sequence

import pytest
from sluice.v1 import wire_pb2

from decode_node.sequences import Sequences
from tests.decode_node.pull_rig import GENERATION, Node
from tests.kv_peers import (
    CKV,
    K_ROPE,
    SLOT_OF_LAYER,
    entry,
    eventually,
)
from transfer.wire import decode


def test_a_copy_that_prefill_overwrote_meanwhile_is_discarded(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def overwrite(session: str, sizes: Sequence[int]) -> None:
        prefill.words[SLOT_OF_LAYER[1]] += 1

    node.engine.before_read = overwrite
    error = prefill.publish(1, [entry("r", [0])])["r"]
    assert "reused slot 1" in error and f"announced {GENERATION}" in error
    assert node.events.next_terminal()[2] == error
    assert node.puller.counters().stale_generation == 1


def test_a_batch_past_its_lease_is_not_read(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    assert "lease ended" in prefill.publish(1, [entry("r", [0])], lease_ms=0)["r"]
    assert node.copied() == []


def test_no_batch_is_read_twice(node: Node) -> None:
    """Prefill may reuse the buffer of an acknowledged batch without a new generation."""
    node.expect("r", [1], [1])
    prefill = node.prefill()
    assert prefill.publish(1, [entry("r", [0])], sequence=9) == {}
    for kind in (CKV, K_ROPE):  # as prefill does when nobody is left to wait for
        ctypes.memset(prefill.memory.buffers[1, kind], 0xEE, len(prefill.memory.buffers[1, kind]))
    copied = node.copied()
    prefill.offer(1, [entry("r", [0])], sequence=9)
    eventually(lambda: node.puller.counters().duplicate_batches == 1)
    assert prefill.publish(2, [entry("r", [0], indexer=[0])], sequence=8) == {}  # late, but not seen before
    assert node.copied()[: len(copied)] == copied and len(node.copied()) == len(copied) + 1


def test_numbers_of_batches_are_remembered_in_bounded_memory() -> None:
    known = Sequences()
    assert all(known.is_new(number) for number in range(10_000, 0, -1) if number > 6_000)
    assert not known.is_new(10_000)
    assert all(known.is_new(number) for number in range(10_001, 30_000))
    assert not any(known.is_new(number) for number in range(1, 30_000))


def test_an_engine_failure_fails_the_batch_and_names_it(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def fail(session: str, sizes: Sequence[int]) -> None:
        raise RuntimeError("code -3101")

    node.engine.before_read = fail
    error = prefill.publish(1, [entry("r", [0])])["r"]
    assert error == "reading 48 bytes of layer 1 from prefill-0/tp0 failed: code -3101"
    assert node.events.next_terminal() == ("r", 1, error)


def test_blocks_stay_in_quarantine_while_a_read_is_in_flight(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    started, go_on = threading.Event(), threading.Event()

    def hold(session: str, sizes: Sequence[int]) -> None:
        started.set()
        assert go_on.wait(10)

    node.engine.before_read = hold
    prefill.offer(1, [entry("r", [0])])
    assert started.wait(5)
    node.puller.release("r")
    node.puller.release("r")
    with pytest.raises(ValueError, match="in flight"):
        node.expect("r", [0], [0])
    with pytest.raises(queue.Empty):
        node.events.quiescent.get(timeout=0.1)
    go_on.set()
    assert node.events.quiescent.get(timeout=5) == "r"
    prefill.errors()
    assert node.events.quiescent.empty()
    assert node.events.terminal.empty()  # nobody wants to know after the release
    node.expect("r", [0], [0])


def test_a_read_given_up_by_the_engine_keeps_its_quarantine_until_it_is_over(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def time_out(session: str, sizes: Sequence[int]) -> None:
        node.engine.busy.add(session)
        raise TimeoutError("5 s are over")

    node.engine.before_read = time_out
    assert "5 s are over" in prefill.publish(1, [entry("r", [0])])["r"]
    node.puller.release("r")
    with pytest.raises(queue.Empty):
        node.events.quiescent.get(timeout=0.2)
    node.expect("s", [1], [1])
    node.engine.before_read = lambda session, sizes: None
    node.engine.forgotten.clear()
    assert prefill.publish(1, [entry("s", [1])]) == {}
    assert node.engine.forgotten == []  # while the old read hangs, the link is not opened again
    node.engine.busy.clear()
    assert node.events.quiescent.get(timeout=5) == "r"


def test_the_link_is_opened_again_after_a_failed_read(node: Node) -> None:
    node.expect("r", [0], [0])
    node.expect("s", [1], [1])
    prefill = node.prefill()
    assert node.engine.forgotten == ["session-0"]  # a new peer may have an address an old one had

    def fail(session: str, sizes: Sequence[int]) -> None:
        raise RuntimeError("an earlier read missed its deadline")

    node.engine.before_read = fail
    assert prefill.publish(1, [entry("r", [0])])["r"]
    node.engine.before_read = lambda session, sizes: None
    assert prefill.publish(1, [entry("s", [1])]) == {}
    assert prefill.publish(0, [entry("s", [1], indexer=[1])]) == {}
    assert node.engine.forgotten == ["session-0"] * 4  # at the hand-shake, for the retries, and for the next batch


def test_a_transient_read_failure_is_tried_again(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    failures = iter([RuntimeError("code -1"), RuntimeError("code -2")])

    def fail_twice(session: str, sizes: Sequence[int]) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure

    node.engine.before_read = fail_twice
    assert prefill.publish_all("r", [0]) == {}
    assert node.events.next_terminal() == ("r", 1, None)
    assert node.puller.counters().read_retries == 2
    assert node.memory.block(1, CKV, 0) == prefill.memory.block(1, CKV, 0)


def test_retries_stay_inside_the_lease(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def fail(session: str, sizes: Sequence[int]) -> None:
        raise RuntimeError("code -1")

    node.engine.before_read = fail
    assert "code -1" in prefill.publish(1, [entry("r", [0])], lease_ms=100)["r"]
    assert node.puller.counters().read_retries == 1  # after 50 ms; the next one would begin after 150


def test_a_stopped_process_does_not_keep_links_to_others_from_being_opened(node: Node) -> None:
    stopped = node.prefill(greet=False)
    stopped.send(stopped.hello())
    assert stopped.connection.socket.poll(5_000)  # it is asked for a sign of life, and gives none
    other = node.prefill(rank=0)
    assert node.engine.reads == [("session-0", [8])], "the link to the stopped one was not even tried"
    node.expect("r", [1], [1])
    assert other.publish_all("r", [0]) == {}
    bodies = []
    while not bodies or isinstance(bodies[-1], wire_pb2.Ping):
        assert stopped.connection.socket.poll(5_000)
        bodies.append(decode(stopped.connection.socket.recv()))
    assert isinstance(bodies[-1], wire_pb2.HelloReply) and "no sign of life" in bodies[-1].error
    assert len(bodies) > 3, "a lost question is repeated"
