"""Device memory of one process in another one, at the same address there: driver calls, hostcann's or CANN's."""

from __future__ import annotations

import ctypes
from functools import cache

from transfer.hostcann import runtime
from transfer.hostcann.runtime import DeviceError

_SHARE_HANDLE_BYTES = 128
_FABRIC = 1  # drv_mem_handle_type
_NO_WHITE_LIST = 0  # of processes that may import


class _ShareAttribute(ctypes.Structure):
    _fields_ = (("enabled", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 8))


@cache
def _hal() -> ctypes.CDLL:
    try:
        hal = ctypes.CDLL("libascend_hal.so")
    except OSError as error:
        raise DeviceError(f"the Ascend driver cannot be loaded: {error}") from error
    handle, address = ctypes.c_void_p, ctypes.c_void_p
    hal.halMemRetainAllocationHandle.argtypes = [ctypes.POINTER(handle), address]
    hal.halMemExportToShareableHandleV2.argtypes = [handle, ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p]
    hal.halMemRelease.argtypes = [handle]
    hal.halMemShareHandleSetAttribute.argtypes = [ctypes.c_uint64, ctypes.c_int, _ShareAttribute]
    hal.halMemAddressReserve.argtypes = [
        ctypes.POINTER(address),
        ctypes.c_size_t,
        ctypes.c_size_t,
        address,
        ctypes.c_uint64,
    ]
    hal.halMemMap.argtypes = [address, ctypes.c_size_t, ctypes.c_size_t, handle, ctypes.c_uint64]
    return hal


def share(address: int) -> bytes:
    """What another process needs to map the allocation that begins at `address`. Raises DeviceError."""
    hal, handle = _hal(), ctypes.c_void_p()
    _check(f"sharing {address:#x}", hal.halMemRetainAllocationHandle(ctypes.byref(handle), address))
    share_handle = ctypes.create_string_buffer(_SHARE_HANDLE_BYTES)
    try:
        _check(f"sharing {address:#x}", hal.halMemExportToShareableHandleV2(handle, _FABRIC, 0, share_handle))
    finally:
        hal.halMemRelease(handle)
    server, shareable = ctypes.c_uint32(), ctypes.c_uint64()
    code = hal.halMemTransShareableHandle(_FABRIC, share_handle, ctypes.byref(server), ctypes.byref(shareable))
    _check(f"sharing {address:#x}", code)
    code = hal.halMemShareHandleSetAttribute(shareable, _NO_WHITE_LIST, _ShareAttribute(enabled=1))
    _check(f"sharing {address:#x}", code)
    return share_handle.raw


def map_shared(share_handle: bytes, device_id: int, address: int, nbytes: int) -> None:
    """Maps what `share` described at the address it has there. Raises DeviceError, also when that is taken here."""
    runtime.select(device_id)
    hal, handle, reserved = _hal(), ctypes.c_void_p(), ctypes.c_void_p()
    what = f"mapping {nbytes} bytes of another process at {address:#x}"
    code = hal.halMemImportFromShareableHandleV2(
        _FABRIC, share_handle, ctypes.c_uint32(device_id), ctypes.byref(handle)
    )
    _check(what, code)
    _check(what, hal.halMemAddressReserve(ctypes.byref(reserved), nbytes, 0, address, 0))
    _check(what, hal.halMemMap(address, nbytes, 0, handle, 0))


def _check(what: str, code: int) -> None:
    if code != 0:
        raise DeviceError(f"{what} failed with driver error {code}")
