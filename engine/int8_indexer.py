"""The int8 lightning indexer: how queries and keys are quantised, and the top-k over them.

Source of the formulas: the Ascend operators ``npu_dynamic_quant`` and ``npu_lightning_indexer_quant`` of the reference
system. Half-precision roundings are part of the contract: they decide which of two close keys is selected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.config_check import MAX_INT8_DIMS
from engine.ops.reference import cache_rows, query_spans

LARGEST_INT8 = 127

_DOT_SHIFT = 2.0**-10  # keeps dot products within float16
_LARGEST_SCALE = torch.finfo(torch.float16).max
_ROWS_AT_ONCE = 64  # bounds the memory for scores


def hadamard_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates rows by the Hadamard matrix and rounds them to int8, with one scale per row.

    Rotation spreads outliers over all dims and leaves dot products as they are. The scale is the largest magnitude
    divided by 127, rounded to float16; elements are divided by the rounded scale.

    Args:
        x: [..., D] floating point; D a power of two, at most 1024.

    Returns:
        [..., D] int8 in [-127, 127], and [...] float16 scales; a row of zeros, or one too small for float16, has
        scale 0 and zeros. A row with a NaN has scale NaN.

    Raises:
        ValueError: D is no power of two, or too large.
    """
    rotated = _hadamard(x.float())
    scale = (rotated.abs().amax(-1) / LARGEST_INT8).clamp(max=_LARGEST_SCALE).half()
    levels = (rotated / scale.float().unsqueeze(-1)).round().clamp(-LARGEST_INT8, LARGEST_INT8)
    return torch.where(scale.unsqueeze(-1) > 0, levels, 0.0).to(torch.int8), scale


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
    """`engine.ops.lightning_indexer` over int8 queries and keys.

    The score of position s for row t is
    ``key_scale[s] * sum_h half(weights[t, h] * query_scale[t, h]) * half(relu(query[t, h] . key[s]) / 1024)``.

    Args:
        query: [T, Hi, Di] int8; Di at most 1024.
        weights: [T, Hi] floating point.
        query_scale: [T, Hi] float16.
        key_cache: [blocks, block size, 1, Di] int8.
        key_scale: [blocks, block size, 1] float16.
        block_table: [B, max blocks] int32.
        query_ends: [B] int32, cumulative number of rows.
        key_lens: [B] int32, number of keys a request's last row sees.
        topk: entries per row.

    Returns:
        [T, topk] int32: positions by falling score, ties to the lowest position, NaN scores last, padded with -1.

    Raises:
        ValueError: a table or an end is out of range; the message names it.
    """
    blocks, block_size = key_cache.shape[:2]
    flat_keys, flat_scales = key_cache.flatten(0, 2), key_scale.flatten()
    head_weights = (weights.float() * query_scale.float()).half().float()
    ids = torch.full((query.shape[0], topk), -1, dtype=torch.int32)
    for i, span in enumerate(query_spans("query_ends", query_ends, query.shape[0])):
        length = max(int(key_lens[i]), 0) if span else 0
        if not length:
            continue
        at = cache_rows("block_table", block_table[i], torch.arange(length), blocks, block_size)
        keys, scales = flat_keys[at].float(), flat_scales[at].float()
        for start in range(span.start, span.stop, _ROWS_AT_ONCE):
            rows = torch.arange(start, min(start + _ROWS_AT_ONCE, span.stop))
            products = (query[rows].float() @ keys.T).relu().mul(_DOT_SHIFT).half().float()
            scores = torch.bmm(head_weights[rows].unsqueeze(1), products).squeeze(1) * scales
            visible = length - (span.stop - 1 - rows)
            hidden = torch.arange(length) >= visible.unsqueeze(1)
            ranked = torch.where(scores.isnan(), -torch.inf, scores).masked_fill(hidden, -torch.inf)
            ranked = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
            ranked = ranked.masked_fill(torch.arange(ranked.shape[1]) >= visible.unsqueeze(1), -1)
            ids[rows, : ranked.shape[1]] = ranked.int()
    return ids


def _hadamard(x: Tensor) -> Tensor:
    """x [..., D] times Hadamard(D) / sqrt(D) in Sylvester's order, by log2(D) butterflies (fast Walsh transform)."""
    dims = x.shape[-1]
    if dims < 1 or dims & (dims - 1) or dims > MAX_INT8_DIMS:
        raise ValueError(f"rows of {dims} elements cannot be rotated; legal: a power of two, at most {MAX_INT8_DIMS}")
    x, width = x.contiguous(), 1
    while width < dims:
        pairs = x.view(*x.shape[:-1], -1, 2, width)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        width *= 2
    return x / math.sqrt(dims)
