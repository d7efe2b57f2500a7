"""Keeps the set of child processes: starts them, notices their deaths, ends them all within a deadline."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from deploy.child import Child, ChildSpec

_LAST_LINES = 15
_LOG_LINES = 200
_LEVELS = (" WARNING ", " ERROR ", " CRITICAL ")


class ChildDied(Exception):
    """A process ended which should be running; the text says which, how, and shows the end of its log."""


@dataclass(frozen=True)
class StopPhase:
    """Who is stopped together: children whose names begin with one of `prefixes`.

    They get SIGTERM and `seconds` to end; with 0 seconds they are killed at once, which is for processes that hold
    nothing worth saving and are slow to end.
    """

    prefixes: tuple[str, ...]
    seconds: float


class Supervisor:
    """All children of one launcher.

    Invariant: after `stop` no child runs. A death is reported by `deaths` exactly once.
    """

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._reported: set[str] = set()

    def start(self, specs: Iterable[ChildSpec]) -> None:
        """Starts processes, without waiting for anything. Main thread only."""
        for spec in specs:
            self._children.append(Child(spec))

    def start_again(self, specs: Iterable[ChildSpec]) -> None:
        """Starts processes in the place of dead ones of the same names; their logs go on. Main thread only."""
        for spec in specs:
            self._children = [child for child in self._children if child.spec.name != spec.name]
            self._reported.discard(spec.name)
            self._children.append(Child(spec, continue_log=True))

    def pids(self) -> dict[str, int]:
        """Process ids by name, of children that run."""
        return {child.spec.name: child.pid for child in self._children if child.exit_code is None}

    def last_warning(self, name: str) -> str | None:
        """The last line of this child's log that is a warning or worse; None if there is none."""
        lines = [line for child in self._children if child.spec.name == name for line in child.last_lines(_LOG_LINES)]
        return next((line for line in reversed(lines) if any(level in line for level in _LEVELS)), None)

    def deaths(self) -> list[Child]:
        """Children that have ended since the last call."""
        dead = [c for c in self._children if c.spec.name not in self._reported and c.exit_code is not None]
        self._reported.update(child.spec.name for child in dead)
        return dead

    def check(self) -> None:
        """Raises ChildDied if one has ended since the last call."""
        dead = self.deaths()
        if dead:
            raise ChildDied("\n".join(obituary(child) for child in dead))

    def stop(self, phases: Sequence[StopPhase]) -> list[str]:
        """Ends all children, phase by phase; what still runs after the last one is killed.

        Returns the names of those that were asked to end and did not.
        """
        for phase in phases:
            chosen = [child for child in self._children if child.spec.name.startswith(phase.prefixes)]
            for child in chosen:
                child.terminate() if phase.seconds else child.kill_group()
            deadline = time.monotonic() + phase.seconds
            for child in chosen:
                child.wait(deadline)
        return self.kill()

    def kill_some(self, names: Collection[str]) -> None:
        """Kills these children, and what they started. Their deaths are not reported."""
        for child in self._children:
            if child.spec.name in names:
                child.kill_group()
                self._reported.add(child.spec.name)

    def kill(self) -> list[str]:
        """Kills every child, and what it started. Returns the names of those that were still running."""
        running = [child for child in self._children if child.exit_code is None]
        for child in self._children:
            child.kill_group()
        return [child.spec.name for child in running]


def obituary(child: Child) -> str:
    """Which process died, how, and the end of its log."""
    head = f"{child.spec.name} (pid {child.pid}) ended: {child.describe_exit()}"
    if child.spec.log is None:
        return head
    lines = child.last_lines(_LAST_LINES)
    text = "".join(f"\n  | {line}" for line in lines) if lines else "\n  (it logged nothing)"
    return f"{head}; log {child.spec.log}:{text}"
