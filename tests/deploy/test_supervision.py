"""Child processes: how they end, what is told about it, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.child import Child, ChildSpec
from deploy.signals import Signals, Stopped
from deploy.supervisor import ChildDied, StopPhase, Supervisor


def python(folder: Path, name: str, code: str) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-c", code], {}, folder / f"{name}.log")


def wait_for_log(child: Child, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in "\n".join(child.last_lines(5)):
        assert time.monotonic() < deadline, f"{child.spec.name} never logged {text!r}"
        time.sleep(0.02)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.kill()


def test_death_tells_who_how_and_the_end_of_the_log(tmp_path: Path, supervisor: Supervisor) -> None:
    code = "import sys; print('loading'); print('no such checkpoint', file=sys.stderr); sys.exit(7)"
    supervisor.start([python(tmp_path, "decode-0", code)])
    deadline = time.monotonic() + 20
    with pytest.raises(ChildDied) as death:
        while time.monotonic() < deadline:
            supervisor.check()
            time.sleep(0.02)
    text = str(death.value)
    assert "decode-0" in text and "exit status 7" in text and "no such checkpoint" in text


def test_the_last_warning_of_a_log_is_found(tmp_path: Path, supervisor: Supervisor) -> None:
    lines = ["12:00 INFO a: loading", "12:01 WARNING a: no answer", "12:02 INFO a: waiting"]
    (tmp_path / "a.log").write_text("\n".join(lines))
    supervisor._children = [Child(python(tmp_path, "a", "pass"), continue_log=True)]
    assert supervisor.last_warning("a") == lines[1]
    assert supervisor.last_warning("b") is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_next_sleep(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signals = Signals()
        signal.raise_signal(number)
        with pytest.raises(Stopped):
            signals.sleep(60)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_death_is_reported_once_and_the_signal_is_named(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.start([python(tmp_path, "a", "import time; time.sleep(60)")])
    os.kill(supervisor.pids()["a"], signal.SIGKILL)
    dead: list[Child] = []
    deadline = time.monotonic() + 20
    while not dead and time.monotonic() < deadline:
        dead = supervisor.deaths()
    assert [child.describe_exit() for child in dead] == ["killed by SIGKILL"]
    assert supervisor.deaths() == []


def test_stop_asks_first_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    polite = "import time; print('up', flush=True); time.sleep(60)"
    children = [Child(python(tmp_path, "a-stubborn", stubborn)), Child(python(tmp_path, "b-polite", polite))]
    for child in children:
        wait_for_log(child, "up")
    supervisor = Supervisor()
    supervisor._children = children
    assert supervisor.stop([StopPhase(("a-",), 0.3), StopPhase(("b-",), 10.0)]) == ["a-stubborn"]
    assert [child.exit_code for child in children] == [-signal.SIGKILL, -signal.SIGTERM]


def test_kill_reaches_what_a_child_started(tmp_path: Path, supervisor: Supervisor) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); print('started', p.pid, flush=True); p.wait()"
    child = Child(python(tmp_path, "parent", code))
    wait_for_log(child, "started")
    grandchild = psutil.Process(int(child.last_lines(1)[0].split()[1]))
    child.kill_group()
    deadline = time.monotonic() + 10
    while grandchild.is_running() and grandchild.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "what the child started still runs"
        time.sleep(0.02)


def test_child_never_outlives_the_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from deploy.child import Child, ChildSpec\n"
            "argv = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
            "spec = ChildSpec('c', argv, {}, Path(sys.argv[1]) / 'c.log')\n"
            "print(Child(spec).pid, flush=True); time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    child.wait(timeout=10)
    assert not child.is_running()
