"""Which implementation the CPU operators run: ``cpu`` (C++) or ``reference`` (plain torch, slow, obviously right)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Backend = Literal["cpu", "reference"]

BACKENDS: tuple[Backend, ...] = ("cpu", "reference")

_current: ContextVar[Backend] = ContextVar("sluice_ops_backend", default="cpu")


def current_backend() -> Backend:
    """The back end that operators called here will use."""
    return _current.get()


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Operators called inside the ``with`` block, in this thread or task, use back end ``name``.

    Raises:
        ValueError: ``name`` is no back end.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; legal: {', '.join(BACKENDS)}")
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)
