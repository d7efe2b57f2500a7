"""Who is started again after a death, when, and when no more."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.child import ChildSpec
from deploy.resolve import Run
from deploy.restarts import RestartLimit, Units, unit_of
from deploy.supervisor import Supervisor
from deploy.watch import DeploymentLost, Watch
from engine.config import build_config

NAMES = ["memcache-meta", "meta-server", "prefill-0/tp0", "prefill-0/tp1", "decode-0/dp0/tp0", "decode-0/dp1/tp0"]


def test_a_unit_that_keeps_dying_is_given_up() -> None:
    now = 100.0
    limit = RestartLimit(3, clock=lambda: now)
    starts = [limit.next_start("a") for _ in range(3)]
    assert starts == [100.5, 101.0, 102.0]
    assert limit.next_start("a") is None
    assert limit.next_start("b") == 100.5
    now = 161.5
    assert limit.next_start("a") == 161.5 + 1.0, "one restart of the last minute is remembered"


def test_the_tp_ranks_of_a_replica_are_one_unit() -> None:
    assert [unit_of(name) for name in NAMES] == [
        "memcache-meta",
        "meta-server",
        "prefill-0",
        "prefill-0",
        "decode-0/dp0",
        "decode-0/dp1",
    ]


def test_a_unit_that_starts_again_meets_at_a_fresh_place(tmp_path: Path) -> None:
    specs = [ChildSpec(name, [], {}, tmp_path / "log") for name in NAMES]
    meeting, other = tmp_path / "decode-0.dp0.rendezvous", tmp_path / "prefill-0.rendezvous"
    meeting.touch()
    other.touch()
    units = Units(specs, tmp_path)
    assert [spec.name for spec in units.specs("decode-0/dp0")] == ["decode-0/dp0/tp0"]
    assert not meeting.exists() and other.exists()
    assert units.names("prefill-0") == ["prefill-0/tp0", "prefill-0/tp1"]


class Launched:
    """Sleeping processes under the names of a deployment, watched."""

    def __init__(self, folder: Path, **runtime: object) -> None:
        code = "import time; print('started', flush=True); time.sleep(60)"
        argv = [sys.executable, "-c", code]
        specs = [ChildSpec(name, argv, {}, folder / f"{name.replace('/', '.')}.log") for name in NAMES]
        config = build_config({"model": {"path": str(folder)}, "runtime": {"restart": True} | runtime})
        self.supervisor = Supervisor()
        self.supervisor.start(specs)
        self.said: list[str] = []
        self.run = Run(config, folder / "sluice.yaml", folder, folder)
        self.watch = Watch(self.run, specs, self.supervisor, self.said.append)
        self.first = self.supervisor.pids()

    def kill(self, name: str) -> None:
        os.kill(self.supervisor.pids()[name], signal.SIGKILL)

    def look_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.supervisor.pids()
            self.watch.look()
            time.sleep(0.02)

    def replaced(self) -> set[str]:
        return {name for name, pid in self.supervisor.pids().items() if pid != self.first[name]}


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched: list[Launched] = []

    def start(**runtime: object) -> Launched:
        launched.append(Launched(tmp_path, **runtime))
        return launched[-1]

    yield start
    for one in launched:
        one.supervisor.kill()


@pytest.mark.parametrize(
    ("victim", "unit"),
    [
        ("prefill-0/tp1", {"prefill-0/tp0", "prefill-0/tp1"}),
        ("decode-0/dp0/tp0", {"decode-0/dp0/tp0"}),
        ("meta-server", {"meta-server"}),
        ("memcache-meta", {"memcache-meta"}),
    ],
)
def test_a_dead_process_is_started_again_with_its_unit_only(launch: Launch, victim: str, unit: set[str]) -> None:
    launched = launch()
    launched.kill(victim)
    launched.look_until(lambda: launched.replaced() == unit and set(launched.supervisor.pids()) == set(NAMES))
    for _ in range(20):
        launched.watch.look()
    assert launched.run.kept, "the folder with the logs stays"
    text = "\n".join(launched.said)
    assert text.count("killed by SIGKILL") == 1, "the ranks that had to go with it are not told as deaths"
    assert launched.replaced() == unit


def test_a_log_goes_on_after_a_restart(launch: Launch, tmp_path: Path) -> None:
    launched, log = launch(), tmp_path / "decode-0.dp0.tp0.log"
    launched.look_until(lambda: log.read_text() == "started\n")
    launched.kill("decode-0/dp0/tp0")
    launched.look_until(lambda: log.read_text() == "started\nstarted\n")


def test_without_restarts_a_death_is_only_told(launch: Launch) -> None:
    launched = launch(restart=False)
    launched.kill("prefill-0/tp1")
    launched.look_until(lambda: "prefill-0/tp1" not in launched.supervisor.pids())
    time.sleep(0.7)
    launched.watch.look()
    assert launched.replaced() == set()
    assert set(launched.supervisor.pids()) == set(NAMES) - {"prefill-0/tp1"}


@pytest.mark.parametrize("runtime", [{"restart": False}, {"restarts_per_minute": 1}])
def test_a_meta_server_that_is_gone_for_good_ends_the_deployment(launch: Launch, runtime: dict[str, object]) -> None:
    launched = launch(**runtime)
    if "restart" not in runtime:
        launched.kill("meta-server")
        launched.look_until(lambda: launched.replaced() == {"meta-server"})
    launched.kill("meta-server")
    with pytest.raises(DeploymentLost, match="cannot go on without its meta server"):
        launched.look_until(lambda: False)


def test_a_group_that_keeps_dying_is_told_and_left(launch: Launch) -> None:
    launched = launch(restarts_per_minute=1)
    launched.kill("decode-0/dp1/tp0")
    launched.look_until(lambda: launched.replaced() == {"decode-0/dp1/tp0"})
    launched.kill("decode-0/dp1/tp0")
    launched.look_until(lambda: "decode-0/dp1/tp0" not in launched.supervisor.pids())
    launched.watch.look()
    assert "decode-0/dp1 died too often (runtime.restarts_per_minute)" in "\n".join(launched.said)
