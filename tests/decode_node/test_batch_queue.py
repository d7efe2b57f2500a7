"""The queue between the puller's socket and a source's reader: order, end, and waits that a nudge ends."""

from __future__ import annotations

import threading
import time

from sluice.v1 import wire_pb2

from decode_node.batch_queue import Announced, BatchQueue


def batch(sequence: int) -> Announced:
    return Announced(wire_pb2.ReadReady(sequence=sequence), 0.0)


def test_what_waits_is_taken_in_order_and_then_the_queue_is_over() -> None:
    queue = BatchQueue()
    queue.put(batch(1))
    queue.nudge()
    queue.put(batch(2))
    queue.close()
    assert [queue.take(), queue.poll(60.0), queue.poll(60.0), queue.take()] == [batch(1), batch(2), None, None]


def test_a_nudge_ends_one_wait_and_not_the_next() -> None:
    queue = BatchQueue()
    queue.nudge()
    assert queue.poll(60.0) is None
    queue.arm()
    began = time.monotonic()
    assert queue.poll(0.05) is None and time.monotonic() - began >= 0.05
    queue.arm()
    threading.Timer(0.05, queue.nudge).start()
    assert queue.poll(60.0) is None


def test_a_nudge_does_not_hide_what_waits() -> None:
    queue = BatchQueue()
    queue.nudge()
    queue.put(batch(1))
    assert queue.poll(0) == batch(1) and queue.poll(0) is None
    threading.Timer(0.05, queue.put, [batch(2)]).start()
    assert queue.take() == batch(2)


def test_closing_ends_a_wait() -> None:
    queue = BatchQueue()
    threading.Timer(0.05, queue.close).start()
    assert queue.take() is None
    assert queue.poll(60.0) is None
