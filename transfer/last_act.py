"""Bounds the last thing a process does (`transfer/csrc/last_act.c`)."""

from __future__ import annotations

import ctypes

from transfer.build_folder import build_folder


def last_act(seconds: float, status: int) -> None:
    """From now on the process ends with exit status `status` when it crashes, and by itself after `seconds`.

    For leaving MemCache's pool: its client keeps the interpreter lock while it leaves, may wait for peers that are
    gone, and has been seen to crash when another member left at the same time. None of it is worth a failed process
    whose work was done. Call it when nothing else is left to do.
    """
    library = ctypes.CDLL(str(build_folder() / "transfer" / "libsluice_last_act.so"))
    code = library.sluice_last_act(ctypes.c_uint32(int(seconds * 1000)), ctypes.c_int(status))
    if code != 0:
        raise OSError(code, "the watch over the last act of this process cannot be started")
