"""What a launcher that may be killed at any time leaves behind: nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.sweeper import Sweeper
from tests.cluster import REPOSITORY

LAUNCHER = """
import sys, time
from pathlib import Path
from deploy.child import Child, ChildSpec
from deploy.sweeper import Sweeper
root, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
sweeper = Sweeper(root, run_dir)
if "keep" in sys.argv:
    sweeper.keep_run_dir()
register = "import time, transfer.hostcann.runtime as r; r.malloc(0, 1 << 20); print('holds', flush=True)"
register += "; time.sleep(60)"
from transfer import hostcann
environment = hostcann.environment(root, hostcann.DEFAULT_CHIP, 1, 1 << 24)
child = Child(ChildSpec("worker", [sys.executable, "-c", register], environment, run_dir / "log"))
while "holds" not in (run_dir / "log").read_text():
    if child.exit_code is not None:
        sys.exit((run_dir / "log").read_text())
    time.sleep(0.05)
print("up", flush=True)
time.sleep(60)
"""


def launch(root: Path, run_dir: Path, *options: str) -> subprocess.Popen[str]:
    run_dir.mkdir()
    command = [sys.executable, "-c", LAUNCHER, str(root), str(run_dir), *options]
    launcher = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdout.readline() == "up\n"
    return launcher


def wait_gone(path: Path) -> None:
    deadline = time.monotonic() + 10
    while path.exists():
        assert time.monotonic() < deadline, list(path.rglob("*"))
        time.sleep(0.05)


def test_nothing_is_left_of_a_killed_launcher(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with launch(root, tmp_path / "run") as launcher:
        assert any((root / "processes").iterdir()), "there would be nothing to sweep"
        launcher.kill()
    wait_gone(root)
    wait_gone(tmp_path / "run")


def test_others_on_the_same_machine_keep_their_memory(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with launch(root, tmp_path / "one") as one, launch(root, tmp_path / "two") as two:
        assert len(list((root / "processes").iterdir())) == 2
        one.kill()
        wait_gone(tmp_path / "one")
        assert len(list((root / "processes").iterdir())) == 1
        two.kill()
    wait_gone(root)


def test_logs_are_kept_when_something_went_wrong(tmp_path: Path) -> None:
    with launch(tmp_path / "root", tmp_path / "run", "keep") as launcher:
        launcher.kill()
    wait_gone(tmp_path / "root")
    assert (tmp_path / "run" / "log").exists()


def test_closing_waits_until_it_is_swept(tmp_path: Path) -> None:
    root, run_dir = tmp_path / "root", tmp_path / "run"
    run_dir.mkdir()
    sweeper = Sweeper(root, run_dir)
    assert root.is_dir()
    started = time.monotonic()
    assert sweeper.close(5.0)
    assert time.monotonic() - started < 2.0
    assert not root.exists() and not run_dir.exists()
    assert sweeper.close(5.0), "a second time nothing happens"


def test_a_folder_that_stays(tmp_path: Path) -> None:
    sweeper = Sweeper(tmp_path / "root", None)
    assert sweeper.close(5.0)
    assert not (tmp_path / "root").exists() and tmp_path.exists()


def test_a_sweeper_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        Sweeper(tmp_path / "root", None)
