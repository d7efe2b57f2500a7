"""What the job does about one unit, told by its actor's answers; tests/ray has real actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from deploy import ray_job_watch
from deploy.launcher import DeploymentFailed
from deploy.ray_job_watch import UnitWatch
from deploy.units import units
from engine.config import ConfigError, build_config

HOST = "10.0.0.7"


class Actor:
    """Answers calls from a script: what a call returns, or an exception with which it ends."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.start = self.look = self.stop = self

    def remote(self, *_: Any) -> Any:
        return self._answers.pop(0) if self._answers else []


class Clock:
    """In place of time and of what `ray` does with calls: every call is answered at once."""

    def __init__(self) -> None:
        self.now = time.monotonic()  # limits of restarts count from here on
        self.killed: list[Any] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return calls, []

    def get(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_job_watch, "time", clock)
    monkeypatch.setattr(ray_job_watch, "ray", clock)
    return clock


def watched(new_actor: Callable[[], Actor], restarts_per_minute: int = 5) -> tuple[UnitWatch, list[str]]:
    config = build_config({"model": {"path": "/models/glm"}, "runtime": {"restarts_per_minute": restarts_per_minute}})
    said: list[str] = []
    return UnitWatch(units(config)[0], new_actor, config, said.append), said


def pass_by(watch: UnitWatch, clock: Clock, seconds: float) -> None:
    for _ in range(int(seconds / 0.25)):
        clock.now += 0.25
        watch.look()


def test_a_unit_that_is_lost_too_often_is_not_placed_again(clock: Clock) -> None:
    actors: list[Actor] = []

    def lost_after_its_start() -> Actor:
        actors.append(Actor(HOST, RayActorError(error_msg="node died")))
        return actors[-1]

    watch, said = watched(lost_after_its_start, restarts_per_minute=2)
    pass_by(watch, clock, 300)
    assert len(actors) == 3, "once, and twice again"
    assert sum("prefill-0 is lost: node died" in text for text in said) == 3
    assert said[-1] == "prefill-0 was lost too often (runtime.restarts_per_minute) and is not placed again"
    assert len(watch.trouble) == 3
    assert watch.ask_to_stop(1.0) is None
    watch.end()
    assert clock.killed == [], "there is no actor to end"


def test_a_unit_that_is_lost_once_comes_back_and_goes_on(clock: Clock) -> None:
    actors = [Actor(HOST, RayActorError(error_msg="node died")), Actor("10.0.0.8", ["prefill-0/tp0 died"])]
    watch, said = watched(iter(actors).__next__)
    pass_by(watch, clock, 10)
    assert said == [
        f"prefill-0 is placed on {HOST}",
        "prefill-0 is lost: node died",
        "prefill-0 is placed on 10.0.0.8",
        "prefill-0: prefill-0/tp0 died",
    ]
    watch.end()
    assert clock.killed == [actors[1]]


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ConfigError("model.path = '/models/glm': no such folder"), "prefill-0 cannot start on its node: model.path"),
        (OSError("disk full"), "prefill-0: OSError: disk full"),
    ],
)
def test_a_unit_that_cannot_start_ends_the_job_with_the_reason(clock: Clock, cause: Exception, text: str) -> None:
    watch, _ = watched(lambda: Actor(RayTaskError("start", "", cause)))
    with pytest.raises(DeploymentFailed, match=text):
        pass_by(watch, clock, 1)
