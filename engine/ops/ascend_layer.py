"""torch_npu's operators around attention: cache writes, rotary embedding, normalisation, quantisation.

Layouts are those the operators demand: T tokens stand in the batch dimension, one head and one position each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.ascend_limits import AscendLimits
from engine.ops.ascend_schemas import operator
from engine.ops.checks import check_layout


def write_kv(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_rope_cache: Tensor,
    ckv_cache: Tensor,
    epsilon: float,
) -> None:
    """Normalise the latent part of ``kv`` (RMS), rotate its rope part (interleaved) and write both to their caches.

    Args:
        kv: [T, L + R], the latent part first; bfloat16 or float16.
        gamma: [L] weight of the norm.
        cos: [T, R], as for ``rope_interleaved``; dtype of ``kv``.
        sin: [T, R].
        slots: [T] int64, row of the cache of each token.
        k_rope_cache: [blocks, block size, 1, R], updated in place.
        ckv_cache: [blocks, block size, 1, L], updated in place.
        epsilon: Of the norm.
    """
    latent, rope = gamma.shape[0], cos.shape[-1]
    check_layout("gamma", gamma, (AscendLimits.LATENT,), kv.dtype)
    check_layout("kv", kv, (None, latent + AscendLimits.ROPE), AscendLimits.DTYPES)
    tokens = kv.shape[0]
    for name, angles in (("cos", cos), ("sin", sin)):
        check_layout(name, angles, (tokens, AscendLimits.ROPE), kv.dtype)
    check_layout("slots", slots, (tokens,), torch.int64)
    check_layout("k_rope_cache", k_rope_cache, (None, AscendLimits.BLOCK, 1, rope), kv.dtype)
    check_layout("ckv_cache", ckv_cache, (k_rope_cache.shape[0], AscendLimits.BLOCK, 1, latent), kv.dtype)
    operator("npu::npu_kv_rmsnorm_rope_cache")(
        kv.view(tokens, 1, 1, latent + rope),
        gamma,
        cos.view(tokens, 1, 1, rope),
        sin.view(tokens, 1, 1, rope),
        slots,
        k_rope_cache,
        ckv_cache,
        epsilon=epsilon,
        cache_mode="PA",
    )


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write ``rows`` ([T, D]) to the rows ``slots`` ([T] int64) of a contiguous ``cache`` of rows of D, in place."""
    check_layout("rows", rows, (None, cache.shape[-1]), cache.dtype)
    check_layout("slots", slots, (rows.shape[0],), torch.int64)
    check_layout("cache", cache, cache.shape, cache.dtype)
    operator("npu::npu_scatter_nd_update_")(cache.view(-1, cache.shape[-1]), slots.view(-1, 1), rows)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the neighbouring pairs of ``x`` ([T, N, R]) by ``cos`` and ``sin`` ([T, R], the R / 2 angles twice).

    The result has the first members of all pairs, then the second ones, as in DeepSeek's and GLM's MLA.
    """
    return _rotate("npu::npu_interleave_rope", x, cos, sin)


def rope_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R / 2) of ``x`` ([T, N, R]) by ``cos`` and ``sin`` ([T, R], the R / 2 angles twice).

    DeepSeek's indexer pairs dimensions like this.
    """
    return _rotate("npu::npu_rotary_mul", x, cos, sin)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * gamma`` over the last dimension of ``x``, which ``gamma`` ([D]) has."""
    check_layout("gamma", gamma, (x.shape[-1],), x.dtype)
    normed: Tensor = operator("npu::npu_rms_norm")(x, gamma, epsilon)[0]
    return normed


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows of ``x`` ([..., D], bfloat16 or float16) to int8; with it [...] float32 scales, amax / 127."""
    check_layout("x", x, x.shape, AscendLimits.DTYPES)
    quantised, scale = operator("npu::npu_dynamic_quant")(x)
    return quantised, scale


def _rotate(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    check_layout("x", x, (None, None, None), AscendLimits.DTYPES)
    tokens, heads, dims = x.shape
    for label, angles in (("cos", cos), ("sin", sin)):
        check_layout(label, angles, (tokens, dims), x.dtype)
    rotated: Tensor = operator(name)(
        x.view(tokens, heads, 1, dims), cos.view(tokens, 1, 1, dims), sin.view(tokens, 1, 1, dims)
    )
    return rotated.view(tokens, heads, dims)
