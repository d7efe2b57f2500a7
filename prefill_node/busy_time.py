"""How long something was going on that several threads take part in."""

from __future__ import annotations

import threading
import time


class BusyTime:
    """`with busy:` around the work of a thread. Thread safe.

    Invariant: time in which several threads were at work counts once (test_time_of_overlapping_work_counts_once).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers = 0
        self._began = self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Up to the last time that nobody was at work."""
        return self._seconds

    def __enter__(self) -> None:
        with self._lock:
            if not self._workers:
                self._began = time.monotonic()
            self._workers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._workers -= 1
            if not self._workers:
                self._seconds += time.monotonic() - self._began
