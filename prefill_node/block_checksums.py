"""A checksum for each block of one layer's rows, stored in the pool with the rows.

It begins with the layer and the block's key, so that rows of another layer or block with their own checksum are noticed
as well: around a restart of the pool's service its memory has two owners for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefill_node.pool_layout import TensorAddress
from transfer.checksum import BlocksOf, block_checksums


class NamedBlocks(NamedTuple):
    """Blocks of one prompt, in the form that native code takes: made once a step, used for every layer."""

    keys: NDArray[np.uint8]  # [blocks, bytes of a key]
    main: NDArray[np.int64]  # [blocks], where the ckv and k_rope of each are
    indexer: NDArray[np.int64]  # [blocks], where the rest is

    @staticmethod
    def of(keys: Sequence[str], main_blocks: Sequence[int], indexer_blocks: Sequence[int]) -> NamedBlocks:
        """`keys`: see `block_keys`. Raises ValueError when they are not equally long, as one prompt's are."""
        names = "".join(keys).encode()
        if any(len(key) * len(keys) != len(names) for key in keys):
            raise ValueError(f"keys of different lengths: {sorted({len(key) for key in keys})}")
        return NamedBlocks(
            np.frombuffer(names, dtype=np.uint8).reshape(len(keys), len(names) // max(1, len(keys))),
            np.array(main_blocks, dtype=np.int64),
            np.array(indexer_blocks, dtype=np.int64),
        )


def seal(layer: int, blocks: NamedBlocks, words: Tensor, tensors: Sequence[TensorAddress]) -> None:
    """Writes the checksum of each block to `words[blocks.indexer]`.

    `tensors` are the layer's: ckv, k_rope and, if it has them, index keys and scales. `words`: [blocks] int32.
    """
    if len(blocks.keys):
        words.numpy()[blocks.indexer] = _checksums(layer, blocks, tensors)


def broken(layer: int, blocks: NamedBlocks, words: Tensor, tensors: Sequence[TensorAddress]) -> list[int]:
    """Indices into `blocks` of those whose rows do not have the checksum stored with them."""
    if not len(blocks.keys):
        return []
    wrong: list[int] = np.flatnonzero(words.numpy()[blocks.indexer] != _checksums(layer, blocks, tensors)).tolist()
    return wrong


def _checksums(layer: int, blocks: NamedBlocks, tensors: Sequence[TensorAddress]) -> NDArray[np.int32]:
    count, key_bytes = blocks.keys.shape
    parts = [BlocksOf(blocks.keys.ctypes.data, key_bytes, np.arange(count))]
    for which, tensor in enumerate(tensors):
        parts.append(BlocksOf(*tensor, blocks.indexer if which >= 2 else blocks.main))
    return block_checksums(layer, count, parts).view(np.int32)
