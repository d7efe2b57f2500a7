"""One process of the transfer benchmark: ``python -m benchmarks.transfer_child ENGINE source|reader DEVICE``.

See child.py for how it is asked.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.child import serve
from benchmarks.harness import time_alone, time_in_turns
from benchmarks.native import compiled
from benchmarks.transfer_engines import ENGINES, Engine, Info, plain_memory
from benchmarks.transfer_shapes import REGION, Shape, all_shapes, share_of_sources

_COPY = Path(__file__).resolve().parent / "plain_copy.c"


def content(seed: int) -> NDArray[np.uint8]:
    """What the region of a source holds."""
    return np.frombuffer(np.random.default_rng(seed).bytes(REGION), dtype=np.uint8)


def view(address: int) -> NDArray[np.uint8]:
    """The region at this address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * REGION).from_address(address))


class Source:
    """Lets itself be read."""

    def __init__(self, engine: Engine, device: int) -> None:
        self._engine, self._device = engine, device
        view(engine.memory)[:] = content(device)

    def info(self) -> Info:
        return {**self._engine.info(), "seed": self._device}


class PlainCopy:
    """The same descriptors between two regions of this process, by memcpy on the calling thread."""

    def __init__(self) -> None:
        self._copy = ctypes.CDLL(str(compiled(_COPY))).plain_copy
        self._copy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint64]
        self._from, self._to = plain_memory(REGION), plain_memory(REGION)

    def of(self, shape: Shape) -> Callable[[int], None]:
        calls = []
        for batch in shape.batches:
            to, source = ([base + at for at in offsets] for base, offsets in self._sides(batch.local, batch.remote))
            calls.append([np.array(each, dtype=np.uint64) for each in (to, source, batch.sizes)])

        def run(_: int) -> None:
            for to, source, sizes in calls:
                self._copy(to.ctypes.data, source.ctypes.data, sizes.ctypes.data, len(sizes))

        return run

    def _sides(self, local: Sequence[int], remote: Sequence[int]) -> tuple[tuple[int, Sequence[int]], ...]:
        return (self._to, local), (self._from, remote)


class Reader:
    """Reads from sources, checks what came, and times it against memcpy."""

    def __init__(self, engine: Engine, device: int) -> None:
        self._engine = engine
        self._plain = PlainCopy()
        self._sources: list[tuple[str, Info]] = []

    def connect(self, source: Info) -> None:
        self._sources.append((self._engine.connect(source), source))

    def compare(self, label: str, budget_s: float) -> dict[str, Any]:
        """A Pair as a dictionary."""
        shape = all_shapes()[label]
        read = self._reads(shape, 0)
        self._check(shape, 0, read)
        return asdict(time_in_turns(read, self._plain.of(shape), budget_s=budget_s, now=time.perf_counter))

    def together(self, count: int, budget_s: float) -> dict[str, Any]:
        """A Timing of `count` sources read side by side, each by a thread of its own."""
        reads = []
        for index in range(count):
            shape = share_of_sources(index)
            reads.append(self._reads(shape, index))
            self._check(shape, index, reads[-1])

        def run() -> None:
            threads = [threading.Thread(target=read, args=(0,)) for read in reads]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return asdict(time_alone(run, budget_s=budget_s, now=time.perf_counter))

    def _reads(self, shape: Shape, index: int) -> Callable[[int], None]:
        peer, source = self._sources[index]
        here, there = self._engine.memory, int(source["memory"])
        prepared = [
            self._engine.prepare(
                peer, [here + at for at in batch.local], [there + at for at in batch.remote], list(batch.sizes)
            )
            for batch in shape.batches
        ]

        def run(_: int) -> None:
            for batch in prepared:
                self._engine.read(batch)

        return run

    def _check(self, shape: Shape, index: int, read: Callable[[int], None]) -> None:
        """Every byte arrives where it belongs, and no other changes."""
        got = view(self._engine.memory)
        got[:] = 0x5A
        read(0)
        wanted, sent = np.full(REGION, 0x5A, dtype=np.uint8), content(int(self._sources[index][1]["seed"]))
        for batch in shape.batches:
            for local, remote, size in zip(batch.local, batch.remote, batch.sizes, strict=True):
                wanted[local : local + size] = sent[remote : remote + size]
        if not np.array_equal(got, wanted):
            raise RuntimeError(f"{shape.label}: {int((got != wanted).sum())} wrong bytes")


def main(engine: str, role: str, device: str) -> None:
    """Entry point."""
    made = ENGINES[engine](role, int(device), REGION)
    serve(Source(made, int(device)) if role == "source" else Reader(made, int(device)))


if __name__ == "__main__":
    main(*sys.argv[1:])
