"""Does anything grow? Samples of every process's own memory."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import psutil

from tests.chaos.disturb import name_of
from tests.chaos.record import Record

MIB = 1 << 20
_PERIOD_S = 2.0
_WARM_S = 20.0  # a process's first seconds, in which it is not yet what it will be
_LEAST_SAMPLES = 20
_SHARE, _LEAST_GROWTH = 0.20, 32 * MIB


class MemoryWatch:
    """Resident memory of one process without what it shares (device memory and the pool are shared files)."""

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes = processes
        self._samples: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5.0)

    def judge(self, record: Record) -> dict[str, tuple[float, float]]:
        """Bytes in the middle and at the end of the life of each process that lived long enough, by its name.

        Growth over the second half of its life is a violation.
        """
        judged = {}
        for (name, pid), sizes in sorted(self._samples.items()):
            if len(sizes) < _LEAST_SAMPLES:
                continue
            middle, end = _middle_and_end(sizes)
            judged[f"{name} (pid {pid})"] = middle, end
            told = f"memory of {name} (pid {pid}): {middle / MIB:.0f} -> {end / MIB:.0f} MiB"
            if end - middle > max(_SHARE * middle, _LEAST_GROWTH):
                record.violation(f"it grows: {told}")
            else:
                record.tell(told)
        return judged

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            now = time.time()
            for process in self._processes():
                try:
                    memory, age = process.memory_info(), now - process.create_time()
                except psutil.Error:
                    continue
                if age > _WARM_S:
                    self._samples[name_of(process), process.pid].append(memory.rss - memory.shared)


def _middle_and_end(sizes: list[int]) -> tuple[float, float]:
    quarter = len(sizes) // 4
    return statistics.median(sizes[quarter : 2 * quarter]), statistics.median(sizes[-quarter:])
