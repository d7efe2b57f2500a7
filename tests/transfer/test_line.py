"""Messages between processes: whole, bounded in time, and an end that is noticed."""

from __future__ import annotations

import struct
import threading
import time
from array import array

import pytest

from transfer.line import Line


@pytest.fixture
def ends():
    ours, theirs = Line.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("count", [0, 1, 10_000, 1_000_000])
def test_messages_of_any_length_arrive_whole(ends, count):
    ours, theirs = ends
    message = ("save", array("Q", range(count)))
    sender = threading.Thread(target=ours.send, args=(message,))
    sender.start()
    assert theirs.receive(until=time.monotonic() + 10) == message
    sender.join()
    theirs.send(None)
    assert ours.receive() is None


def test_an_answer_that_does_not_come_in_time_is_not_waited_for(ends):
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        ends[0].receive(until=started + 0.1)
    assert 0.1 <= time.monotonic() - started < 2
    with pytest.raises(TimeoutError):
        ends[0].receive(until=started)


def test_a_message_that_is_not_taken_is_given_up_in_time(ends):
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        ends[0].send(bytes(1 << 24), until=started + 0.1)
    assert time.monotonic() - started < 2


def test_half_a_message_is_not_waited_for_either(ends):
    ours, theirs = ends
    with pytest.raises(TimeoutError):
        theirs.send(bytes(1 << 24), until=time.monotonic() + 0.1)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        ours.receive(until=started + 0.1)
    assert time.monotonic() - started < 2


def test_the_end_of_the_other_process_is_noticed(ends):
    ours, theirs = ends
    threading.Timer(0.1, theirs.close).start()
    with pytest.raises((EOFError, OSError)):
        ours.receive(until=time.monotonic() + 10)
    with pytest.raises(OSError):
        ours.send("more")


def test_what_is_no_message_is_an_error_of_the_line(ends):
    ours, theirs = ends
    theirs._socket.sendall(struct.pack("=Q", 5) + b"\xff" * 5)
    with pytest.raises(OSError, match="no message"):
        ours.receive(until=time.monotonic() + 10)
