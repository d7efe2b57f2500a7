"""Checksums of ranges of this process's memory, computed at memory speed (`transfer/csrc/checksum.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from transfer.build_folder import build_folder


class BlocksOf(NamedTuple):
    """Some blocks of a paged tensor: block `b` is `block_bytes` bytes at `address + b * block_bytes`."""

    address: int
    block_bytes: int
    blocks: Sequence[int] | NDArray[np.int64]


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_folder() / "transfer" / "libsluice_checksum.so"))
    library.sluice_checksums.restype = None
    library.sluice_block_checksums.restype = None
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


def block_checksums(seed: int, count: int, parts: Sequence[BlocksOf], *, portable: bool = False) -> NDArray[np.uint32]:
    """32-bit checksums of `count` things: number i is over ``seed`` (64 bits) and block
    ``part.blocks[i]`` of every part, in order.

    As `checksums` otherwise.
    """
    for part in parts:
        if len(part.blocks) != count:
            raise ValueError(f"{len(part.blocks)} blocks where {count} are to be summed")
    blocks = np.concatenate([np.asarray(part.blocks, dtype=np.int64) for part in parts])
    each = ctypes.c_uint64 * len(parts)
    sums = np.empty(count, dtype=np.uint32)
    _library().sluice_block_checksums(
        ctypes.c_uint64(seed),
        ctypes.c_uint64(count),
        ctypes.c_uint64(len(parts)),
        each(*(part.address for part in parts)),
        each(*(part.block_bytes for part in parts)),
        ctypes.c_void_p(blocks.ctypes.data),
        ctypes.c_void_p(sums.ctypes.data),
        int(portable),
    )
    return sums
