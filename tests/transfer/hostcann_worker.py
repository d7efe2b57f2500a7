"""A child process over hostcann that runs the statements a test sends it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

from transfer import hostcann

CHIP = hostcann.DEFAULT_CHIP
DEADLINE_S = 30.0

_LOOP = """
import json, os, sys, traceback
commands, answers, names = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w"), {}
for line in commands:
    kind, source = json.loads(line)
    try:
        answer = {"value": eval(source, names) if kind == "eval" else exec(source, names)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": type(error).__name__, "message": str(error)}
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""


class WorkerError(Exception):
    """What a worker's statement raised: `kind` is the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Worker:
    """One child; `run` executes statements in it, `value` evaluates an expression (of JSON types) there."""

    def __init__(self, root: str | os.PathLike[str], *, devices: int = 4, hbm_bytes: int = 64 << 20) -> None:
        commands_read, commands_write = os.pipe()
        answers_read, answers_write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOOP, str(commands_read), str(answers_write)],
            env={**os.environ, **hostcann.environment(root, CHIP, devices, hbm_bytes), "OMP_NUM_THREADS": "1"},
            pass_fds=(commands_read, answers_write),
        )
        os.close(commands_read)
        os.close(answers_write)
        self._commands = os.fdopen(commands_write, "w")
        self._answers = os.fdopen(answers_read)

    def run(self, source: str, deadline_s: float = DEADLINE_S) -> None:
        self.start(source)
        self.wait(deadline_s)

    def value(self, source: str, deadline_s: float = DEADLINE_S) -> Any:
        self._send("eval", source)
        return self.wait(deadline_s)

    def start(self, source: str) -> None:
        """Send statements without waiting, for calls in which several workers meet; `wait` comes next."""
        self._send("exec", source)

    def wait(self, deadline_s: float = DEADLINE_S) -> Any:
        readable, _, _ = select.select([self._answers], [], [], deadline_s)
        if not readable:
            raise TimeoutError(f"the worker did not answer within {deadline_s} s")
        line = self._answers.readline()
        if not line:
            raise EOFError(f"the worker died with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"], answer["message"])
        return answer["value"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """Let the child end by itself; returns its exit status."""
        self._commands.close()
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        self._answers.close()

    def _send(self, kind: str, source: str) -> None:
        self._commands.write(json.dumps([kind, source]) + "\n")
        self._commands.flush()
