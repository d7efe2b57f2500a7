"""Copy-SFA on Ascend: by vllm-ascend's fused operator, or by MemFabric's copies and then torch_npu's attention.

Both take the arguments of ``engine.ops.fused_scatter_copy_sparse_flash_attention``, with bfloat16 or float16 tensors on
one device within ``AscendLimits``; metadata may be on the host. The caches of ``dram_*`` must be memory that the device
can address (``transfer.host_pool``). Values are not read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.ascend_attention import attend, pad_heads
from engine.ops.ascend_indexer import check_same_device
from engine.ops.ascend_limits import AscendLimits
from engine.ops.ascend_offload import miss_copies, sparse_copy
from engine.ops.ascend_schemas import operator
from engine.ops.checks import check_layout
from engine.ops.copy_sfa_call import CopyAttentionCall


def fused_scatter_copy_sparse_flash_attention(
    *arguments: Tensor | float | None, **named: Tensor | float | None
) -> None:
    """Copy-SFA by ``npu_fused_scatter_copy_sparse_flash_attention``, given what the CPU operator accepts.

    The operator knows two ways of copying. Where some request's list has at least C entries, it copies the lists first
    ("first fill"). Else each row copies its own leading ``topk_miss_counts`` entries while it attends, and no list is
    read. And it attends to nothing where C exceeds what a row sees, as it does for all but the last row of a request
    without a tail. So here

    * rows are put in order: entries that their request's list names, or that lead already, come first and are counted,
      padding goes last;
    * each row becomes a request of its own that sees at least C;
    * one more, inactive request makes the operator copy the lists if one names a pair that no row of its request does;
    * lists are widened to the operator's capacity, heads padded with zeros to a number it knows.

    Where a list is given it must name all misses of its request's rows. A row must not name a slot twice; each C must
    be 0 or at least top-k, and slots lie below it or below what the row sees. ``copied_bytes`` waits for the device.
    """
    given = _checked(CopyAttentionCall(*arguments, **named))  # type: ignore[arg-type]
    rows, heads, latent = given.query.shape
    padded = AscendLimits.attention_heads(heads)
    AscendLimits.check_copy_attention(
        rows=rows,
        requests=given.miss_counts.shape[0],
        heads=padded,
        latent=latent,
        rope=given.query_rope.shape[2],
        block_size=given.hbm_kv_cache.shape[1],
        topk=given.topk_dst_slots.shape[2],
        miss_capacity=max(given.miss_src_ids.shape[1], AscendLimits.MISS_CAPACITY),
        dtype=given.query.dtype,
    )
    ordered = _with_fill_switch(_one_row_each(_misses_first(given)), fill=_names_more_than_rows(given))
    call = ordered._replace(
        query=pad_heads(ordered.query, padded),
        query_rope=pad_heads(ordered.query_rope, padded),
        miss_src_ids=_widened(ordered.miss_src_ids),
        miss_dst_slots=_widened(ordered.miss_dst_slots),
        attention_out=given.attention_out.new_empty(rows + 1, padded, latent),
    )
    operator("_C_ascend::npu_fused_scatter_copy_sparse_flash_attention")(*call[:-1])
    given.attention_out.copy_(call.attention_out[:rows, :heads])
    _report_bytes(given)


def copy_then_attend(*arguments: Tensor | float | None, **named: Tensor | float | None) -> None:
    """Copy-SFA without vllm-ascend's operator: MemFabric's copy kernel, then ``npu_sparse_flash_attention``.

    Attends to the slots given and to no others, so each ``num_cache_tokens`` must be at least ``actual_seq_lengths_kv``
    (checked where they are on the host), as it is in a decode step over exactly the top-k. Copies the lists alone. A
    row must not name a slot twice.
    """
    raw = CopyAttentionCall(*arguments, **named)  # type: ignore[arg-type]
    given = _checked(raw)
    _check_no_tail(raw.actual_seq_lengths_kv, raw.num_cache_tokens)
    AscendLimits.check_attention(
        heads=AscendLimits.attention_heads(given.query.shape[1]),
        latent=given.query.shape[2],
        rope=given.query_rope.shape[2],
        block_size=given.hbm_kv_cache.shape[1],
        dtype=given.query.dtype,
    )
    copies = miss_copies(
        *(given.miss_src_ids, given.miss_dst_slots, given.miss_counts),
        *(given.hbm_block_table, given.dram_block_table),
        *(given.hbm_k_rope, given.hbm_kv_cache, given.dram_k_rope, given.dram_kv_cache),
    )
    sparse_copy(copies, given.query.device)
    out = attend(
        *(given.query, given.query_rope, given.hbm_kv_cache, given.hbm_k_rope, given.hbm_block_table),
        *(given.actual_seq_lengths_query, given.actual_seq_lengths_kv, given.topk_dst_slots.squeeze(1)),
        given.scale_value,
    )
    given.attention_out.copy_(out)
    _report_bytes(given)


def _checked(given: CopyAttentionCall) -> CopyAttentionCall:
    """``given`` with its metadata on the device of the query."""
    dtype, int32 = given.query.dtype, torch.int32
    check_layout("query", given.query, (None, None, None), AscendLimits.DTYPES)
    rows, heads, latent = given.query.shape
    check_layout("query_rope", given.query_rope, (rows, heads, None), dtype)
    rope = given.query_rope.shape[2]
    check_layout("attention_out", given.attention_out, (rows, heads, latent), dtype)
    check_layout("miss_src_ids", given.miss_src_ids, (None, None), int32)
    requests = given.miss_src_ids.shape[0]
    check_layout("miss_dst_slots", given.miss_dst_slots, given.miss_src_ids.shape, int32)
    for name in ("actual_seq_lengths_query", "actual_seq_lengths_kv", "num_cache_tokens", "miss_counts"):
        check_layout(name, getattr(given, name), (requests,), int32)
    for name in ("hbm_block_table", "dram_block_table"):
        check_layout(name, getattr(given, name), (requests, None), int32)
    check_layout("topk_dst_slots", given.topk_dst_slots, (rows, 1, None), int32)
    check_layout("topk_src_ids", given.topk_src_ids, given.topk_dst_slots.shape, int32)
    check_layout("topk_miss_counts", given.topk_miss_counts, (rows,), int32)
    check_layout("hbm_kv_cache", given.hbm_kv_cache, (None, None, 1, latent), dtype)
    blocks, block_size = given.hbm_kv_cache.shape[:2]
    check_layout("hbm_k_rope", given.hbm_k_rope, (blocks, block_size, 1, rope), dtype)
    check_layout("dram_kv_cache", given.dram_kv_cache, (None, block_size, latent), dtype)
    check_layout("dram_k_rope", given.dram_k_rope, (given.dram_kv_cache.shape[0], block_size, rope), dtype)
    check_same_device(
        query=given.query,
        query_rope=given.query_rope,
        hbm_k_rope=given.hbm_k_rope,
        hbm_kv_cache=given.hbm_kv_cache,
        attention_out=given.attention_out,
    )
    return given._replace(**{name: getattr(given, name).to(given.query.device) for name in _METADATA})


_METADATA = (
    *("actual_seq_lengths_query", "actual_seq_lengths_kv", "num_cache_tokens"),
    *("topk_dst_slots", "topk_src_ids", "topk_miss_counts", "miss_src_ids", "miss_dst_slots", "miss_counts"),
    *("hbm_block_table", "dram_block_table"),
)


def _check_no_tail(kv_lens: Tensor, cache_tokens: Tensor) -> None:
    if kv_lens.device.type != "cpu" or cache_tokens.device.type != "cpu":
        return  # reading them would wait for the device
    for request, (length, tokens) in enumerate(zip(kv_lens.tolist(), cache_tokens.tolist(), strict=True)):
        if length > tokens:
            raise ValueError(
                f"actual_seq_lengths_kv[{request}] is {length}; legal without the fused operator: at most "
                f"num_cache_tokens[{request}], {tokens}"
            )


def _misses_first(given: CopyAttentionCall) -> CopyAttentionCall:
    """``given`` with each row's entries in order, misses, hits, padding, and the misses counted."""
    dst, src = given.topk_dst_slots.squeeze(1), given.topk_src_ids.squeeze(1)
    request = _request_of_rows(given)
    listed = _listed(given)
    fetched = torch.full((len(given.miss_counts), _columns(given)), -1, dtype=torch.int32, device=dst.device)
    fetched.scatter_(1, _column(given, given.miss_dst_slots, listed), torch.where(listed, given.miss_src_ids, -1))
    named = fetched[request].gather(1, _column(given, dst, dst >= 0)) == src
    leading = torch.arange(dst.shape[1], device=dst.device) < given.topk_miss_counts.unsqueeze(1)
    is_miss = (named | leading) & (dst >= 0) & (src >= 0)
    order = torch.where(is_miss, 0, torch.where(dst < 0, 2, 1)).int().argsort(dim=1, stable=True)
    return given._replace(
        topk_dst_slots=dst.gather(1, order).unsqueeze(1),
        topk_src_ids=src.gather(1, order).unsqueeze(1),
        topk_miss_counts=is_miss.sum(1, dtype=torch.int32),
    )


def _names_more_than_rows(given: CopyAttentionCall) -> Tensor:
    """[] bool: whether a miss list names a pair that no row of its request does."""
    dst, src = given.topk_dst_slots.squeeze(1), given.topk_src_ids.squeeze(1)
    columns = _columns(given)
    selected = torch.full((len(given.miss_counts), columns), -1, dtype=torch.int32, device=dst.device)
    place = _request_of_rows(given).unsqueeze(1) * columns + _column(given, dst, dst >= 0)
    selected.view(-1).scatter_(0, place.flatten(), torch.where(dst >= 0, src, -1).flatten())
    listed = _listed(given)
    named = selected.gather(1, _column(given, given.miss_dst_slots, listed)) == given.miss_src_ids
    return (listed & ~named).any()


def _columns(given: CopyAttentionCall) -> int:
    """Columns of a map over a request's hot slots; the last is for what has none."""
    return given.hbm_block_table.shape[1] * given.hbm_kv_cache.shape[1] + 1


def _column(given: CopyAttentionCall, slots: Tensor, valid: Tensor) -> Tensor:
    """Column of each of ``slots`` in such a map; int64."""
    nowhere = _columns(given) - 1
    return torch.where(valid & (slots < nowhere), slots, nowhere).long()


def _one_row_each(given: CopyAttentionCall) -> CopyAttentionCall:
    """``given`` as T requests of one row; a row with a cache sees at least C, its request's first row has the list."""
    request = _request_of_rows(given)
    row = torch.arange(len(request), dtype=torch.int32, device=request.device)
    lengths, kept = given.actual_seq_lengths_kv[request], given.num_cache_tokens[request]
    visible = (lengths - (given.actual_seq_lengths_query[request] - 1 - row)).clamp(min=0)
    seen = torch.where((lengths > 0) & (kept > 0), torch.maximum(visible, kept), visible)
    first = request != request.roll(1)
    first[:1] = True
    return given._replace(
        actual_seq_lengths_query=row + 1,
        actual_seq_lengths_kv=torch.where(lengths > 0, seen, 0),
        num_cache_tokens=kept,
        miss_src_ids=given.miss_src_ids[request],
        miss_dst_slots=given.miss_dst_slots[request],
        miss_counts=torch.where(first, given.miss_counts[request], 0),
        hbm_block_table=given.hbm_block_table[request],
        dram_block_table=given.dram_block_table[request],
    )


def _with_fill_switch(given: CopyAttentionCall, *, fill: Tensor) -> CopyAttentionCall:
    """``given`` with an inactive request more, whose list of no entries reaches C where ``fill``: C is 0 then."""

    def extended(name: str) -> Tensor:
        tensor: Tensor = getattr(given, name)
        return torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])

    more = given._replace(**{name: extended(name) for name in ("query", "query_rope", *_METADATA)})  # type: ignore[arg-type]
    more.actual_seq_lengths_query[-1] = len(more.query)
    more.num_cache_tokens[-1] = torch.where(fill, 0, AscendLimits.TOPK)
    return more


def _request_of_rows(given: CopyAttentionCall) -> Tensor:
    """[T] int64."""
    row = torch.arange(len(given.query), device=given.query.device)
    return (row.unsqueeze(1) >= given.actual_seq_lengths_query).sum(1)


def _listed(given: CopyAttentionCall) -> Tensor:
    """[B, M] bool: the entries of the miss lists that name a copy."""
    within = torch.arange(given.miss_src_ids.shape[1], device=given.query.device) < given.miss_counts.unsqueeze(1)
    return within & (given.miss_src_ids >= 0) & (given.miss_dst_slots >= 0)


def _widened(lists: Tensor) -> Tensor:
    """[B, M] to [B, the operator's capacity]; what is behind the counts is never read."""
    requests, capacity = lists.shape
    if capacity == AscendLimits.MISS_CAPACITY:
        return lists
    wide = lists.new_empty(requests, AscendLimits.MISS_CAPACITY)
    wide[:, :capacity] = lists
    return wide


def _report_bytes(given: CopyAttentionCall) -> None:
    if given.copied_bytes is not None:
        row_bytes = (given.query.shape[2] + given.query_rope.shape[2]) * given.query.element_size()
        given.copied_bytes.copy_(_listed(given).sum() * row_bytes)
