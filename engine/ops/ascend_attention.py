"""Sparse attention on Ascend: torch_npu's over a paged cache, and Copy-SFA fused or put together from two operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.ascend_indexer import check_same_device
from engine.ops.ascend_limits import AscendLimits
from engine.ops.ascend_offload import miss_copies, sparse_copy
from engine.ops.ascend_schemas import operator
from engine.ops.checks import check_layout

_ALL, _CAUSAL = 0, 3  # sparse_mode: a row sees all keys, or those before it, right-aligned
_ABSORBED = 2  # attention_mode: MLA with keys [ckv | rope] and values ckv


def sparse_flash_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    ckv_cache: Tensor,
    k_rope_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    topk_ids: Tensor,
    scale: float,
) -> Tensor:
    """``engine.ops.sparse_flash_attention`` by ``npu_sparse_flash_attention``; a row must not name a position twice."""
    check_layout("q_nope", q_nope, (None, None, None), AscendLimits.DTYPES)
    rows, heads, latent = q_nope.shape
    check_layout("q_rope", q_rope, (rows, heads, None), q_nope.dtype)
    check_layout("ckv_cache", ckv_cache, (None, None, 1, latent), q_nope.dtype)
    blocks, block_size = ckv_cache.shape[:2]
    check_layout("k_rope_cache", k_rope_cache, (blocks, block_size, 1, q_rope.shape[2]), q_nope.dtype)
    check_layout("block_table", block_table, (None, None), torch.int32)
    requests, max_blocks = block_table.shape
    check_layout("query_ends", query_ends, (requests,), torch.int32)
    check_layout("topk_ids", topk_ids, (rows, None), torch.int32)
    check_same_device(q_nope=q_nope, q_rope=q_rope, ckv_cache=ckv_cache, k_rope_cache=k_rope_cache, topk_ids=topk_ids)
    padded = AscendLimits.attention_heads(heads)
    AscendLimits.check_attention(
        heads=padded, latent=latent, rope=q_rope.shape[2], block_size=block_size, dtype=q_nope.dtype
    )
    return _attend(
        pad_heads(q_nope, padded),
        pad_heads(q_rope, padded),
        *(ckv_cache, k_rope_cache, block_table, query_ends),
        kv_lens=torch.full_like(query_ends, max_blocks * block_size),  # causality is the selection's business
        selected=padding_last(topk_ids),
        scale=scale,
        sparse_mode=_ALL,
    )[:, :heads]


class CopyAttentionArguments(NamedTuple):
    """The arguments of Copy-SFA in the operator's order; see ``fused_scatter_copy_sparse_flash_attention``."""

    query_rope: Tensor
    query: Tensor
    actual_seq_lengths_query: Tensor
    actual_seq_lengths_kv: Tensor
    num_cache_tokens: Tensor
    topk_dst_slots: Tensor
    topk_src_ids: Tensor
    topk_miss_counts: Tensor
    miss_src_ids: Tensor
    miss_dst_slots: Tensor
    miss_counts: Tensor
    hbm_block_table: Tensor
    dram_block_table: Tensor
    hbm_k_rope: Tensor
    hbm_kv_cache: Tensor
    dram_k_rope: Tensor
    dram_kv_cache: Tensor
    scale_value: float
    attention_out: Tensor
    copied_bytes: Tensor | None = None


class _Selection(NamedTuple):
    """Rows as the operator's steady path reads them: misses, then hits, then padding."""

    dst_slots: Tensor  # [T, 1, K] int32
    src_ids: Tensor  # [T, 1, K] int32
    miss_counts: Tensor  # [T] int32


def fused_scatter_copy_sparse_flash_attention(
    *arguments: Tensor | float | None, **named: Tensor | float | None
) -> None:
    """Copy-SFA by ``npu_fused_scatter_copy_sparse_flash_attention``, given what the CPU operator accepts.

    The operator has two paths. Where some request's list has at least C entries it copies the lists; else it copies,
    row by row while attending, the leading ``topk_miss_counts`` entries, and reads no list. So rows are put in order
    here: entries that the request's list names, or that lead already, come first and are counted, padding goes last.
    Lists are widened to the operator's capacity, heads padded with zeros to a number it knows. Metadata may be on the
    host; the caches of ``dram_*`` must be memory that the device can address (``transfer.host_pool``).

    Every miss must be in its request's list, and every entry of a list in some row of its request: LIM and
    ``lru_residency`` see to it. A row must not name a slot twice. ``copied_bytes`` waits for the device.
    """
    given = _checked(CopyAttentionArguments(*arguments, **named))  # type: ignore[arg-type]
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
    selection = _misses_first(given)
    out = given.attention_out if padded == heads else given.attention_out.new_empty(rows, padded, latent)
    operator("_C_ascend::npu_fused_scatter_copy_sparse_flash_attention")(
        *(pad_heads(given.query_rope, padded), pad_heads(given.query, padded)),
        *(given.actual_seq_lengths_query, given.actual_seq_lengths_kv, given.num_cache_tokens),
        *selection,
        *(_widened(given.miss_src_ids), _widened(given.miss_dst_slots), given.miss_counts),
        *(given.hbm_block_table, given.dram_block_table, given.hbm_k_rope, given.hbm_kv_cache),
        *(given.dram_k_rope, given.dram_kv_cache, given.scale_value, out),
    )
    if out is not given.attention_out:
        given.attention_out.copy_(out[:, :heads])
    _report_bytes(given)


def copy_then_attend(*arguments: Tensor | float | None, **named: Tensor | float | None) -> None:
    """Copy-SFA without vllm-ascend's operator: MemFabric's copy kernel, then ``npu_sparse_flash_attention``.

    Attends to the slots given and to no others, so each ``num_cache_tokens`` must be at least ``actual_seq_lengths_kv``
    (checked where they are on the host), as it is in a decode step over exactly the top-k. Copies the lists alone.
    """
    raw = CopyAttentionArguments(*arguments, **named)  # type: ignore[arg-type]
    given = _checked(raw)
    _check_no_tail(raw.actual_seq_lengths_kv, raw.num_cache_tokens)
    heads = given.query.shape[1]
    padded = AscendLimits.attention_heads(heads)
    AscendLimits.check_attention(
        heads=padded,
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
    out = _attend(
        pad_heads(given.query, padded),
        pad_heads(given.query_rope, padded),
        *(given.hbm_kv_cache, given.hbm_k_rope, given.hbm_block_table, given.actual_seq_lengths_query),
        kv_lens=given.actual_seq_lengths_kv,
        selected=padding_last(given.topk_dst_slots.squeeze(1)),
        scale=given.scale_value,
        sparse_mode=_CAUSAL,
    )
    given.attention_out.copy_(out[:, :heads])
    _report_bytes(given)


def pad_heads(query: Tensor, heads: int) -> Tensor:
    """[T, N, D] to [T, heads, D], the new ones zeros."""
    missing = heads - query.shape[1]
    return query if missing == 0 else torch.nn.functional.pad(query, (0, 0, 0, missing))


def padding_last(ids: Tensor) -> Tensor:
    """Rows of ``ids`` ([T, K]) with their negative entries behind the others, which keep their order."""
    return ids.gather(1, (ids < 0).int().argsort(dim=1, stable=True))


def _attend(
    q_nope: Tensor,
    q_rope: Tensor,
    ckv_cache: Tensor,
    k_rope_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    *,
    kv_lens: Tensor,
    selected: Tensor,
    scale: float,
    sparse_mode: int,
) -> Tensor:
    out: Tensor = operator("npu::npu_sparse_flash_attention")(
        q_nope,
        ckv_cache,
        ckv_cache,
        selected.unsqueeze(1),
        scale,
        block_table=block_table,
        actual_seq_lengths_query=query_ends,
        actual_seq_lengths_kv=kv_lens,
        query_rope=q_rope,
        key_rope=k_rope_cache,
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=sparse_mode,
        attention_mode=_ABSORBED,
    )[0]
    return out


def _checked(given: CopyAttentionArguments) -> CopyAttentionArguments:
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


def _misses_first(given: CopyAttentionArguments) -> _Selection:
    dst, src = given.topk_dst_slots.squeeze(1), given.topk_src_ids.squeeze(1)
    rows, topk = dst.shape
    slots = given.hbm_block_table.shape[1] * given.hbm_kv_cache.shape[1]
    nowhere = slots  # one more column takes what is not listed
    listed = _listed(given)
    fetched = torch.full((len(given.miss_counts), slots + 1), -1, dtype=torch.int32, device=dst.device)
    listed_slots = torch.where(listed & (given.miss_dst_slots < slots), given.miss_dst_slots, nowhere).long()
    fetched.scatter_(1, listed_slots, torch.where(listed, given.miss_src_ids, -1))
    row = torch.arange(rows, device=dst.device)
    request = (row.unsqueeze(1) >= given.actual_seq_lengths_query).sum(1)
    own_slots = torch.where((dst >= 0) & (dst < slots), dst, nowhere).long()
    named = fetched[request].gather(1, own_slots) == src
    leading = torch.arange(topk, device=dst.device) < given.topk_miss_counts.unsqueeze(1)
    is_miss = (named | leading) & (dst >= 0) & (src >= 0)
    order = torch.where(is_miss, 0, torch.where(dst < 0, 2, 1)).int().argsort(dim=1, stable=True)
    return _Selection(
        dst.gather(1, order).unsqueeze(1), src.gather(1, order).unsqueeze(1), is_miss.sum(1, dtype=torch.int32)
    )


def _listed(given: CopyAttentionArguments) -> Tensor:
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


def _report_bytes(given: CopyAttentionArguments) -> None:
    if given.copied_bytes is not None:
        row_bytes = (given.query.shape[2] + given.query_rope.shape[2]) * given.query.element_size()
        given.copied_bytes.copy_(_listed(given).sum() * row_bytes)
