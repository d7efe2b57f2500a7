"""Copy-SFA: fetch a decode step's misses from host memory into the hot buffer, then attend there."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import native, reference
from engine.ops.backends import current_backend
from engine.ops.checks import FLOAT_DTYPES, check_positive, check_tensor
from engine.ops.registry import register


def fused_scatter_copy_sparse_flash_attention(
    query_rope: Tensor,
    query: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    num_cache_tokens: Tensor,
    topk_dst_slots: Tensor,
    topk_src_ids: Tensor,
    topk_miss_counts: Tensor,
    miss_src_ids: Tensor,
    miss_dst_slots: Tensor,
    miss_counts: Tensor,
    hbm_block_table: Tensor,
    dram_block_table: Tensor,
    hbm_k_rope: Tensor,
    hbm_kv_cache: Tensor,
    dram_k_rope: Tensor,
    dram_kv_cache: Tensor,
    scale_value: float,
    attention_out: Tensor,
    copied_bytes: Tensor | None = None,
) -> None:
    """Copy every request's misses from host to hot slots (bit exact), then attend each row to its hot slots.

    T rows, N heads, L latent dims, R rope dims, B requests, M miss capacity, K top-k; metadata is int32, the rest of
    one dtype (float32, bfloat16, float16). Same argument order as the Ascend operator
    ``npu_fused_scatter_copy_sparse_flash_attention``, but general in all sizes.

    Copies: the first ``miss_counts[i]`` pairs of the request's miss list. If that list is empty, the first
    ``topk_miss_counts[t]`` pairs of its rows instead; where both are given (the fused indexer does) they name the same
    pairs, so a residency may fill the list alone. A pair with a negative member is skipped.

    Attention: row t of request i sees ``visible = actual_seq_lengths_kv[i] - (actual_seq_lengths_query[i] - 1 - t)``
    logical hot slots and attends, in float32, to the *set* of its non-negative ``topk_dst_slots`` and
    ``[C, visible)``, C being ``num_cache_tokens[i]``. With C = 0 the slots are ignored: it attends to
    ``[0, visible)``. With an empty tail (C = visible) it attends to exactly the slots given. A row of a request of
    length 0, or without any position, yields zeros.

    Args:
        query_rope: [T, N, R].
        query: [T, N, L] multiplied by W_UK.
        actual_seq_lengths_query: [B] cumulative number of rows; the last is T.
        actual_seq_lengths_kv: [B] logical length in the hot buffer seen by the request's last row; 0: inactive.
        num_cache_tokens: [B] C.
        topk_dst_slots: [T, 1, K] logical hot slots.
        topk_src_ids: [T, 1, K] their source positions.
        topk_miss_counts: [T] leading entries of the row that are misses.
        miss_src_ids: [B, M] source positions to fetch.
        miss_dst_slots: [B, M] logical hot slots they go to.
        miss_counts: [B].
        hbm_block_table: [B, any] blocks of the logical hot slots.
        dram_block_table: [B, any] host blocks of the source positions.
        hbm_k_rope: [hot blocks, block size, 1, R], updated in place.
        hbm_kv_cache: [hot blocks, block size, 1, L], updated in place.
        dram_k_rope: [host blocks, block size, R].
        dram_kv_cache: [host blocks, block size, L].
        scale_value: Factor of the scores.
        attention_out: [T, N, L], written in full.
        copied_bytes: Optional [1] int64, receives the bytes copied; they are also reported to the emulated driver.

    Raises:
        ValueError: A dtype, shape, layout or value is illegal, or a position or slot has no block; the message names
            it. Outputs are then undefined.
    """
    _op(
        *(query_rope, query, actual_seq_lengths_query, actual_seq_lengths_kv, num_cache_tokens),
        *(topk_dst_slots, topk_src_ids, topk_miss_counts, miss_src_ids, miss_dst_slots, miss_counts),
        *(hbm_block_table, dram_block_table, hbm_k_rope, hbm_kv_cache, dram_k_rope, dram_kv_cache),
        *(scale_value, attention_out, copied_bytes),
    )


def _kernel(
    query_rope: Tensor,
    query: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    num_cache_tokens: Tensor,
    topk_dst_slots: Tensor,
    topk_src_ids: Tensor,
    topk_miss_counts: Tensor,
    miss_src_ids: Tensor,
    miss_dst_slots: Tensor,
    miss_counts: Tensor,
    hbm_block_table: Tensor,
    dram_block_table: Tensor,
    hbm_k_rope: Tensor,
    hbm_kv_cache: Tensor,
    dram_k_rope: Tensor,
    dram_kv_cache: Tensor,
    scale_value: float,
    attention_out: Tensor,
    copied_bytes: Tensor | None = None,  # the dispatcher leaves a trailing default out
) -> None:
    check_tensor("query", query, (None, None, None), FLOAT_DTYPES)
    rows, heads, latent = query.shape
    check_tensor("query_rope", query_rope, (rows, heads, None), query.dtype)
    rope = query_rope.shape[2]
    check_tensor("actual_seq_lengths_query", actual_seq_lengths_query, (None,), torch.int32)
    requests = actual_seq_lengths_query.shape[0]
    check_tensor("actual_seq_lengths_kv", actual_seq_lengths_kv, (requests,), torch.int32)
    check_tensor("num_cache_tokens", num_cache_tokens, (requests,), torch.int32)
    check_tensor("topk_dst_slots", topk_dst_slots, (rows, 1, None), torch.int32)
    topk = topk_dst_slots.shape[2]
    check_tensor("topk_src_ids", topk_src_ids, (rows, 1, topk), torch.int32)
    check_tensor("topk_miss_counts", topk_miss_counts, (rows,), torch.int32)
    check_tensor("miss_src_ids", miss_src_ids, (requests, None), torch.int32)
    miss_capacity = miss_src_ids.shape[1]
    check_tensor("miss_dst_slots", miss_dst_slots, (requests, miss_capacity), torch.int32)
    check_tensor("miss_counts", miss_counts, (requests,), torch.int32)
    check_tensor("hbm_block_table", hbm_block_table, (requests, None), torch.int32)
    check_tensor("dram_block_table", dram_block_table, (requests, None), torch.int32)
    check_tensor("hbm_kv_cache", hbm_kv_cache, (None, None, 1, latent), query.dtype)
    hbm_blocks, block_size = hbm_kv_cache.shape[:2]
    check_positive("hbm_kv_cache.shape[1] (block size)", block_size)
    check_tensor("hbm_k_rope", hbm_k_rope, (hbm_blocks, block_size, 1, rope), query.dtype)
    check_tensor("dram_kv_cache", dram_kv_cache, (None, block_size, latent), query.dtype)
    dram_blocks = dram_kv_cache.shape[0]
    check_tensor("dram_k_rope", dram_k_rope, (dram_blocks, block_size, rope), query.dtype)
    check_tensor("attention_out", attention_out, (rows, heads, latent), query.dtype)
    if copied_bytes is not None:
        check_tensor("copied_bytes", copied_bytes, (1,), torch.int64)
    if current_backend() == "reference":
        moved = reference.copy_misses(
            *(actual_seq_lengths_query, topk_dst_slots, topk_src_ids, topk_miss_counts),
            *(miss_src_ids, miss_dst_slots, miss_counts, hbm_block_table, dram_block_table),
            *(hbm_k_rope, hbm_kv_cache, dram_k_rope, dram_kv_cache),
        )
        if copied_bytes is not None:
            copied_bytes.fill_(moved)
        reference.hot_attention(
            *(query_rope, query, actual_seq_lengths_query, actual_seq_lengths_kv, num_cache_tokens),
            *(topk_dst_slots, hbm_block_table, hbm_k_rope, hbm_kv_cache, attention_out),
            scale=scale_value,
        )
        return
    native.call(
        "copy_sparse_flash_attention",
        {
            "query_rope": query_rope,
            "query": query,
            "query_ends": actual_seq_lengths_query,
            "kv_lens": actual_seq_lengths_kv,
            "cache_tokens": num_cache_tokens,
            "topk_dst_slots": topk_dst_slots,
            "topk_src_ids": topk_src_ids,
            "topk_miss_counts": topk_miss_counts,
            "miss_src_ids": miss_src_ids,
            "miss_dst_slots": miss_dst_slots,
            "miss_counts": miss_counts,
            "hbm_block_table": hbm_block_table,
            "dram_block_table": dram_block_table,
            "hbm_rope": hbm_k_rope,
            "hbm_ckv": hbm_kv_cache,
            "dram_rope": dram_k_rope,
            "dram_ckv": dram_kv_cache,
            "out": attention_out,
            "copied_bytes": copied_bytes,
            "scale": scale_value,
            "rows": rows,
            "heads": heads,
            "latent": latent,
            "rope": rope,
            "requests": requests,
            "topk": topk,
            "miss_capacity": miss_capacity,
            "hbm_blocks": hbm_blocks,
            "dram_blocks": dram_blocks,
            "block_size": block_size,
            "hbm_max_blocks": hbm_block_table.shape[1],
            "dram_max_blocks": dram_block_table.shape[1],
            "dtype": native.dtype_code(query),
        },
    )


_op = register(
    "fused_scatter_copy_sparse_flash_attention(Tensor query_rope, Tensor query, Tensor actual_seq_lengths_query, "
    "Tensor actual_seq_lengths_kv, Tensor num_cache_tokens, Tensor topk_dst_slots, Tensor topk_src_ids, "
    "Tensor topk_miss_counts, Tensor miss_src_ids, Tensor miss_dst_slots, Tensor miss_counts, Tensor hbm_block_table, "
    "Tensor dram_block_table, Tensor(a!) hbm_k_rope, Tensor(b!) hbm_kv_cache, Tensor dram_k_rope, "
    "Tensor dram_kv_cache, float scale_value, Tensor(c!) attention_out, Tensor(d!)? copied_bytes=None) -> ()",
    _kernel,
)
