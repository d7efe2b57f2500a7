"""What a worker and the process that has its pool client tell each other, over `Line`s. Plain data, pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

CONTROL, LIFE, FIRST_LINE = 0, 1, 2  # order of the file descriptors on the client process's command line


class PoolOptions(TypedDict):
    """Arguments of `MemPool`."""

    meta_url: str
    config_store_url: str
    device_id: int
    dram_bytes: int
    world_size: int
    protocol: str
    timeout_s: int


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """Device memory of the worker, which the client process maps at the same address."""

    address: int
    nbytes: int
    share: bytes  # see transfer.hostcann.shared


@dataclass(frozen=True, slots=True)
class Join:
    """On the control line, once; answered by an Answer."""

    options: PoolOptions
    regions: tuple[SharedRegion, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """On the control line: the process leaves the pool and ends."""


class Call(NamedTuple):
    """On a line: a method of `MemPool`; answered by an Answer on the same line."""

    method: str
    positional: tuple[Any, ...]
    named: dict[str, Any]


class Answer(NamedTuple):
    """A tuple, as `Call` is: they are pickled for every copy, and classes with slots take long."""

    value: Any = None
    error: Exception | None = None  # a PoolError, or ValueError
