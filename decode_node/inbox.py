"""What reaches the leader's engine thread from other threads: sessions and its own puller."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Protocol

from decode_node.commands import Report
from decode_node.events import Delivered, Ended, GeneratedToken, Reserved
from decode_node.scheduler import DecodeRequest


class SessionSink(Protocol):
    """Receives one request's events, in order; `Ended` is the last. Called on the engine thread; must not block."""

    def deliver(self, event: Reserved | Delivered | Ended) -> None: ...


@dataclass(frozen=True)
class Submit:
    request: DecodeRequest
    sink: SessionSink


@dataclass(frozen=True)
class FirstToken:
    request_id: str
    token: GeneratedToken


@dataclass(frozen=True)
class Cancel:
    request_id: str
    sink: SessionSink


@dataclass(frozen=True)
class OwnReport:
    report: Report


@dataclass(frozen=True)
class Wake:
    """Nothing but an end to waiting."""


Message = Submit | FirstToken | Cancel | OwnReport | Wake


class Inbox:
    """Any thread puts, the engine thread takes. Nothing here blocks but `take`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def submit(self, request: DecodeRequest, sink: SessionSink) -> None:
        """`sink` then gets Reserved, Delivered..., Ended; or only Ended when the request is refused."""
        self._queue.put(Submit(request, sink))

    def first_token(self, request_id: str, token: GeneratedToken) -> None:
        """Prefill has finished the request's prompt."""
        self._queue.put(FirstToken(request_id, token))

    def cancel(self, request_id: str, sink: SessionSink) -> None:
        """The session of `sink` is gone: ends its request, not another one of the same id. Idempotent."""
        self._queue.put(Cancel(request_id, sink))

    def own_report(self, report: Report) -> None:
        """What rank 0's own puller says."""
        self._queue.put(OwnReport(report))

    def wake(self) -> None:
        """Ends a `take` that waits."""
        self._queue.put(Wake())

    def take(self, wait_s: float) -> list[Message]:
        """Everything that is there, after waiting up to `wait_s` seconds for a first message."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
