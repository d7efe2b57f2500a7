"""LIM: the lightning indexer fused with the management of each request's hot slots."""

from __future__ import annotations

from torch import Tensor

from engine.ops.lim_call import NO_SLOT, SCHEMA, LimCall
from engine.ops.registry import register

__all__ = ["NO_SLOT", "fused_lightning_indexer_manage"]


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
    topk_scores: Tensor | None = None,
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
        topk_scores: Optional [T, 1, K] float32, written: scores of ``topk_src_ids``, -inf where those are -1. (Not an
            argument of the Ascend operator.)

    Raises:
        ValueError: A dtype, shape or layout is illegal, row counts do not increase to T, pool entries repeat or are
            out of range, or a needed block is not in the cache. Outputs are then undefined.
    """
    _op(
        *(index_weights, query_dequant_scale, query, index_key_dequant_scale, index_key_cache, index_block_table),
        *(actual_seq_lengths_query, actual_seq_lengths_key, offload_seq_lengths_key, num_cache_tokens, request_state),
        *(req_pool_entries, cache_slots_pool, topk_src_ids, topk_dst_slots, topk_miss_counts),
        *(miss_src_ids, miss_dst_slots, miss_counts, topk_scores),
    )


def _kernel(*arguments: Tensor | None) -> None:
    LimCall.of(arguments).run(quantised=False)


_op = register(f"fused_lightning_indexer_manage({SCHEMA}) -> ()", _kernel)
