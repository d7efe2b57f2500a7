"""Checksums of ranges of this process's memory, computed at memory speed (`transfer/csrc/checksum.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from transfer.build_folder import build_folder


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_folder() / "transfer" / "libsluice_checksum.so"))
    library.sluice_checksums.restype = None
    return library


def checksums(addresses: Sequence[int], sizes: Sequence[int], *, portable: bool = False) -> list[int]:
    """A 32-bit checksum of ``sizes[i]`` bytes at ``addresses[i]``, for each i. The interpreter lock is released.

    The same bytes have the same checksum on every machine; ``portable`` computes it without the processor's CRC unit.
    """
    count = len(addresses)
    if len(sizes) != count:
        raise ValueError(f"{count} addresses, but {len(sizes)} sizes")
    numbers = ctypes.c_uint64 * count
    sums = (ctypes.c_uint32 * count)()
    _library().sluice_checksums(ctypes.c_uint64(count), numbers(*addresses), numbers(*sizes), sums, int(portable))
    return list(sums)
