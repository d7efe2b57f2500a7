"""How a block's bytes lie in its pool object. Pure: no tensors, no I/O.

One object holds one block of a prompt over *all* layers, layer after layer, and within a layer ckv, k_rope and, where
the layer owns an indexer, its keys and their scales; with checksums one word over these. A layer's part can be copied
alone, in either direction.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefill_node.geometry import KvGeometry

CALL_BYTES = 8 << 20  # copies of several layers make up a call: one costs as much as copying a megabyte
CHECKSUM_BYTES = 4  # of one block of one layer
Numbers: TypeAlias = Sequence[int] | NDArray[np.int64]


class Copy(NamedTuple):
    """Parallel numbers of one batched copy: bytes at `device[i]` <-> bytes at `pool[i]`, `sizes[i]` of them."""

    device: array[int]
    pool: array[int]
    sizes: array[int]

    @staticmethod
    def nothing() -> Copy:
        return Copy(array("q"), array("q"), array("q"))

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def extend(self, other: Copy) -> None:
        """Also copies what `other` does."""
        for mine, more in zip(self, other, strict=True):
            mine.extend(more)


class TensorAddress(NamedTuple):
    """A paged tensor in device memory: block `b` lies at `address + b * block_bytes`."""

    address: int
    block_bytes: int


class PoolObjectLayout:
    """Offsets of every layer's tensors within one object of `object_bytes` bytes."""

    def __init__(self, geometry: KvGeometry, num_layers: int, *, checksums: bool = False) -> None:
        self.checksums = checksums
        self._parts: list[tuple[tuple[int, int], ...]] = []
        end = 0
        for layer in range(num_layers):
            parts = []
            for size in (*geometry.layer_block(layer), CHECKSUM_BYTES * checksums):
                if size:
                    parts.append((end, size))
                    end += size
            self._parts.append(tuple(parts))
        self.object_bytes = end

    def parts(self, layer: int) -> tuple[tuple[int, int], ...]:
        """`(offset, bytes)` of the layer's ckv, k_rope, keys and scales if it owns an indexer, and checksum."""
        return self._parts[layer]

    def copy(
        self,
        layer: int,
        tensors: Sequence[TensorAddress],
        main_blocks: Numbers,
        indexer_blocks: Numbers,
        objects: Numbers,
    ) -> Copy:
        """The copy between device blocks and the pool objects at addresses `objects`, for one layer.

        `tensors` are the device tensors of the layer's slot (ckv, k_rope, indexer keys, scales); block `i` of the lists
        goes with object `i`. Raises ValueError when the lists differ in length.
        """
        if not len(main_blocks) == len(indexer_blocks) == len(objects):
            raise ValueError(
                f"layer {layer}: {len(main_blocks)} main blocks, {len(indexer_blocks)} indexer blocks and "
                f"{len(objects)} pool objects do not belong together"
            )
        offsets, sizes = np.array(self._parts[layer], dtype=np.int64).T
        blocks = [np.asarray(indexer_blocks if position >= 2 else main_blocks) for position in range(len(sizes))]
        device = [base + stride * places for (base, stride), places in zip(tensors, blocks, strict=False)]
        pool = np.add.outer(offsets, np.asarray(objects, dtype=np.int64))
        return Copy(_packed(np.concatenate(device)), _packed(pool), _packed(np.repeat(sizes, len(objects))))


def _packed(numbers: NDArray[np.int64]) -> array[int]:
    return array("q", numbers.astype(np.int64, copy=False).tobytes())
