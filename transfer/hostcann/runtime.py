"""Device memory by the ACL runtime: the same calls whether libascendcl is hostcann's or CANN's."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import sys
from functools import cache
from typing import NoReturn

_ACL_OUT_OF_MEMORY = 207001  # ACL_ERROR_RT_MEMORY_ALLOCATION
_HUGE_PAGES_FIRST = 0  # ACL_MEM_MALLOC_HUGE_FIRST
_HBM = 1  # ACL_HBM_MEM


class DeviceError(RuntimeError):
    """A runtime call failed; the message names the call, the device and the ACL error code."""


class DeviceOutOfMemory(DeviceError):
    """An allocation does not fit into what is left of a device's HBM. Sizes are bytes."""

    def __init__(self, device: int, requested: int, in_use: int, limit: int) -> None:
        super().__init__(f"device {device}: no room for {requested} bytes: {in_use} of {limit} bytes of HBM are in use")
        self.device = device
        self.requested = requested
        self.in_use = in_use
        self.limit = limit


@cache
def _acl() -> ctypes.CDLL:
    try:
        acl = ctypes.CDLL("libascendcl.so", mode=ctypes.RTLD_GLOBAL)  # our operators look up hostcann's counters
    except OSError as error:
        raise DeviceError(
            f"the Ascend runtime cannot be loaded ({error}); start the process with transfer.hostcann.environment()"
        ) from error
    acl.aclrtMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_int]
    acl.aclrtFree.argtypes = [ctypes.c_void_p]
    acl.aclrtGetMemInfo.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    return acl


def select(device_id: int) -> ctypes.CDLL:
    """Makes this the device of the calling thread; the runtime. Raises DeviceError for an unknown device."""
    acl = _acl()
    code = acl.aclrtSetDevice(device_id)
    if code != 0:
        count = ctypes.c_uint32()
        acl.aclrtGetDeviceCount(ctypes.byref(count))
        raise DeviceError(f"device {device_id} cannot be used (ACL error {code}); legal: 0..{count.value - 1}")
    return acl


def malloc(device_id: int, nbytes: int) -> int:
    """Allocate device memory, zeroed by hostcann and 2 MiB aligned; returns its address.

    Raises DeviceOutOfMemory when the device is full, DeviceError for an unknown device.
    """
    if nbytes <= 0:
        raise ValueError(f"nbytes: {nbytes} is not positive")
    acl = select(device_id)
    pointer = ctypes.c_void_p()
    code = acl.aclrtMalloc(ctypes.byref(pointer), nbytes, _HUGE_PAGES_FIRST)
    if code == _ACL_OUT_OF_MEMORY:
        in_use, limit = memory(device_id)
        raise DeviceOutOfMemory(device_id, nbytes, in_use, limit)
    if code != 0 or pointer.value is None:
        raise DeviceError(f"device {device_id}: allocating {nbytes} bytes failed with ACL error {code}")
    return pointer.value


def free(address: int) -> None:
    """Give back memory from `malloc`; its address must not be used again."""
    code = _acl().aclrtFree(address)
    if code != 0:
        raise DeviceError(f"freeing {address:#x} failed with ACL error {code}: it is not allocated device memory")


def memory(device_id: int) -> tuple[int, int]:
    """Bytes of HBM in use by all processes, and the size of the device's HBM."""
    acl = select(device_id)
    unused, total = ctypes.c_size_t(), ctypes.c_size_t()
    code = acl.aclrtGetMemInfo(_HBM, ctypes.byref(unused), ctypes.byref(total))
    if code != 0:
        raise DeviceError(f"device {device_id}: its memory cannot be queried (ACL error {code})")
    return total.value - unused.value, total.value


def emulated() -> bool:
    """Whether the driver of this process is hostcann's, whose device memory the processor can read and write."""
    return hasattr(_acl(), "hostcann_leave")


def end_process_within(seconds: float) -> None:
    """Ends the process with status 1 and its threads' stacks on stderr, unless it has ended by itself before.

    For a stop. Works while a library call holds the GIL.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


def ended_in_time() -> None:
    """Takes `end_process_within` back."""
    faulthandler.cancel_dump_traceback_later()


def end_process(status: int) -> NoReturn:
    """Ends the process now, its output flushed and its place in the emulated driver given up.

    For a process that has nothing left to say: the transfer libraries' own farewells sleep for up to seven seconds,
    and their peers notice the end of a process at once.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if _acl.cache_info().currsize and emulated():  # a real driver cleans up by itself
        _acl().hostcann_leave()
    os._exit(status)
