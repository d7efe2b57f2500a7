"""The ``sluice`` operator namespace of torch: where every operator's schema and CPU kernel are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

_LIBRARY = Library("sluice", "DEF")  # type: ignore[no-untyped-call]  # torch leaves it untyped


def register(schema: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Define ``schema`` in namespace ``sluice`` with ``kernel`` for CPU tensors; return the callable operator."""
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    packet: Callable[..., Any] = getattr(torch.ops.sluice, name)
    return packet
