"""Starts the processes of the transfer benchmark and asks them; finds or misses the engines ours is compared with."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.child import ANSWER
from transfer import hostcann

REPOSITORY = Path(__file__).resolve().parent.parent
INSTALLED = REPOSITORY / "build" / "bench"
"""Where `make bench-transfer` puts the other engines, a folder each: they are no dependencies of ours."""

_HBM_BYTES = 1 << 30
_MAX_DEVICES = 8
_ANSWER_S = 120.0
_DEBIAN = "debian/usr/lib/x86_64-linux-gnu", "debian/lib/x86_64-linux-gnu"  # libibverbs, which mooncake links to


class PeerFailed(Exception):
    """A process of the benchmark died, was silent or answered with an error; the text says why."""


class Peer:
    """One child process that runs a module of the benchmarks; see child.py."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        INSTALLED.mkdir(parents=True, exist_ok=True)
        self._log = INSTALLED / f"{'-'.join((module, *arguments))}.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.{module}", *arguments],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._answer()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, name: str, *arguments: object) -> Any:
        """Raises PeerFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer["value"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
        self._answers.put(None)

    def _answer(self) -> Any:
        try:
            line = self._answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise PeerFailed(f"no answer within {_ANSWER_S:g} s; log {self._log}") from None
        if line is None:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise PeerFailed(f"a process ended: {last[0][:200]}")
        return json.loads(line)


@contextmanager
def reader_and_sources(engine: str, sources: int, root: Path) -> Iterator[Peer]:
    """A reader that is connected to that many sources. Raises PeerFailed."""
    environment = {**os.environ, **_environment(engine, root), "OMP_NUM_THREADS": "1"}
    try:
        with ExitStack() as stack:
            reader = stack.enter_context(Peer("transfer_child", [engine, "reader", str(sources)], environment))
            for device in range(sources):
                source = stack.enter_context(Peer("transfer_child", [engine, "source", str(device)], environment))
                reader.ask("connect", source.ask("info"))
                stack.callback(source.ask, "info")  # it still lives, or the numbers are worth nothing
            yield reader
    finally:
        hostcann.sweep(root)


@contextmanager
def prefill_and_decode(checksum: str, root: Path) -> Iterator[tuple[Peer, Peer]]:
    """Both ends of transfer_layers, connected. Raises PeerFailed."""
    environment = {**os.environ, **_environment("sluice", root), "OMP_NUM_THREADS": "1"}
    try:
        with (
            Peer("transfer_layers", ["decode", "1", checksum], environment) as decode,
            Peer("transfer_layers", ["prefill", "0", checksum], environment) as prefill,
        ):
            prefill.ask("connect", decode.ask("address"))
            yield prefill, decode
    finally:
        hostcann.sweep(root)


def _environment(engine: str, root: Path) -> dict[str, str]:
    if engine == "sluice":
        return hostcann.environment(root, hostcann.DEFAULT_CHIP, _MAX_DEVICES, _HBM_BYTES)
    folder = INSTALLED / engine
    if not any(folder.glob("*.dist-info")):
        raise PeerFailed("not installed; see the output of make bench-transfer")
    libraries = [str(folder / part) for part in _DEBIAN]
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": ":".join(libraries)}
