"""Faults on demand (section `faults` of the configuration) which every node kind knows: chances, stalls, full devices.

Whatever stands in for a part with faults is chosen when the part is made; without faults nothing of this runs.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.config import FaultsSection
from engine.device import Device
from transfer.hostcann.runtime import DeviceOutOfMemory

log = logging.getLogger(__name__)


def dice(faults: FaultsSection, worker_id: str, purpose: str) -> random.Random:
    """One worker's draws for one purpose: the same in every run with the same `faults.seed`."""
    return random.Random(f"{faults.seed}/{worker_id}/{purpose}")


def injected(knob: str, what: str) -> None:
    """Says in the process's log that a fault was injected: `make chaos` counts these lines."""
    log.warning("faults.%s: %s", knob, what)


def before_step(faults: FaultsSection, worker_id: str) -> Callable[[], None]:
    """What a worker's step loop calls before each step: nothing, or sometimes a sleep (`stall`, `stall_s`)."""
    if not faults.stall:
        return no_stall
    draws = dice(faults, worker_id, "stall")

    def stall() -> None:
        if draws.random() < faults.stall:
            injected("stall", f"the step loop sleeps {faults.stall_s:g} s")
            time.sleep(faults.stall_s)

    return stall


def no_stall() -> None:
    """Without faults a step begins at once."""


def open_device(device_id: int, faults: FaultsSection) -> Device:
    """The device, or with `device_allocation_failure` one whose allocations fail now and then."""
    if not faults.device_allocation_failure:
        return Device(device_id)
    return UnreliableDevice(device_id, faults.device_allocation_failure)


class UnreliableDevice(Device):
    """Allocations fail with the given probability, drawn anew in every process: who is restarted may succeed."""

    def __init__(self, device_id: int, failure: float) -> None:
        super().__init__(device_id)
        self._failure = failure
        self._draws = random.SystemRandom()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._draws.random() < self._failure:
            injected("device_allocation_failure", f"no memory for a tensor of {tuple(shape)}")
            nbytes = math.prod(shape) * dtype.itemsize
            raise DeviceOutOfMemory(self.device_id, nbytes, in_use=self.allocated_bytes, limit=self.allocated_bytes)
        return super().empty(shape, dtype)
