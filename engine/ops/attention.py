"""Sparse flash attention over selected positions of a paged latent (MLA) cache; used in prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import native, reference
from engine.ops.backends import current_backend
from engine.ops.checks import FLOAT_DTYPES, check_positive, check_tensor
from engine.ops.registry import register


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
    """Attend each query row to its selected positions: keys are [ckv | k_rope], values ckv (absorbed MLA).

    Computed in float32. The selection is a set: a position named twice counts once. Causality is the selection's
    business. A row that selects nothing yields zeros.

    Args:
        q_nope: [T, N, L] queries multiplied by W_UK; float32, bfloat16 or float16.
        q_rope: [T, N, R], same dtype.
        ckv_cache: [blocks, block size, 1, L], same dtype.
        k_rope_cache: [blocks, block size, 1, R], same dtype.
        block_table: [B, max blocks] int32, cache blocks of each request in order of position.
        query_ends: [B] int32, cumulative number of rows; the last is T.
        topk_ids: [T, topk] int32 source positions; negative entries are skipped.
        scale: Factor of the scores.

    Returns:
        [T, N, L] of the dtype of ``q_nope``.

    Raises:
        ValueError: A dtype, shape, layout or value is illegal, or a position has no block; the message names it.
    """
    out: Tensor = _op(q_nope, q_rope, ckv_cache, k_rope_cache, block_table, query_ends, topk_ids, scale)
    return out


def _kernel(
    q_nope: Tensor,
    q_rope: Tensor,
    ckv_cache: Tensor,
    k_rope_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    topk_ids: Tensor,
    scale: float,
) -> Tensor:
    check_tensor("q_nope", q_nope, (None, None, None), FLOAT_DTYPES)
    rows, heads, latent = q_nope.shape
    check_tensor("q_rope", q_rope, (rows, heads, None), q_nope.dtype)
    check_tensor("ckv_cache", ckv_cache, (None, None, 1, latent), q_nope.dtype)
    blocks, block_size = ckv_cache.shape[:2]
    check_positive("ckv_cache.shape[1] (block size)", block_size)
    check_tensor("k_rope_cache", k_rope_cache, (blocks, block_size, 1, q_rope.shape[2]), q_nope.dtype)
    check_tensor("block_table", block_table, (None, None), torch.int32)
    check_tensor("query_ends", query_ends, (block_table.shape[0],), torch.int32)
    check_tensor("topk_ids", topk_ids, (rows, None), torch.int32)
    if current_backend() == "reference":
        return reference.sparse_flash_attention(
            q_nope, q_rope, ckv_cache, k_rope_cache, block_table, query_ends, topk_ids, scale
        )
    out = torch.empty_like(q_nope)
    native.call(
        "sparse_flash_attention",
        {
            "query_nope": q_nope,
            "query_rope": q_rope,
            "ckv_cache": ckv_cache,
            "rope_cache": k_rope_cache,
            "block_table": block_table,
            "query_ends": query_ends,
            "topk_ids": topk_ids,
            "out": out,
            "scale": scale,
            "rows": rows,
            "heads": heads,
            "latent": latent,
            "rope": q_rope.shape[2],
            "requests": block_table.shape[0],
            "blocks": blocks,
            "block_size": block_size,
            "max_blocks": block_table.shape[1],
            "topk": topk_ids.shape[1],
            "dtype": native.dtype_code(q_nope),
        },
    )
    return out


_op = register(
    "sparse_flash_attention(Tensor q_nope, Tensor q_rope, Tensor ckv_cache, Tensor k_rope_cache, Tensor block_table, "
    "Tensor query_ends, Tensor topk_ids, float scale) -> Tensor",
    _kernel,
)
