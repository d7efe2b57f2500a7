"""A process whose last act crashes or hangs ends in time, with the status it was to have."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HANG = "ctypes.PyDLL(None).sleep(60)"  # keeps the interpreter lock
CRASHES = ["ctypes.string_at(0)", "os.abort()", "os.kill(os.getpid(), 7)"]


def end_in(act: str, seconds: float, status: int) -> subprocess.CompletedProcess[str]:
    script = f"import ctypes, os\nfrom transfer.last_act import last_act\nlast_act({seconds}, {status})\n{act}"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize("act", CRASHES)
def test_a_last_act_that_crashes_does_not_change_the_exit_status(act):
    done = end_in(act, 40, 3)
    assert done.returncode == 3
    assert "crashed" in done.stderr


def test_a_last_act_that_hangs_with_the_interpreter_lock_is_given_up():
    began = time.monotonic()
    done = end_in(HANG, 0.2, 0)
    assert done.returncode == 0 and time.monotonic() - began < 40
    assert "took too long" in done.stderr


def test_a_last_act_that_ends_in_time_ends_the_process_as_ever():
    done = end_in("raise SystemExit(5)", 40, 3)
    assert (done.returncode, done.stderr) == (5, "")
