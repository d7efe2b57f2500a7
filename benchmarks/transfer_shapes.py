"""What the transfer benchmark moves: batches of descriptors over a region of the same size on both sides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

KIB, MIB = 1 << 10, 1 << 20
REGION = 320 * MIB
"""Bytes of the memory of each side; ten times the last-level cache of the machines this runs on."""

LAYERS, BLOCKS = 61, 16
MAIN, INDEXER = 128 * KIB, 16 * KIB
GROWTH = 64, 256, 1024, 16384  # and 4096, which has a goal
MAX_SOURCES = 4


@dataclass(frozen=True)
class Batch:
    """`sizes[i]` bytes from offset `remote[i]` of the source's region to offset `local[i]` of the reader's."""

    local: Sequence[int]
    remote: Sequence[int]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Shape:
    """Batches are read one after the other, as the layers of a request are."""

    label: str
    batches: Sequence[Batch]

    @cached_property
    def bytes(self) -> int:
        return sum(sum(batch.sizes) for batch in self.batches)

    @cached_property
    def descriptors(self) -> int:
        return sum(len(batch.sizes) for batch in self.batches)


def scattered(size: int, count: int, seed: int, start: int = 0, end: int = REGION) -> Batch:
    """`count` distinct blocks of `size` bytes of [start, end), in random order on both sides."""
    rng = random.Random(seed)
    remote, local = ([start + size * at for at in rng.sample(range((end - start) // size), count)] for _ in range(2))
    return Batch(local, remote, [size] * count)


def joined(batches: Sequence[Batch]) -> Batch:
    """All of them as one."""
    return Batch(
        [at for batch in batches for at in batch.local],
        [at for batch in batches for at in batch.remote],
        [size for batch in batches for size in batch.sizes],
    )


def request_layers() -> list[Batch]:
    """One request's layers: 16 main blocks of 128 KiB and 16 indexer blocks of 16 KiB in each."""
    border = 256 * MIB
    main = scattered(MAIN, LAYERS * BLOCKS, 1, 0, border)
    indexer = scattered(INDEXER, LAYERS * BLOCKS, 2, border, REGION)
    layers = []
    for first in range(0, LAYERS * BLOCKS, BLOCKS):
        part = slice(first, first + BLOCKS)
        layers.append(
            joined([Batch(each.local[part], each.remote[part], each.sizes[part]) for each in (main, indexer)])
        )
    return layers


def layers_in_order() -> Shape:
    """As many blocks as `request_layers`, one behind the other: what publisher and puller are measured with."""
    batches, at = [], 0
    for _ in range(LAYERS):
        sizes = [MAIN] * BLOCKS + [INDEXER] * BLOCKS
        places = [at + start for start in accumulate(sizes, initial=0)]
        batches.append(Batch(places[:-1], places[:-1], sizes))
        at = places[-1]
    return Shape("61 layers x 16 blocks in order", batches)


def shapes() -> list[Shape]:
    """The three that have goals, and the smallest pieces that a pull may consist of."""
    layers = request_layers()
    return [
        Shape("61 layers x 16 blocks, a read per layer", layers),
        Shape("61 layers x 16 blocks, one read", [joined(layers)]),
        Shape("4096 scattered blocks of 16 KiB", [scattered(INDEXER, 4096, 3)]),
        Shape("one range of 256 MiB", [Batch([0], [REGION - 256 * MIB], [256 * MIB])]),
        Shape("8192 scattered rows of 1152 bytes", [scattered(1152, 8192, 4)]),
    ]


def growth() -> list[Shape]:
    """The same size of block, ever more of them."""
    return [Shape(f"{n} scattered blocks of 16 KiB", [scattered(INDEXER, n, 5)]) for n in GROWTH]


def all_shapes() -> dict[str, Shape]:
    """By label."""
    return {shape.label: shape for shape in [*shapes(), *growth()]}


def share_of_sources(index: int) -> Shape:
    """What is read from one of several sources: 512 blocks of 128 KiB into a quarter of the region."""
    quarter = REGION // MAX_SOURCES
    batch = scattered(MAIN, 512, 6 + index, 0, quarter)
    return Shape(f"share {index}", [Batch([at + index * quarter for at in batch.local], batch.remote, batch.sizes)])
