"""LIM: the lightning indexer fused with the management of each request's hot slots."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import native, reference_lim
from engine.ops.backends import current_backend
from engine.ops.checks import FLOAT_DTYPES, check_positive, check_tensor
from engine.ops.registry import register

NO_SLOT = torch.iinfo(torch.int32).min
"""Entry of ``cache_slots_pool`` for a position that is not in the hot buffer."""


def fused_lightning_indexer_manage(
    index_weights: Tensor,
    query_dequant_scale: Tensor,
    query: Tensor,
    index_key_dequant_scale: Tensor,
    index_key_cache: Tensor,
    index_block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    offload_seq_lengths_key: Tensor,
    num_cache_tokens: Tensor,
    request_state: Tensor,
    req_pool_entries: Tensor,
    cache_slots_pool: Tensor,
    topk_src_ids: Tensor,
    topk_dst_slots: Tensor,
    topk_miss_counts: Tensor,
    miss_src_ids: Tensor,
    miss_dst_slots: Tensor,
    miss_counts: Tensor,
) -> None:
    """Select every row's top-k and decide which hot slot each selected position has or gets.

    Same arguments as the Ascend operator ``npu_fused_lightning_indexer_manage`` (bfloat16/float16), but general in
    top-k K (``topk_src_ids.shape[2]``), block size (``index_key_cache.shape[1]``), miss capacity M
    (``miss_src_ids.shape[1]``), heads and dims; ``AscendLimits`` has what that operator demands. T rows, B requests;
    scores and ties as in ``lightning_indexer``. Integers are int32.

    Per request, by ``request_state``, with L = ``offload_seq_lengths_key`` (sealed positions, all searchable) and
    C = ``num_cache_tokens`` (hot capacity):

    * -3, not offloaded: row r selects from the positions it sees, by falling score, padded with -1; slots equal
      positions; no misses; the pool row becomes the identity.
    * -2, first decode: rows select from [0, L). The pool row is rebuilt: the union of their selections in ascending
      order, then the lowest other positions, get slots 0 .. C-1; all C are misses. Rows are ascending.
    * -1, steady: rows select from [0, L). The pool row must hold exactly C positions below L in slots 0 .. C-1 (an
      identity row is first cut to [0, C)). The union of the rows' misses, ascending, takes the slots of victims:
      residents outside every row's selection with the lowest summed score, ties from the highest position. Rows are
      their misses, ascending, then their hits, ascending.

    States -2 and -1 require K <= L <= keys, L and C multiples of the block size, C <= min(L, M), C = L where
    L <= Q*K and else C >= Q*K (Q the request's rows), L <= floor((keys - Q) / block) * block; all require
    Q <= keys <= pool width. A request that violates this, has another state, or (-1) whose pool row breaks the
    precondition keeps its pool row; its rows are -1 and its counts 0.

    Args:
        index_weights: [T, N], dtype of ``query``.
        query_dequant_scale: [T, N] float32; not read.
        query: [T, N, D] float32, bfloat16 or float16.
        index_key_dequant_scale: [blocks, block size, 1] float32; not read.
        index_key_cache: [blocks, block size, 1, D], dtype of ``query``.
        index_block_table: [B, max blocks].
        actual_seq_lengths_query: [B] cumulative number of rows, strictly increasing; the last is T.
        actual_seq_lengths_key: [B] number of keys the request's last row sees.
        offload_seq_lengths_key: [B] L.
        num_cache_tokens: [B] C.
        request_state: [B] -3, -2 or -1.
        req_pool_entries: [B] rows of ``cache_slots_pool``, distinct; others do not change.
        cache_slots_pool: [any, max blocks * block size] slot of each source position, negative: not resident;
            updated in place.
        topk_src_ids: [T, 1, K], written.
        topk_dst_slots: [T, 1, K], written.
        topk_miss_counts: [T], written: leading entries of the row that are misses.
        miss_src_ids: [B, M], the first ``miss_counts`` of each row written.
        miss_dst_slots: [B, M], likewise.
        miss_counts: [B], written.

    Raises:
        ValueError: A dtype, shape or layout is illegal, row counts do not increase to T, pool entries repeat or are
            out of range, or a needed block is not in the cache. Outputs are then undefined.
    """
    _op(
        *(index_weights, query_dequant_scale, query, index_key_dequant_scale, index_key_cache, index_block_table),
        *(actual_seq_lengths_query, actual_seq_lengths_key, offload_seq_lengths_key, num_cache_tokens, request_state),
        *(req_pool_entries, cache_slots_pool, topk_src_ids, topk_dst_slots, topk_miss_counts),
        *(miss_src_ids, miss_dst_slots, miss_counts),
    )


def _kernel(
    index_weights: Tensor,
    query_dequant_scale: Tensor,
    query: Tensor,
    index_key_dequant_scale: Tensor,
    index_key_cache: Tensor,
    index_block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    offload_seq_lengths_key: Tensor,
    num_cache_tokens: Tensor,
    request_state: Tensor,
    req_pool_entries: Tensor,
    cache_slots_pool: Tensor,
    topk_src_ids: Tensor,
    topk_dst_slots: Tensor,
    topk_miss_counts: Tensor,
    miss_src_ids: Tensor,
    miss_dst_slots: Tensor,
    miss_counts: Tensor,
) -> None:
    check_tensor("query", query, (None, None, None), FLOAT_DTYPES)
    rows, heads, dims = query.shape
    check_tensor("index_weights", index_weights, (rows, heads), query.dtype)
    check_tensor("index_key_cache", index_key_cache, (None, None, 1, dims), query.dtype)
    blocks, block_size = index_key_cache.shape[:2]
    check_positive("index_key_cache.shape[1] (block size)", block_size)
    if query_dequant_scale.dtype != torch.float32 or index_key_dequant_scale.dtype != torch.float32:
        given = f"query_dequant_scale is {query_dequant_scale.dtype}"
        raise ValueError(
            f"dequant scales must be fp32; {given}, index_key_dequant_scale {index_key_dequant_scale.dtype}"
        )
    check_tensor("query_dequant_scale", query_dequant_scale, (rows, heads), torch.float32)
    check_tensor("index_key_dequant_scale", index_key_dequant_scale, (blocks, block_size, 1), torch.float32)
    check_tensor("index_block_table", index_block_table, (None, None), torch.int32)
    requests, max_blocks = index_block_table.shape
    per_request = {
        "actual_seq_lengths_query": actual_seq_lengths_query,
        "actual_seq_lengths_key": actual_seq_lengths_key,
        "offload_seq_lengths_key": offload_seq_lengths_key,
        "num_cache_tokens": num_cache_tokens,
        "request_state": request_state,
        "req_pool_entries": req_pool_entries,
        "miss_counts": miss_counts,
    }
    for name, tensor in per_request.items():
        check_tensor(name, tensor, (requests,), torch.int32)
    check_tensor("cache_slots_pool", cache_slots_pool, (None, max_blocks * block_size), torch.int32)
    check_tensor("topk_src_ids", topk_src_ids, (rows, 1, None), torch.int32)
    topk = topk_src_ids.shape[2]
    check_positive("topk_src_ids.shape[2] (top-k)", topk)
    check_tensor("topk_dst_slots", topk_dst_slots, (rows, 1, topk), torch.int32)
    check_tensor("topk_miss_counts", topk_miss_counts, (rows,), torch.int32)
    try:
        check_tensor("miss_src_ids", miss_src_ids, (requests, None), torch.int32)
        check_tensor("miss_dst_slots", miss_dst_slots, tuple(miss_src_ids.shape), torch.int32)
    except ValueError as error:
        raise ValueError(f"miss outputs must be two like contiguous int32 lists per request: {error}") from None
    if current_backend() == "reference":
        reference_lim.fused_lightning_indexer_manage(
            *(index_weights, query, index_key_cache, index_block_table),
            *(actual_seq_lengths_query, actual_seq_lengths_key, offload_seq_lengths_key, num_cache_tokens),
            *(request_state, req_pool_entries, cache_slots_pool, topk_src_ids, topk_dst_slots, topk_miss_counts),
            *(miss_src_ids, miss_dst_slots, miss_counts),
        )
        return
    native.call(
        "lightning_indexer_manage",
        {
            "weights": index_weights,
            "query": query,
            "key_cache": index_key_cache,
            "block_table": index_block_table,
            "query_ends": actual_seq_lengths_query,
            "key_lens": actual_seq_lengths_key,
            "stable_lens": offload_seq_lengths_key,
            "cache_tokens": num_cache_tokens,
            "states": request_state,
            "pool_entries": req_pool_entries,
            "slots_pool": cache_slots_pool,
            "topk_src_ids": topk_src_ids,
            "topk_dst_slots": topk_dst_slots,
            "topk_miss_counts": topk_miss_counts,
            "miss_src_ids": miss_src_ids,
            "miss_dst_slots": miss_dst_slots,
            "miss_counts": miss_counts,
            "rows": rows,
            "heads": heads,
            "dims": dims,
            "requests": requests,
            "blocks": blocks,
            "block_size": block_size,
            "max_blocks": max_blocks,
            "topk": topk,
            "pool_rows": cache_slots_pool.shape[0],
            "pool_width": cache_slots_pool.shape[1],
            "miss_capacity": miss_src_ids.shape[1],
            "dtype": native.dtype_code(query),
        },
    )


_op = register(
    "fused_lightning_indexer_manage(Tensor index_weights, Tensor query_dequant_scale, Tensor query, "
    "Tensor index_key_dequant_scale, Tensor index_key_cache, Tensor index_block_table, "
    "Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_key, Tensor offload_seq_lengths_key, "
    "Tensor num_cache_tokens, Tensor request_state, Tensor req_pool_entries, Tensor(a!) cache_slots_pool, "
    "Tensor(b!) topk_src_ids, Tensor(c!) topk_dst_slots, Tensor(d!) topk_miss_counts, Tensor(e!) miss_src_ids, "
    "Tensor(f!) miss_dst_slots, Tensor(g!) miss_counts) -> ()",
    _kernel,
)
