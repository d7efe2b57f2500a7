"""Argument checks of all operators; every error is a ValueError with the argument, its value and the legal ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: torch.dtype | Sequence[torch.dtype]
) -> None:
    """Check that ``tensor`` is a contiguous CPU tensor of one of ``dtypes``.

    Args:
        name: The argument's name for messages.
        tensor: The argument.
        shape: Expected sizes; None stands for any size.
        dtypes: Legal dtype or dtypes.

    Raises:
        ValueError: It is not.
    """
    check_layout(name, tensor, shape, dtypes)
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; legal: cpu")


def check_layout(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: torch.dtype | Sequence[torch.dtype]
) -> None:
    """``check_tensor`` for a tensor on any device."""
    legal = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in legal:
        raise ValueError(f"{name} is {tensor.dtype}; legal: {', '.join(map(str, legal))}")
    given = tuple(tensor.shape)
    fits = len(given) == len(shape) and all(want in (None, got) for want, got in zip(shape, given, strict=True))
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(given)}; legal: [{wanted}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())} for shape {list(given)}; it must be contiguous")


def check_positive(name: str, value: int) -> None:
    """Raise ValueError unless ``value`` is at least 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}; legal: 1 or more")


MAX_INT8_DIMS = 1024
"""Most dimensions of int8 rows: their products then sum exactly in float32."""


def check_index_batch(
    query: tuple[str, Tensor],
    weights: tuple[str, Tensor],
    key_cache: tuple[str, Tensor],
    scales: Sequence[tuple[str, Tensor]],
    *,
    dtypes: torch.dtype | Sequence[torch.dtype],
    weight_dtypes: torch.dtype | Sequence[torch.dtype],
    scale_dtype: torch.dtype,
) -> int:
    """Check an indexer's queries, weights and keys, each given with its name; returns the number of query rows.

    Args:
        query: [T, H, D] of one of ``dtypes``.
        weights: [T, H] of one of ``weight_dtypes``.
        key_cache: [blocks, block size, 1, D], dtype of the query.
        scales: None, or [T, H] for the query and [blocks, block size, 1] for the keys, of ``scale_dtype``.
        dtypes: See above.
        weight_dtypes: See above.
        scale_dtype: See above.

    Raises:
        ValueError: An argument is otherwise, or int8 rows have more than ``MAX_INT8_DIMS`` dimensions.
    """
    check_tensor(*query, (None, None, None), dtypes)
    rows, heads, dims = query[1].shape
    if query[1].dtype == torch.int8 and dims > MAX_INT8_DIMS:
        raise ValueError(f"{query[0]} has {dims} dimensions; legal for int8: at most {MAX_INT8_DIMS}")
    check_tensor(*weights, (rows, heads), weight_dtypes)
    check_tensor(*key_cache, (None, None, 1, dims), query[1].dtype)
    blocks, block_size = key_cache[1].shape[:2]
    check_positive(f"{key_cache[0]}.shape[1] (block size)", block_size)
    for scale, shape in zip(scales, ((rows, heads), (blocks, block_size, 1)), strict=bool(scales)):
        check_tensor(*scale, shape, scale_dtype)
    return rows
