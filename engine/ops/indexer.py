"""Lightning indexer: the top-k source positions of every query row, from keys of the model's dtype or of int8."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import native, reference
from engine.ops.backends import current_backend
from engine.ops.checks import FLOAT_DTYPES, check_index_batch, check_positive, check_tensor
from engine.ops.registry import register


def lightning_indexer(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
) -> Tensor:
    """Select for each query row the ``topk`` visible positions of its request with the highest index score.

    The score of position s for row t is ``sum_h weights[t, h] * relu(query[t, h] . key[s])``, summed in float32 in an
    order that does not depend on the batch, so that prefill and decode rank alike (DeepSeek-V3.2's indexer; its
    positive constants may be folded into ``weights``). Row t of request i sees the positions
    ``[0, key_lens[i] - (query_ends[i] - 1 - t))``.

    Args:
        query: [T, Hi, Di] float32, bfloat16 or float16.
        weights: [T, Hi] float32, bfloat16 or float16.
        key_cache: [blocks, block size, 1, Di], dtype of ``query``.
        block_table: [B, max blocks] int32, cache blocks of each request in order of position.
        query_ends: [B] int32, cumulative number of rows; the last is T.
        key_lens: [B] int32, number of keys its last row sees.
        topk: Entries per row, at least 1.

    Returns:
        [T, topk] int32: positions by falling score, ties to the lowest position, NaN scores last, padded with -1.

    Raises:
        ValueError: A dtype, shape, layout or value is illegal; the message names the argument.
    """
    ids: Tensor = _op(query, weights, key_cache, block_table, query_ends, key_lens, topk)
    return ids


def quant_lightning_indexer(
    query: Tensor,
    weights: Tensor,
    query_scale: Tensor,
    key_cache: Tensor,
    key_scale: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
) -> Tensor:
    """``lightning_indexer`` over int8 queries and keys with half-precision scales (see ``hadamard_quantise``).

    The score of position s for row t is ``key_scale[s] * sum_h half(weights[t, h] * query_scale[t, h]) *
    half(relu(query[t, h] . key[s]) / 1024)``: products of integers are exact, ``half`` rounds to float16, sums are
    float32 (formula of the Ascend operator ``npu_lightning_indexer_quant``).

    Args:
        query: [T, Hi, Di] int8, Di at most 1024.
        weights: [T, Hi] float32, bfloat16 or float16.
        query_scale: [T, Hi] float16.
        key_cache: [blocks, block size, 1, Di] int8.
        key_scale: [blocks, block size, 1] float16.
        block_table: [B, max blocks] int32, cache blocks of each request in order of position.
        query_ends: [B] int32, cumulative number of rows; the last is T.
        key_lens: [B] int32, number of keys its last row sees.
        topk: Entries per row, at least 1.

    Returns:
        As ``lightning_indexer``.

    Raises:
        ValueError: A dtype, shape, layout or value is illegal; the message names the argument.
    """
    ids: Tensor = _quant_op(query, weights, query_scale, key_cache, key_scale, block_table, query_ends, key_lens, topk)
    return ids


def _kernel(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
) -> Tensor:
    named = ("query", query), ("weights", weights), ("key_cache", key_cache)
    check_index_batch(*named, (), dtypes=FLOAT_DTYPES, weight_dtypes=FLOAT_DTYPES, scale_dtype=torch.float32)
    return _select(query, weights, None, key_cache, None, block_table, query_ends, key_lens, topk)


def _quant_kernel(
    query: Tensor,
    weights: Tensor,
    query_scale: Tensor,
    key_cache: Tensor,
    key_scale: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
) -> Tensor:
    named = ("query", query), ("weights", weights), ("key_cache", key_cache)
    scales = ("query_scale", query_scale), ("key_scale", key_scale)
    check_index_batch(*named, scales, dtypes=torch.int8, weight_dtypes=FLOAT_DTYPES, scale_dtype=torch.float16)
    return _select(query, weights, query_scale, key_cache, key_scale, block_table, query_ends, key_lens, topk)


def _select(
    query: Tensor,
    weights: Tensor,
    query_scale: Tensor | None,
    key_cache: Tensor,
    key_scale: Tensor | None,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
) -> Tensor:
    check_tensor("block_table", block_table, (None, None), torch.int32)
    requests = block_table.shape[0]
    check_tensor("query_ends", query_ends, (requests,), torch.int32)
    check_tensor("key_lens", key_lens, (requests,), torch.int32)
    check_positive("topk", topk)
    if current_backend() == "reference":
        return reference.lightning_indexer(
            query, weights, key_cache, block_table, query_ends, key_lens, topk, query_scale, key_scale
        )
    rows, heads, dims = query.shape
    ids = torch.empty(rows, topk, dtype=torch.int32)
    native.call(
        "lightning_indexer",
        {
            "query": query,
            "weights": weights,
            "key_cache": key_cache,
            "block_table": block_table,
            "query_ends": query_ends,
            "key_lens": key_lens,
            "topk_ids": ids,
            "query_scale": query_scale,
            "key_scale": key_scale,
            "rows": rows,
            "heads": heads,
            "dims": dims,
            "requests": requests,
            "blocks": key_cache.shape[0],
            "block_size": key_cache.shape[1],
            "max_blocks": block_table.shape[1],
            "topk": topk,
            "dtype": native.dtype_code(query),
            "weights_dtype": native.dtype_code(weights),
        },
    )
    return ids


_op = register(
    "lightning_indexer(Tensor query, Tensor weights, Tensor key_cache, Tensor block_table, Tensor query_ends, "
    "Tensor key_lens, int topk) -> Tensor",
    _kernel,
)
_quant_op = register(
    "quant_lightning_indexer(Tensor query, Tensor weights, Tensor query_scale, Tensor key_cache, Tensor key_scale, "
    "Tensor block_table, Tensor query_ends, Tensor key_lens, int topk) -> Tensor",
    _quant_kernel,
)
