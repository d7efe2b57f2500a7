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
