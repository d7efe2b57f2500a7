"""A launcher's watch over a deployment that runs: tells of deaths, and starts what died again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from deploy import processes
from deploy.child import ChildSpec
from deploy.resolve import Run
from deploy.restarts import RestartLimit, Units, unit_of
from deploy.supervisor import Supervisor, obituary
from transfer import hostcann


class DeploymentLost(Exception):
    """The deployment cannot go on; the text says which process died and why."""


class Watch:
    """Every death is told once, and the logs are kept. With `runtime.restart`, the dead process starts again together
    with its unit.

    A worker comes back as a new peer, with an epoch of its own, and registers; nobody else is restarted for it
    (test_a_dead_worker_group_is_started_again_and_nobody_else). The other ranks of its group are killed first: they
    would wait for it in vain.
    """

    def __init__(
        self, run: Run, specs: Sequence[ChildSpec], supervisor: Supervisor, say: Callable[[str], None]
    ) -> None:
        """`specs` are the children of `supervisor`; `say` gets one text per event."""
        self._run = run
        self._supervisor = supervisor
        self._say = say
        self._restart = run.config.runtime.restart
        self._limit = RestartLimit(run.config.runtime.restarts_per_minute)
        self._units = Units(specs, run.run_dir)
        self._due: dict[str, float] = {}  # monotonic times by unit

    def look(self) -> None:
        """To be called often. Raises DeploymentLost when the meta server is gone for good."""
        for child in self._supervisor.deaths():
            self._run.keep()
            self._say(obituary(child))
            unit = unit_of(child.spec.name)
            if unit in self._due:
                continue
            start = self._limit.next_start(unit) if self._restart else None
            if start is not None:
                self._due[unit] = start
                self._supervisor.kill_some(self._units.names(unit))
            elif unit == processes.META_SERVER:
                raise DeploymentLost(f"the deployment cannot go on without its meta server\n{obituary(child)}")
            elif self._restart:
                self._say(f"{unit} died too often (runtime.restarts_per_minute) and is not started again")
        for unit in [unit for unit, due in self._due.items() if due <= time.monotonic()]:
            del self._due[unit]
            hostcann.sweep(self._run.device_root, keep=True)  # or the memory of the dead would fill the host in the end
            self._say(f"starting {unit} again")
            self._supervisor.start_again(self._units.specs(unit))
