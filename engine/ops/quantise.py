"""Quantiser of the int8 indexer cache (LIC8)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import native, reference
from engine.ops.backends import current_backend
from engine.ops.checks import FLOAT_DTYPES, check_tensor
from engine.ops.registry import register


def hadamard_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate rows by the Hadamard matrix and round them to int8, with one scale per row.

    With y = x H_D / sqrt(D) (Sylvester's H, by butterflies in float32), ``scale = half(max |y| / 127)`` and
    ``values = clamp(round(y / scale), -127, 127)``, ties to even; a row whose scale rounds to 0, or
    is NaN because an element is, has values 0. The
    rotation spreads outliers over all dimensions and keeps dot products: ``x . z = (y scale_y) . (w scale_w)`` but for
    rounding. Both back ends give the same bits.

    Args:
        x: [..., D] float32, bfloat16 or float16, contiguous; D a power of two, at most 1024.

    Returns:
        values [..., D] int8 and scales [...] float16.

    Raises:
        ValueError: A dtype, layout or D is illegal.
    """
    values, scales = _op(x)
    return values, scales


def _kernel(x: Tensor) -> tuple[Tensor, Tensor]:
    check_tensor("x", x, (*[None] * max(x.dim(), 1),), FLOAT_DTYPES)
    dims = x.shape[-1]
    if dims.bit_count() != 1 or dims > 1024:
        raise ValueError(f"x has {dims} dimensions; legal: a power of two from 1 to 1024")
    if current_backend() == "reference":
        return reference.hadamard_quantise(x)
    values, scales = torch.empty_like(x, dtype=torch.int8), torch.empty(x.shape[:-1], dtype=torch.float16)
    native.call(
        "hadamard_quantise",
        {
            "rows": x,
            "values": values,
            "scales": scales,
            "count": scales.numel(),
            "dims": dims,
            "dtype": native.dtype_code(x),
        },
    )
    return values, scales


_op = register("hadamard_quantise(Tensor x) -> (Tensor, Tensor)", _kernel)
