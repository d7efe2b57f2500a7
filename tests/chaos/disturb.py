"""What is done to the processes of a deployment, at random times: killing them, stopping them for a while."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.chaos.record import Record

META, POOL = "meta_server.main", "transfer.mem_pool_service"
_WORKERS = "prefill_node.main", "decode_node.main"
_CALM_S = 2.0, 8.0  # between two disturbances
_STOPPED_S = 0.3, 8.0  # longer and shorter than runtime.lost_after_s


@dataclass(frozen=True)
class Kind:
    """A disturbance; `weight` says how often it is chosen."""

    name: str
    weight: int
    target: Callable[[random.Random, list[psutil.Process]], psutil.Process | None]
    kills: bool


def _worker(rng: random.Random, alive: list[psutil.Process]) -> psutil.Process | None:
    return _one_of(rng, alive, _WORKERS)


def _meta(rng: random.Random, alive: list[psutil.Process]) -> psutil.Process | None:
    return _one_of(rng, alive, (META,))


def _pool(rng: random.Random, alive: list[psutil.Process]) -> psutil.Process | None:
    return _one_of(rng, alive, (POOL,))


def _one_of(rng: random.Random, alive: list[psutil.Process], modules: tuple[str, ...]) -> psutil.Process | None:
    chosen = [process for process in alive if name_of(process).startswith(modules)]
    return rng.choice(sorted(chosen, key=name_of)) if chosen else None


KINDS = (
    Kind("kill a worker", 8, _worker, True),
    Kind("stop a worker", 8, _worker, False),
    Kind("kill the pool's service", 2, _pool, True),
    Kind("stop the pool's service", 1, _pool, False),
    Kind("kill the meta server", 2, _meta, True),
    Kind("stop the meta server", 1, _meta, False),
)


def name_of(process: psutil.Process) -> str:
    """For example "decode_node.main --group 1 --dp-rank 0 --tp-rank 0"; empty once it has ended."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    if "-m" not in words:
        return ""
    module, options = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    pairs = dict(zip(options[::2], options[1::2], strict=False))
    parts = [f"{key} {pairs[key]}" for key in ("--group", "--dp-rank", "--tp-rank") if key in pairs]
    return " ".join([module, *parts])


class Disturber:
    """A thread that disturbs until it is stopped; it leaves nobody in SIGSTOP."""

    def __init__(self, processes: Callable[[], list[psutil.Process]], record: Record, seed: int) -> None:
        self._processes = processes
        self._record = record
        self._rng = random.Random(f"{seed}/disturb")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(2 * _STOPPED_S[1])

    def _run(self) -> None:
        while not self._stopping.wait(self._rng.uniform(*_CALM_S)):
            (kind,) = self._rng.choices(KINDS, [kind.weight for kind in KINDS])
            target = kind.target(self._rng, self._processes())
            seconds = self._rng.uniform(*_STOPPED_S)
            if target is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                self._disturb(kind, target, seconds)

    def _disturb(self, kind: Kind, target: psutil.Process, seconds: float) -> None:
        what = f"{kind.name}: {name_of(target)} (pid {target.pid})"
        self._record.count(kind.name)
        if kind.target is _meta:
            self._record.meta_died()  # it may be killed by a client's patience only, but explains a broken connection
        if kind.kills:
            self._record.tell(what)
            target.kill()
            return
        self._record.tell(f"{what} for {seconds:.1f} s")
        target.suspend()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end and target.is_running():
                time.sleep(0.05)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                target.resume()
