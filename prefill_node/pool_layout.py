"""How a block's bytes lie in its pool object. Pure: no tensors, no I/O.

One object holds one block of a prompt over *all* layers, layer after layer, and within a layer ckv, k_rope and, where
the layer owns an indexer, its keys and their scales; with checksums one word over these. A layer's part can be copied
alone, in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefill_node.geometry import KvGeometry

CHECKSUM_BYTES = 4  # of one block of one layer


class Copy(NamedTuple):
    """Parallel lists of one batched copy: bytes at `device[i]` <-> bytes at `pool[i]`, `sizes[i]` of them."""

    device: list[int]
    pool: list[int]
    sizes: list[int]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


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
        main_blocks: Sequence[int],
        indexer_blocks: Sequence[int],
        objects: Sequence[int],
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
        copy = Copy([], [], [])
        for position, (offset, size) in enumerate(self._parts[layer]):
            tensor, blocks = tensors[position], indexer_blocks if position >= 2 else main_blocks
            base, stride = tensor
            copy.device.extend([base + block * stride for block in blocks])
            copy.pool.extend([address + offset for address in objects])
            copy.sizes.extend([size] * len(objects))
        return copy
