"""torch_npu's operators around attention: cache writes, rotary embedding, normalisation, quantisation.

Layouts are those the operators demand: T tokens stand in the batch dimension, one head and one position each.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine.ops.ascend_limits import AscendLimits
from engine.ops.ascend_schemas import operator
from engine.ops.checks import MAX_INT8_DIMS, check_layout


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


def hadamard_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """``engine.ops.hadamard_quantise`` by a matrix product in the dtype of ``x`` and ``npu_dynamic_quant``.

    ``x`` is bfloat16 or float16. Rounding the rotated rows to that dtype, and quantising before the scale is rounded
    to float16, can change a value by one step from what the CPU gives.
    """
    check_layout("x", x, x.shape, AscendLimits.DTYPES)
    dims = x.shape[-1]
    if dims.bit_count() != 1 or dims > MAX_INT8_DIMS:
        raise ValueError(f"x has {dims} dimensions; legal: a power of two from 1 to {MAX_INT8_DIMS}")
    quantised, scale = operator("npu::npu_dynamic_quant")(x @ _hadamard(dims, x.dtype, x.device))
    return quantised, scale.to(torch.float16)


@cache
def _hadamard(dims: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's matrix [D, D] divided by sqrt(D): its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dims:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix /= dims**0.5
    return matrix.to(device, dtype)


def _rotate(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    check_layout("x", x, (None, None, None), AscendLimits.DTYPES)
    tokens, heads, dims = x.shape
    for label, angles in (("cos", cos), ("sin", sin)):
        check_layout(label, angles, (tokens, dims), x.dtype)
    rotated: Tensor = operator(name)(
        x.view(tokens, heads, 1, dims), cos.view(tokens, 1, 1, dims), sin.view(tokens, 1, 1, dims)
    )
    return rotated.view(tokens, heads, dims)
