"""Device memory behind one interface.

`cpu`: memory of an emulated Ascend device (hostcann), visible to torch as CPU tensors because device memory *is* host
memory there. The limit of each device holds as on an NPU, and a peer may map what is registered for transfer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

import transfer.hostcann.runtime as runtime

ALIGNMENT = 2 << 20  # MemFabric registers ranges rounded out to 2 MiB


class Device:
    """One device of this process. Everything allocated lives until `close`."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._allocations: list[int] = []
        self._bytes = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated through this object, each allocation rounded up to 2 MiB."""
        return self._bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor in device memory, its address aligned to 2 MiB. Contents are unspecified.

        Raises DeviceOutOfMemory (from transfer.hostcann.runtime) when the device cannot hold it, and DeviceError over a
        real driver, whose memory the processor cannot touch.
        """
        if not runtime.emulated():
            raise runtime.DeviceError(
                f"device {self.device_id}: libascendcl.so is a real driver's; this version computes on the CPU, in the "
                "memory of hostcann's emulated devices: start it with `sluice up`, whose driver comes first in "
                "LD_LIBRARY_PATH"
            )
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes <= 0:
            raise ValueError(f"device {self.device_id}: a tensor of shape {tuple(shape)} holds no bytes")
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        pointer = runtime.malloc(self.device_id, rounded)
        self._allocations.append(pointer)
        self._bytes += rounded
        view = (ctypes.c_char * nbytes).from_address(pointer)
        return torch.frombuffer(view, dtype=dtype).view(*shape)

    def close(self) -> None:
        """Frees every allocation; its tensors must not be used any more. Idempotent."""
        while self._allocations:
            runtime.free(self._allocations.pop())
        self._bytes = 0
