"""A CRC-32 for each block of one layer's rows, stored in the pool with the rows.

It begins with the layer, so that another layer's rows with their own checksum are noticed as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seal(
    layer: int, words: Tensor, tensors: Sequence[Tensor], main_blocks: Sequence[int], indexer_blocks: Sequence[int]
) -> None:
    """Writes the checksum of block `i` of the two lists to `words[indexer_blocks[i]]`.

    `tensors` [blocks, ...] are the layer's: ckv, k_rope and, if it has them, index keys and scales. `words`: int32.
    """
    for main, indexer in zip(main_blocks, indexer_blocks, strict=True):
        words[indexer] = _checksum(layer, tensors, main, indexer)


def broken(
    layer: int, words: Tensor, tensors: Sequence[Tensor], main_blocks: Sequence[int], indexer_blocks: Sequence[int]
) -> list[int]:
    """Indices into the two lists of the blocks whose rows do not have the checksum stored with them."""
    pairs = enumerate(zip(main_blocks, indexer_blocks, strict=True))
    return [index for index, (main, inner) in pairs if int(words[inner]) != _checksum(layer, tensors, main, inner)]


def _checksum(layer: int, tensors: Sequence[Tensor], main_block: int, indexer_block: int) -> int:
    value = layer
    for position, tensor in enumerate(tensors):
        rows = tensor[main_block if position < 2 else indexer_block]
        value = zlib.crc32(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes(), value)
    return value - (1 << 32) if value >= 1 << 31 else value  # as int32
