"""What happened in a run: events in order, and how each request ended."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path


class Record:
    """Thread safe. A violation is an event that must not happen; everything else is only told."""

    def __init__(self, log: Path) -> None:
        """Events are also written to the file `log` as they come, so that a run can be watched."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file = log.open("w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.events: list[str] = []
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.meta_deaths: list[float] = []  # monotonic times

    def tell(self, text: str) -> None:
        with self._lock:
            self.events.append(f"{time.monotonic() - self._began:8.2f}  {text}")
            self._file.write(self.events[-1] + "\n")

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def violation(self, text: str) -> None:
        self.tell(f"VIOLATION {text}")
        with self._lock:
            self.violations.append(text)

    def meta_died(self) -> None:
        with self._lock:
            self.meta_deaths.append(time.monotonic())

    def meta_was_down(self, since: float, recovery_s: float) -> bool:
        """Whether a death of the meta server explains a connection that broke, or was refused, since then."""
        with self._lock:
            return any(death >= since - recovery_s for death in self.meta_deaths)
