"""Removes what a launcher leaves in the file system, however it ends: ``python -m deploy.sweeper``.

Memory of the emulated driver is files below /dev/shm, and killed processes cannot remove theirs. A launcher that may
itself be killed at any time (an actor of Ray is) holds a pipe to this process; when the pipe closes, nobody is left
who would need the files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from deploy.device_root import default_parent
from transfer import hostcann

_START_S = 20.0
_GONE_S = 3.0  # children of a killed launcher are killed by the kernel, which takes its time
_POLL_S = 0.1
_READY, _KEEP, _STOPPED = "ready\n", "keep\n", "stopped\n"


class Sweeper:
    """The launcher's end of the pipe.

    Invariant (test_nothing_is_left_of_a_killed_launcher): once the launcher is dead or has called `close`, the memory
    of its dead children and its temporary run folder are removed within seconds. Live processes of other launchers
    that share the device root are left alone.
    """

    def __init__(self, device_root: Path, run_dir: Path | None) -> None:
        """Returns when the process is there; `run_dir` = None: it stays. Raises RuntimeError when it does not start."""
        folders = [device_root] if run_dir is None else [device_root, run_dir]
        command = [sys.executable, "-m", "deploy.sweeper", *map(str, folders)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        if not select.select([self._output], [], [], _START_S)[0] or self._output.readline() != _READY:
            self._process.kill()
            raise RuntimeError("the process that sweeps behind this one did not start")
        self._process.wait(_START_S)  # what answered is a child of it

    def keep_run_dir(self) -> None:
        """Something went wrong whose logs somebody will want to read."""
        self._tell(_KEEP)

    def close(self, timeout_s: float) -> bool:
        """Sweeps now; no child may be running. Returns whether that has ended in time. Idempotent."""
        if self._input.closed:
            return True
        self._tell(_STOPPED)
        self._input.close()
        return bool(select.select([self._output], [], [], timeout_s)[0])  # closed at its end

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.write(line)
            self._input.flush()


def occupy(device_root: Path) -> Path:
    """Creates a file in the device root, and that too if need be, so that no other sweeper removes the folder."""
    while True:
        device_root.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = device_root / f"sweeper-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # removed since by the last one who left
            mark.touch()
            return mark


def sweep(device_root: Path, mark: Path, run_dir: Path | None, patience_s: float) -> None:
    """Removes the memory of processes that are dead or die within `patience_s` seconds, our mark, and the run folder.

    The device root itself goes with the last one who leaves.
    """
    mark.unlink(missing_ok=True)
    deadline = time.monotonic() + patience_s
    while True:
        hostcann.sweep(device_root)
        if not device_root.exists() or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if device_root.parent == default_parent():
        with contextlib.suppress(OSError):
            device_root.parent.rmdir()  # works only when it is empty
    if run_dir is not None:
        shutil.rmtree(run_dir, ignore_errors=True)


def main() -> int:
    """Goes on in a child process, so that whoever kills the launcher's children does not kill this one."""
    parser = argparse.ArgumentParser(prog="deploy.sweeper", description="Sweeps when its standard input closes.")
    parser.add_argument("device_root", type=Path)
    parser.add_argument("run_dir", type=Path, nargs="?")
    options = parser.parse_args()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")  # the folder it was started in may be removed meanwhile
    mark = occupy(options.device_root)
    sys.stdout.write(_READY)
    sys.stdout.flush()
    told = set(sys.stdin)
    patience_s = 0.0 if _STOPPED in told else _GONE_S
    sweep(options.device_root, mark, None if _KEEP in told else options.run_dir, patience_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
