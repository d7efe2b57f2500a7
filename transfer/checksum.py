"""Checksums of ranges of this process's memory, computed at memory speed (`transfer/csrc/checksum.c`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from transfer.build_folder import build_folder


class BlocksOf(NamedTuple):
    """Some blocks of a paged tensor: block `b` is `block_bytes` bytes at `address + b * block_bytes`."""

    address: int
    block_bytes: int
    blocks: Sequence[int]


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


def block_checksums(seed: int, count: int, parts: Sequence[BlocksOf], *, portable: bool = False) -> array[int]:
    """32-bit checksums, as ``array("I")``, of `count` things: number i is over ``seed`` (64 bits) and block
    ``part.blocks[i]`` of every part, in order.

    As `checksums` otherwise.
    """
    blocks = array("Q")
    for part in parts:
        if len(part.blocks) != count:
            raise ValueError(f"{len(part.blocks)} blocks where {count} are to be summed")
        blocks.extend(part.blocks)
    each = ctypes.c_uint64 * len(parts)
    sums = array("I", bytes(4 * count))
    _library().sluice_block_checksums(
        ctypes.c_uint64(seed),
        ctypes.c_uint64(count),
        ctypes.c_uint64(len(parts)),
        each(*(part.address for part in parts)),
        each(*(part.block_bytes for part in parts)),
        ctypes.c_void_p(blocks.buffer_info()[0]),
        ctypes.c_void_p(sums.buffer_info()[0]),
        int(portable),
    )
    return sums
