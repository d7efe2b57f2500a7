"""The announcements of one source on their way from the socket's thread to the thread that reads them."""

from __future__ import annotations

import queue
from typing import NamedTuple

from sluice.v1 import wire_pb2


class Announced(NamedTuple):
    """A batch, and when its lease ends by this rank's clock, in monotonic seconds."""

    batch: wire_pb2.ReadReady
    lease_end: float


class BatchQueue:
    """Batches in the order they came. One thread takes them; any may do the rest."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Announced | None] = queue.SimpleQueue()  # None: look at what follows
        self._closed = False
        self._nudged = False

    def put(self, announced: Announced) -> None:
        self._items.put(announced)

    def close(self) -> None:
        """No more will come: those that wait are still taken, then there are none."""
        self._closed = True
        self._items.put(None)

    def nudge(self) -> None:
        """From now on nothing is waited for, until ``arm``."""
        self._nudged = True
        self._items.put(None)

    def arm(self) -> None:
        """Forgets earlier nudges."""
        self._nudged = False

    def take(self) -> Announced | None:
        """The next one; None when it is closed and empty."""
        return self._get(None)

    def poll(self, timeout_s: float) -> Announced | None:
        """One that waits, or comes within so many seconds and before a nudge."""
        return self._get(max(0.0, timeout_s))

    def _get(self, timeout_s: float | None) -> Announced | None:
        while True:
            wait = not (self._closed or timeout_s == 0 or (timeout_s is not None and self._nudged))
            try:
                item = self._items.get(wait, timeout_s)
            except queue.Empty:
                return None
            if item is not None:
                return item
