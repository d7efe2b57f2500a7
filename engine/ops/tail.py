"""Exact selection on top of LIM, which searches only the stable prefix of a request."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import native, reference_tail
from engine.ops.backends import current_backend
from engine.ops.checks import FLOAT_DTYPES, check_index_batch, check_positive, check_tensor
from engine.ops.registry import register


def select_with_tail(
    index_weights: Tensor,
    query: Tensor,
    index_key_cache: Tensor,
    index_block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    offload_seq_lengths_key: Tensor,
    num_cache_tokens: Tensor,
    request_state: Tensor,
    topk_src_ids: Tensor,
    topk_dst_slots: Tensor,
    topk_scores: Tensor | None = None,
    query_dequant_scale: Tensor | None = None,
    index_key_dequant_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The exact top-k over all positions a row sees, from LIM's top-k over the stable prefix and the tail.

    Copy-SFA after LIM attends LIM's top-k and the whole tail ``[L, visible)``: a superset of the model's top-k. The
    model's top-k is a subset of it, too: what this operator returns. Give its slots to Copy-SFA, along with LIM's miss
    lists, ``topk_miss_counts`` of 0 and ``num_cache_tokens = actual_seq_lengths_kv`` (nothing behind the slots), and
    attention is over exactly the top-k. Rows of state -3, and rows LIM refused, are returned as they are.

    Arguments are those of the preceding call of ``fused_lightning_indexer_manage`` (float query and keys) or
    ``fused_quant_lightning_indexer_manage`` (int8; with the two scales), as it left them.

    Args:
        index_weights: [T, N].
        query: [T, N, D].
        index_key_cache: [blocks, block size, 1, D].
        index_block_table: [B, max blocks].
        actual_seq_lengths_query: [B].
        actual_seq_lengths_key: [B].
        offload_seq_lengths_key: [B] L.
        num_cache_tokens: [B] C.
        request_state: [B].
        topk_src_ids: [T, 1, K].
        topk_dst_slots: [T, 1, K].
        topk_scores: [T, 1, K] float32, LIM's scores of its selection; computed again if None.
        query_dequant_scale: [T, N] float16, for int8 queries only.
        index_key_dequant_scale: [blocks, block size, 1] float16, likewise.

    Returns:
        Source positions [T, 1, K] int32, by falling score, ties to the lowest position, and their logical hot slots
        [T, 1, K] int32: LIM's for positions below L, C + p - L for positions p of the tail; both padded with -1.

    Raises:
        ValueError: A dtype, shape, layout or value is illegal; the message names the argument.
    """
    ids, slots = _op(
        *(index_weights, query, index_key_cache, index_block_table, actual_seq_lengths_query, actual_seq_lengths_key),
        *(offload_seq_lengths_key, num_cache_tokens, request_state, topk_src_ids, topk_dst_slots, topk_scores),
        *(query_dequant_scale, index_key_dequant_scale),
    )
    return ids, slots


def _kernel(
    index_weights: Tensor,
    query: Tensor,
    index_key_cache: Tensor,
    index_block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    offload_seq_lengths_key: Tensor,
    num_cache_tokens: Tensor,
    request_state: Tensor,
    topk_src_ids: Tensor,
    topk_dst_slots: Tensor,
    topk_scores: Tensor | None = None,  # the dispatcher leaves trailing defaults out
    query_dequant_scale: Tensor | None = None,
    index_key_dequant_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    named = ("query", query), ("index_weights", index_weights), ("index_key_cache", index_key_cache)
    scales: list[tuple[str, Tensor]] = []
    if query.dtype == torch.int8:
        if query_dequant_scale is None or index_key_dequant_scale is None:
            raise ValueError("query_dequant_scale or index_key_dequant_scale is None; both are needed for int8 queries")
        scales = [
            ("query_dequant_scale", query_dequant_scale),
            ("index_key_dequant_scale", index_key_dequant_scale),
        ]
    elif query_dequant_scale is not None or index_key_dequant_scale is not None:
        raise ValueError(f"dequant scales are given but query is {query.dtype}; legal with scales: torch.int8")
    rows = check_index_batch(
        *named,
        scales,
        dtypes=(*FLOAT_DTYPES, torch.int8),
        weight_dtypes=FLOAT_DTYPES,
        scale_dtype=torch.float16,
    )
    check_tensor("index_block_table", index_block_table, (None, None), torch.int32)
    requests, max_blocks = index_block_table.shape
    per_request = {
        "actual_seq_lengths_query": actual_seq_lengths_query,
        "actual_seq_lengths_key": actual_seq_lengths_key,
        "offload_seq_lengths_key": offload_seq_lengths_key,
        "num_cache_tokens": num_cache_tokens,
        "request_state": request_state,
    }
    for name, tensor in per_request.items():
        check_tensor(name, tensor, (requests,), torch.int32)
    check_tensor("topk_src_ids", topk_src_ids, (rows, 1, None), torch.int32)
    topk = topk_src_ids.shape[2]
    check_positive("topk_src_ids.shape[2] (top-k)", topk)
    check_tensor("topk_dst_slots", topk_dst_slots, (rows, 1, topk), torch.int32)
    if topk_scores is not None:
        check_tensor("topk_scores", topk_scores, (rows, 1, topk), torch.float32)
    ids, slots = torch.empty_like(topk_src_ids), torch.empty_like(topk_dst_slots)
    if current_backend() == "reference":
        reference_tail.select_with_tail(
            *(index_weights, query, index_key_cache, index_block_table, actual_seq_lengths_query),
            *(actual_seq_lengths_key, offload_seq_lengths_key, num_cache_tokens, request_state),
            *(topk_src_ids, topk_dst_slots),
            topk_scores=topk_scores,
            query_scale=query_dequant_scale,
            key_scale=index_key_dequant_scale,
            ids=ids,
            slots=slots,
        )
        return ids, slots
    native.call(
        "select_with_tail",
        {
            "weights": index_weights,
            "query_scale": query_dequant_scale,
            "query": query,
            "key_scale": index_key_dequant_scale,
            "key_cache": index_key_cache,
            "block_table": index_block_table,
            "query_ends": actual_seq_lengths_query,
            "key_lens": actual_seq_lengths_key,
            "stable_lens": offload_seq_lengths_key,
            "cache_tokens": num_cache_tokens,
            "states": request_state,
            "topk_src_ids": topk_src_ids,
            "topk_dst_slots": topk_dst_slots,
            "topk_scores": topk_scores,
            "ids": ids,
            "slots": slots,
            "rows": rows,
            "heads": query.shape[1],
            "dims": query.shape[2],
            "requests": requests,
            "blocks": index_key_cache.shape[0],
            "block_size": index_key_cache.shape[1],
            "max_blocks": max_blocks,
            "topk": topk,
            "dtype": native.dtype_code(query),
            "weights_dtype": native.dtype_code(index_weights),
        },
    )
    return ids, slots


_op = register(
    "select_with_tail(Tensor index_weights, Tensor query, Tensor index_key_cache, Tensor index_block_table, "
    "Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_key, Tensor offload_seq_lengths_key, "
    "Tensor num_cache_tokens, Tensor request_state, Tensor topk_src_ids, Tensor topk_dst_slots, "
    "Tensor? topk_scores=None, Tensor? query_dequant_scale=None, Tensor? index_key_dequant_scale=None) "
    "-> (Tensor, Tensor)",
    _kernel,
)
