"""One child process of the launcher: in a session of its own, logging to a file, bound to the launcher's life."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ChildSpec:
    """What to run: `name` as users see it ("decode-0/dp0/tp0"), arguments, and variables added to the environment.

    `log` is where its output goes; None = where ours goes.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path | None


class Child:
    """A started process.

    Invariant: a child never outlives the launcher. The kernel kills it when the launcher dies, however that happens;
    it leads a process group of its own, so that Ctrl-C in a terminal reaches the launcher alone and so that whatever
    the child started dies with it.
    """

    def __init__(self, spec: ChildSpec, continue_log: bool = False) -> None:
        """Starts the process; its log begins empty, or goes on after an earlier process's.

        Call it from the main thread: the kernel ties the child to the thread that starts it.
        """
        self.spec = spec
        launcher = os.getpid()

        def bind_to_launcher() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:
                os._exit(1)

        mode = "ab" if continue_log else "wb"
        with contextlib.nullcontext() if spec.log is None else spec.log.open(mode) as log:
            self._process = subprocess.Popen(
                spec.argv,
                env={**os.environ, **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=bind_to_launcher,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative = killed by that signal."""
        return self._process.poll()

    def describe_exit(self) -> str:
        """For example "exit status 3" or "killed by SIGKILL"."""
        code = self._process.poll()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit status {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def last_lines(self, count: int) -> list[str]:
        """The end of its log, if it has one of its own."""
        if self.spec.log is None:
            return []
        with self.spec.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 64 * 1024))
            return log.read().decode("utf-8", "replace").splitlines()[-count:]

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM). Does nothing to a process that has ended."""
        self._process.terminate()

    def wait(self, deadline: float) -> bool:
        """Waits until `deadline` (time.monotonic()). Returns whether it has ended."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill_group(self) -> None:
        """Kills it and everything it started that is still in its process group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()
