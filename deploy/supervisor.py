"""Keeps the set of child processes: starts them, notices their deaths, ends them all within a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from deploy.child import Child, ChildSpec

_LAST_LINES = 15


class ChildDied(Exception):
    """A process ended which should be running; the text says which, how, and shows the end of its log."""


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

    def pids(self) -> dict[str, int]:
        """Process ids by name, of children that run."""
        return {child.spec.name: child.pid for child in self._children if child.exit_code is None}

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

    def stop(self, phases: Sequence[tuple[Sequence[str], float]]) -> list[str]:
        """Ends children: for each phase, SIGTERM to those whose names begin with a given prefix, then up to so many
        seconds to end; what still runs after the last phase is killed. Returns the names of those that were killed.
        """
        for prefixes, seconds in phases:
            chosen = [child for child in self._children if child.spec.name.startswith(tuple(prefixes))]
            for child in chosen:
                child.terminate()
            deadline = time.monotonic() + seconds
            for child in chosen:
                child.wait(deadline)
        return self.kill()

    def kill(self) -> list[str]:
        """Kills every child, and what it started. Returns the names of those that were still running."""
        running = [child for child in self._children if child.exit_code is None]
        for child in self._children:
            child.kill_group()
        return [child.spec.name for child in running]


def obituary(child: Child) -> str:
    """Which process died, how, and the end of its log."""
    lines = child.last_lines(_LAST_LINES)
    text = "".join(f"\n  | {line}" for line in lines) if lines else "\n  (it logged nothing)"
    return f"{child.spec.name} (pid {child.pid}) ended: {child.describe_exit()}; log {child.spec.log}:{text}"
