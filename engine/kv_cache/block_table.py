"""Where tokens lie in paged memory. Pure functions over block ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def block_table(blocks: Sequence[Sequence[int]], width: int | None = None) -> Tensor:
    """Pads each request's block ids with 0 to one width.

    Returns int32 [B, W], W = `width` or the longest list (at least 1). ValueError if a list is longer than `width`.
    """
    longest = max((len(b) for b in blocks), default=0)
    if width is not None and longest > width:
        raise ValueError(f"a request holds {longest} blocks, the block table has room for {width}")
    table = torch.zeros(len(blocks), max(1, longest if width is None else width), dtype=torch.int32)
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return table


def slot_mapping(blocks: Sequence[int], positions: Tensor, block_size: int) -> Tensor:
    """Token slot of each position: block id * block_size + offset.

    positions: int64 [T], all below len(blocks) * block_size (IndexError otherwise). Returns int64 [T].
    """
    table = torch.tensor(list(blocks), dtype=torch.int64)
    return table[positions // block_size] * block_size + positions % block_size
