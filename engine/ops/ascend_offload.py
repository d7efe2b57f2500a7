"""Row copies between the host pool and the device on Ascend, by MemFabric's offload kernel.

One kernel copies a list of byte ranges which it reads from device memory, so that what to copy may be decided on the
device: no value is read on the host here. The host pool is addressed as the CPU does (``transfer.host_pool``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops import native
from engine.ops.ascend_schemas import AscendOperatorError


class CopyList(NamedTuple):
    """Ranges to copy; all on the device that copies. One of length 0 is skipped.

    Addresses and lengths are those the kernel reads as unsigned integers of the same width.
    """

    source: Tensor  # [ranges] int64, addresses
    destination: Tensor  # [ranges] int64
    length: Tensor  # [ranges] int32, bytes
    ranges: Tensor  # [1] int32, their number


def sparse_copy(copies: CopyList, device: torch.device) -> None:
    """Copy the ranges on ``device``, in its stream's order; the host pool must have been made.

    A device without an index (``cpu``, over the emulated driver) is the one of ``engine.ops.set_device``. Raises
    AscendOperatorError when the kernel could not be started; what goes wrong in it shows at the next synchronisation.
    """
    from memfabric_hybrid import offload  # loads the driver: only in a process that has one

    where = device if device.index is not None else torch.device(device.type, native.Settings.device)
    code = offload.sparse_copy(copies.source, copies.destination, copies.length, copies.ranges, where)
    if code != 0:
        raise AscendOperatorError(
            f"offload.sparse_copy of {copies.source.numel()} ranges failed on {where} with code {code}; "
            "this process must have made a host pool"
        )


def miss_copies(
    miss_src_ids: Tensor,
    miss_dst_slots: Tensor,
    miss_counts: Tensor,
    hbm_block_table: Tensor,
    dram_block_table: Tensor,
    hbm_k_rope: Tensor,
    hbm_kv_cache: Tensor,
    dram_k_rope: Tensor,
    dram_kv_cache: Tensor,
) -> CopyList:
    """The copies that ``fused_scatter_copy_sparse_flash_attention`` makes of its miss lists, host to device.

    Arguments are those of that operator. A pair with a negative member, or without a block, is skipped.
    """
    block_size = hbm_kv_cache.shape[1]
    listed = torch.arange(miss_src_ids.shape[1], device=miss_counts.device) < miss_counts.unsqueeze(1)
    to = _cache_rows(miss_dst_slots, hbm_block_table, block_size)
    at = _cache_rows(miss_src_ids, dram_block_table, block_size)
    valid = listed & (to >= 0) & (at >= 0)
    return _copy_list(
        _Rows(at, dram_kv_cache, to, hbm_kv_cache, valid),
        _Rows(at, dram_k_rope, to, hbm_k_rope, valid),
    )


def new_row_copies(rows: Tensor, slots: Tensor, host_cache: Tensor) -> CopyList:
    """The copies that write a step's new rows to the host pool, device to host.

    Args:
        rows: [T, D] on the device; must stay as they are until the copies have been made.
        slots: [T] int64, rows of the cache; negative: not written.
        host_cache: [host blocks, block size, D], dtype of ``rows``.
    """
    at = torch.arange(rows.shape[0], device=slots.device)
    return _copy_list(_Rows(at, rows, slots, host_cache, slots >= 0))


def _cache_rows(positions: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Row of the cache of each position ([B, M]) by its request's block table, -1 where it has none; int64."""
    block = positions.long() // block_size
    named = (positions >= 0) & (block < block_table.shape[1])
    blocks = block_table.long().gather(1, torch.where(named, block, 0))
    return torch.where(named & (blocks >= 0), blocks * block_size + positions % block_size, -1)


class _Rows(NamedTuple):
    """Row ``at`` of ``source`` to row ``to`` of ``destination`` wherever ``valid``; rows are last dimensions."""

    at: Tensor
    source: Tensor
    to: Tensor
    destination: Tensor
    valid: Tensor


def _copy_list(*moves: _Rows) -> CopyList:
    sources, destinations, lengths = [], [], []
    for at, source, to, destination, valid in moves:
        row_bytes = source.shape[-1] * source.element_size()
        sources.append((source.data_ptr() + torch.where(valid, at, 0).long() * row_bytes).flatten())
        destinations.append((destination.data_ptr() + torch.where(valid, to, 0).long() * row_bytes).flatten())
        lengths.append(torch.where(valid, row_bytes, 0).to(torch.int32).flatten())
    length = torch.cat(lengths)
    return CopyList(torch.cat(sources), torch.cat(destinations), length, length.new_full((1,), length.numel()))
