"""The job's watch over its actors: starts them, hears what they tell, places lost ones again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from deploy.launcher import DeploymentFailed
from deploy.ray_job_placement import Placement
from deploy.restarts import RestartLimit
from deploy.units import Unit
from engine.config import ConfigError, SluiceConfig

_LOOK_PERIOD_S = 0.5
_PLACING_S = 20.0  # an actor comes to life in some seconds where there is room


class UnitWatch:
    """One unit and the actor that holds it now.

    Invariant (test_a_lost_node_is_replaced): whenever its actor is gone, with its node or alone, the unit is placed
    again; that happens at most `runtime.restarts_per_minute` times in any minute.
    """

    def __init__(self, unit: Unit, actor: Callable[[], Any], config: SluiceConfig, say: Callable[[str], None]) -> None:
        """`actor` makes a new actor; `say` gets one text per event."""
        self.unit = unit
        self.trouble: list[str] = []  # deaths of processes and actors since the start
        self._new_actor, self._config, self._say = actor, config, say
        self._limit = RestartLimit(config.runtime.restarts_per_minute)
        self._actor: Any = None
        self._call: Any = None  # the one call to the actor that is under way
        self._running = False
        self._next = 0.0  # monotonic time of the next thing to do
        self._told_waiting = False

    def look(self) -> None:
        """To be called often. Does not wait. Raises DeploymentFailed when the unit can run on no node."""
        now = time.monotonic()
        if self._call is not None:
            if ray.wait([self._call], timeout=0)[0]:
                self._answered()
            elif not self._running and not self._told_waiting and now >= self._next + _PLACING_S:
                self._told_waiting = True
                self._say(f"{self.unit} is not placed yet")
        elif now >= self._next:
            if self._actor is None:
                self._actor = self._new_actor()
                self._running = self._told_waiting = False
                self._call = self._actor.start.remote(self._config)
            else:
                self._call = self._actor.look.remote()

    def _answered(self) -> None:
        call, self._call = self._call, None
        self._next = time.monotonic() + _LOOK_PERIOD_S
        try:
            answer = ray.get(call)
        except RayActorError as error:
            self._lost(str(error).strip().splitlines()[0])
        except RayTaskError as error:
            self._failed(error.cause)
        else:
            if not self._running:
                self._running = True
                self._say(f"{self.unit.name} is placed on {answer}")
                return
            for event in answer:
                self._tell_trouble(f"{self.unit.name}: {event}")

    def _lost(self, reason: str) -> None:
        self._actor = None
        self._tell_trouble(f"{self.unit.name} is lost: {reason}")
        start = self._limit.next_start(self.unit.name)
        if start is None:
            self._next = float("inf")
            self._say(f"{self.unit.name} was lost too often (runtime.restarts_per_minute) and is not placed again")
        else:
            self._next = start

    def _failed(self, cause: Exception) -> None:
        if isinstance(cause, ConfigError):
            raise DeploymentFailed(f"{self.unit.name} cannot start on its node: {cause}") from None
        raise DeploymentFailed(f"{self.unit.name}: {type(cause).__name__}: {cause}") from None

    def _tell_trouble(self, text: str) -> None:
        self.trouble.append(text)
        self._say(text)

    def ask_to_stop(self, within_s: float) -> Any:
        """The call by which its processes end; None without an actor."""
        return None if self._actor is None else self._actor.stop.remote(within_s)

    def end(self) -> None:
        """Ends the actor, and with it what still runs."""
        if self._actor is not None:
            ray.kill(self._actor)


class Units:
    """All units of a job."""

    def __init__(
        self, units: Sequence[Unit], placement: Placement, config: SluiceConfig, say: Callable[[str], None]
    ) -> None:
        self._watches = [
            UnitWatch(unit, lambda index=index: placement.actor(index), config, say)  # type: ignore[misc]
            for index, unit in enumerate(units)
        ]

    def look(self) -> None:
        """To be called often. Raises DeploymentFailed."""
        for watch in self._watches:
            watch.look()

    def trouble(self) -> list[str]:
        """Every death of a process or an actor since the start."""
        return [text for watch in self._watches for text in watch.trouble]

    def ask_to_stop(self, within_s: float) -> list[Any]:
        """The calls that end all processes, each within so many seconds."""
        calls = [watch.ask_to_stop(within_s) for watch in self._watches]
        return [call for call in calls if call is not None]

    def end(self) -> None:
        """Ends all actors."""
        for watch in self._watches:
            watch.end()
