"""Decode's host pool for the main KV cache: one copy per DP rank, shared by its TP ranks.

TP rank 0 owns the memory; the other ranks map it at the same virtual address, so an address in it means the same bytes
on every rank. Devices can address it: it is a legal destination of a MemFabric read, and normal memory to the CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_ALLOCATION_UNIT = 1 << 30  # the wheel allocates host memory in whole GiB; pages that are never touched cost nothing


class HostPoolError(RuntimeError):
    """The shared host pool could not be made, or was used outside its bounds."""


class HostPool:
    """`nbytes` of host memory at `address`, the same on all TP ranks.

    Invariant: a tensor never reaches outside [address, address + nbytes). There is one pool per process: the wheel
    keeps it in a global.
    """

    def __init__(self, offload: Any, address: int, nbytes: int) -> None:
        """Use `create`."""
        self._offload = offload
        self.address = address
        self.nbytes = nbytes
        self._closed = False

    @classmethod
    def create(
        cls,
        *,
        rank: int,
        world_size: int,
        nbytes: int,
        store_url: str,
        device_id: int,
        broadcast: Callable[[int], int] | None = None,
    ) -> HostPool:
        """Make the pool together with the other TP ranks of this DP rank; blocks until all have called it.

        `store_url` (tcp://host:port) is where the ranks meet; rank 0 listens there. `broadcast(value)` returns rank 0's
        value on every rank, for instance over the TP group; only a single rank can do without. `device_id` is this
        rank's device.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: {rank} is not in 0..{world_size - 1}")
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} is not positive")
        if broadcast is None and world_size > 1:
            raise ValueError(f"broadcast: needed when {world_size} ranks share the pool")
        from memfabric_hybrid import offload  # loads the driver: only in a process that has one

        config = offload.OffloadConfig()
        config.scene = offload.Scene.SHARED
        config.rank_id = rank
        config.world_size = world_size
        config.device_id = device_id
        config.store_url = store_url
        config.reserve_size = math.ceil(nbytes / _ALLOCATION_UNIT) * _ALLOCATION_UNIT
        config.alloc_size = config.reserve_size if rank == 0 else 0
        code = offload.initialize(config)
        if code != 0:
            raise HostPoolError(
                f"TP rank {rank} of {world_size}: the host pool of {nbytes} bytes was not made (code {code}); "
                f"the ranks meet at {store_url}"
            )
        address = int(offload.malloc(nbytes)) if rank == 0 else 0
        if broadcast is not None:
            address = broadcast(address)
        if address == 0:
            offload.uninitialize()
            raise HostPoolError(f"TP rank 0 of {world_size}: no room for a host pool of {nbytes} bytes")
        return cls(offload, address, nbytes)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor over the pool's memory from byte `offset`, contiguous; valid until `close`."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if offset < 0 or count <= 0 or offset + size > self.nbytes:
            raise HostPoolError(
                f"a tensor of {list(shape)} {dtype} ({size} bytes) at offset {offset} does not lie in the host pool "
                f"of {self.nbytes} bytes"
            )
        if self._closed:
            raise HostPoolError("the host pool is closed")
        memory = (ctypes.c_uint8 * size).from_address(self.address + offset)
        return torch.frombuffer(memory, dtype=dtype, count=count).reshape(tuple(shape))

    def close(self) -> None:
        """Unmap the pool; its tensors must not be used any more. Idempotent. Rank 0 should be the last to leave."""
        if not self._closed:
            self._closed = True
            self._offload.uninitialize()
