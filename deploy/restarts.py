"""Starting dead processes again: which ones together, when, and how often."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.child import ChildSpec

_WINDOW_S = 60.0
_FIRST_DELAY_S = 0.5


class RestartLimit:
    """When a unit may start again after a death.

    Invariant (test_a_unit_that_keeps_dying_is_given_up): no unit is started again more often than `per_minute` times
    in any minute; the delay doubles with each restart of that minute.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._restarts: dict[str, deque[float]] = defaultdict(deque)

    def next_start(self, unit: str) -> float | None:
        """When to start a unit that has just died (a time of the clock); None = not any more."""
        now, recent = self._clock(), self._restarts[unit]
        while recent and recent[0] <= now - _WINDOW_S:
            recent.popleft()
        if len(recent) >= self._per_minute:
            return None
        start = now + _FIRST_DELAY_S * 2.0 ** len(recent)
        recent.append(start)
        return start


def unit_of(name: str) -> str:
    """Which processes live and die together: the TP ranks of a prefill group or of one DP rank, others alone."""
    return name.rsplit("/tp", 1)[0]


class Units:
    """The processes of a deployment by unit."""

    def __init__(self, specs: Sequence[ChildSpec], run_dir: Path) -> None:
        self._run_dir = run_dir
        self._specs: dict[str, list[ChildSpec]] = defaultdict(list)
        for spec in specs:
            self._specs[unit_of(spec.name)].append(spec)

    def names(self, unit: str) -> list[str]:
        return [spec.name for spec in self._specs[unit]]

    def specs(self, unit: str) -> list[ChildSpec]:
        """To start the whole unit again; forgets where its ranks met, which would mislead the new ones."""
        Path(self._run_dir, f"{unit.replace('/', '.')}.rendezvous").unlink(missing_ok=True)
        return self._specs[unit]
