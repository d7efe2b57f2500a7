"""A checksum for each block of one layer's rows, stored in the pool with the rows.

It begins with the layer and the block's key, so that rows of another layer or block with their own checksum are noticed
as well: around a restart of the pool's service its memory has two owners for a while.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from prefill_node.pool_layout import TensorAddress
from transfer.checksum import BlocksOf, block_checksums


def seal(
    layer: int,
    keys: Sequence[str],
    words: Tensor,
    tensors: Sequence[TensorAddress],
    main_blocks: Sequence[int],
    indexer_blocks: Sequence[int],
) -> None:
    """Writes the checksum of block `i` of the three lists to `words[indexer_blocks[i]]`.

    `keys`: see `block_keys`. `tensors` are the layer's: ckv, k_rope and, if it has them, index keys and scales.
    `words`: [blocks] int32.
    """
    if not keys:
        return
    words[torch.tensor(indexer_blocks)] = _checksums(layer, keys, tensors, main_blocks, indexer_blocks)


def broken(
    layer: int,
    keys: Sequence[str],
    words: Tensor,
    tensors: Sequence[TensorAddress],
    main_blocks: Sequence[int],
    indexer_blocks: Sequence[int],
) -> list[int]:
    """Indices into the three lists of the blocks whose rows do not have the checksum stored with them."""
    if not keys:
        return []
    stored = words[torch.tensor(indexer_blocks)]
    wrong = stored != _checksums(layer, keys, tensors, main_blocks, indexer_blocks)
    return [index for index, is_wrong in enumerate(wrong.tolist()) if is_wrong]


def _checksums(
    layer: int,
    keys: Sequence[str],
    tensors: Sequence[TensorAddress],
    main_blocks: Sequence[int],
    indexer_blocks: Sequence[int],
) -> Tensor:
    """[len(keys)] int32. Keys are equally long: they are one prompt's."""
    names = "".join(keys).encode()
    if any(len(key) * len(keys) != len(names) for key in keys):
        raise ValueError(f"layer {layer}: keys of different lengths: {sorted({len(key) for key in keys})}")
    memory = (ctypes.c_char * len(names)).from_buffer_copy(names)
    parts = [BlocksOf(ctypes.addressof(memory), len(names) // len(keys), range(len(keys)))]
    for which, tensor in enumerate(tensors):
        parts.append(BlocksOf(*tensor, indexer_blocks if which >= 2 else main_blocks))
    return torch.frombuffer(block_checksums(layer, len(keys), parts), dtype=torch.int32)
