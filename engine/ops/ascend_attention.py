"""Sparse attention over a paged cache on Ascend, by torch_npu's operator."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.ascend_indexer import check_same_device
from engine.ops.ascend_limits import AscendLimits
from engine.ops.ascend_schemas import operator
from engine.ops.checks import check_layout

_ALL = 0  # sparse_mode: a row sees all keys, causality is the selection's business
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
    AscendLimits.check_attention(
        heads=AscendLimits.attention_heads(heads),
        latent=latent,
        rope=q_rope.shape[2],
        block_size=block_size,
        dtype=q_nope.dtype,
    )
    kv_lens = torch.full_like(query_ends, max_blocks * block_size)
    return attend(q_nope, q_rope, ckv_cache, k_rope_cache, block_table, query_ends, kv_lens, topk_ids, scale)


def attend(
    q_nope: Tensor,
    q_rope: Tensor,
    ckv_cache: Tensor,
    k_rope_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    kv_lens: Tensor,
    topk_ids: Tensor,
    scale: float,
) -> Tensor:
    """``sparse_flash_attention`` without its checks, over positions below ``kv_lens`` ([B] int32) alone."""
    heads = q_nope.shape[1]
    padded = AscendLimits.attention_heads(heads)
    out: Tensor = operator("npu::npu_sparse_flash_attention")(
        pad_heads(q_nope, padded),
        ckv_cache,
        ckv_cache,
        padding_last(topk_ids).unsqueeze(1),
        scale,
        block_table=block_table,
        actual_seq_lengths_query=query_ends,
        actual_seq_lengths_kv=kv_lens,
        query_rope=pad_heads(q_rope, padded),
        key_rope=k_rope_cache,
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=_ALL,
        attention_mode=_ABSORBED,
    )[0]
    return out[:, :heads]


def pad_heads(query: Tensor, heads: int) -> Tensor:
    """[T, N, D] to [T, heads, D], the new ones zeros."""
    missing = heads - query.shape[1]
    return query if missing == 0 else torch.nn.functional.pad(query, (0, 0, 0, missing))


def padding_last(ids: Tensor) -> Tensor:
    """Rows of ``ids`` ([T, K]) with their negative entries behind the others, which keep their order."""
    return ids.gather(1, (ids < 0).int().argsort(dim=1, stable=True))
