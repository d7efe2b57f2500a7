"""What a decode rank's pulls have done so far."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PullCounters:
    bytes_pulled: int = 0
    descriptors: int = 0  # copies planned
    reads: int = 0  # copies made, after merging adjacent ones
    batches: int = 0  # read and acknowledged without any error
    failures: int = 0  # batches with an error for at least one request
    read_retries: int = 0  # attempts after the first one
    wrong_checksums: int = 0  # each is read again
    stale_generation: int = 0  # batches copied and thrown away
    duplicate_batches: int = 0  # ignored
    bad_messages: int = 0
    lost_sources: int = 0


class Counts:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def snapshot(self) -> PullCounters:
        with self._lock:
            return PullCounters(**self._values)
