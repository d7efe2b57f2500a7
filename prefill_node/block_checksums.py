"""A CRC-32 for each block of one layer's rows, stored in the pool with the rows.

It begins with the layer and the block's key, so that rows of another layer or block with their own checksum are noticed
as well: around a restart of the pool's service its memory has two owners for a while.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seal(
    layer: int,
    keys: Sequence[str],
    words: Tensor,
    tensors: Sequence[Tensor],
    main_blocks: Sequence[int],
    indexer_blocks: Sequence[int],
) -> None:
    """Writes the checksum of block `i` of the three lists to `words[indexer_blocks[i]]`.

    `keys`: see `block_keys`. `tensors` [blocks, ...] are the layer's: ckv, k_rope and, if it has them, index keys and
    scales. `words`: int32.
    """
    for key, main, indexer in zip(keys, main_blocks, indexer_blocks, strict=True):
        words[indexer] = _checksum(layer, key, tensors, main, indexer)


def broken(
    layer: int,
    keys: Sequence[str],
    words: Tensor,
    tensors: Sequence[Tensor],
    main_blocks: Sequence[int],
    indexer_blocks: Sequence[int],
) -> list[int]:
    """Indices into the three lists of the blocks whose rows do not have the checksum stored with them."""
    blocks = enumerate(zip(keys, main_blocks, indexer_blocks, strict=True))
    return [
        index
        for index, (key, main, inner) in blocks
        if int(words[inner]) != _checksum(layer, key, tensors, main, inner)
    ]


def _checksum(layer: int, key: str, tensors: Sequence[Tensor], main_block: int, indexer_block: int) -> int:
    value = zlib.crc32(key.encode(), layer)
    for position, tensor in enumerate(tensors):
        rows = tensor[main_block if position < 2 else indexer_block]
        value = zlib.crc32(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes(), value)
    return value - (1 << 32) if value >= 1 << 31 else value  # as int32
