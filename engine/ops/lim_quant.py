"""LIM C8: the fused lightning indexer over an int8 indexer cache."""

from __future__ import annotations

from torch import Tensor

from engine.ops.lim_call import SCHEMA, LimCall
from engine.ops.registry import register


def fused_quant_lightning_indexer_manage(
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
    """``fused_lightning_indexer_manage`` with int8 queries and keys; scores as in ``quant_lightning_indexer``.

    Same arguments as the Ascend operator ``npu_fused_quant_lightning_indexer_manage`` (which takes bfloat16 weights
    only), and the same states, maps and outputs as the operator it is named after. Only these differ:

    Args:
        index_weights: [T, N] float32, bfloat16 or float16.
        query_dequant_scale: [T, N] float16.
        query: [T, N, D] int8, D at most 1024.
        index_key_dequant_scale: [blocks, block size, 1] float16.
        index_key_cache: [blocks, block size, 1, D] int8.
        index_block_table: As there; so are all arguments that follow.

    Raises:
        ValueError: As there.
    """
    _op(
        *(index_weights, query_dequant_scale, query, index_key_dequant_scale, index_key_cache, index_block_table),
        *(actual_seq_lengths_query, actual_seq_lengths_key, offload_seq_lengths_key, num_cache_tokens, request_state),
        *(req_pool_entries, cache_slots_pool, topk_src_ids, topk_dst_slots, topk_miss_counts),
        *(miss_src_ids, miss_dst_slots, miss_counts, topk_scores),
    )


def _kernel(*arguments: Tensor | None) -> None:
    LimCall.of(arguments).run(quantised=True)


_op = register(f"fused_quant_lightning_indexer_manage({SCHEMA}) -> ()", _kernel)
