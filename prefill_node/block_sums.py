"""Checksums that travel with an announcement: its reader can tell whether it got the bytes that were written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from sluice.v1 import wire_pb2

from prefill_node.link import Endpoint, SourceInfo
from transfer.checksum import checksums
from transfer.layout import INDEXER_KINDS, MAIN_KINDS, Kind
from transfer.topology import indexer_share, main_share

SAMPLED = 16  # with `transfer.checksum: sample`, every 16th block

Stamp: TypeAlias = Callable[[int, Endpoint, Sequence[wire_pb2.ReadEntry]], None]


def no_stamp(layer: int, endpoint: Endpoint, entries: Sequence[wire_pb2.ReadEntry]) -> None:
    """Announcements go without checksums."""


def stamp_for(mode: Literal["off", "sample", "all"], source: SourceInfo) -> Stamp:
    """What the configuration asks for."""
    return no_stamp if mode == "off" else BlockSums(source, every=1 if mode == "all" else SAMPLED).stamp


class _Tensor(NamedTuple):
    address: int
    block_bytes: int


class BlockSums:
    """Adds checksums of those blocks which the endpoint will read from this rank; one of `every` of them.

    Called when the blocks are complete and before they are announced, by one thread.
    """

    def __init__(self, source: SourceInfo, *, every: int) -> None:
        self._tp_size = source.tp_size
        self._every = every
        self._turn = itertools.count()  # which blocks are sampled moves on with every batch
        self._layers: list[dict[Kind, _Tensor]] = [
            {tensor.kind: _Tensor(tensor.address, tensor.block_bytes) for tensor in layer.tensors}
            for layer in sorted(source.layers, key=lambda each: each.layer)
        ]

    def stamp(self, layer: int, endpoint: Endpoint, entries: Sequence[wire_pb2.ReadEntry]) -> None:
        tensors, turn = self._layers[layer], next(self._turn)
        decode_tp = self._tp_size // endpoint.members
        for entry in entries:
            main = main_share(
                len(entry.main_blocks), entry.main_start, endpoint.decode_rank, decode_tp, endpoint.member
            )
            indexer = indexer_share(len(entry.indexer_blocks), entry.indexer_start, endpoint.member, endpoint.members)
            entry.summed_main[:] = self._sampled(main, turn)
            entry.summed_indexer[:] = self._sampled(indexer, turn)
            entry.main_sums[:] = _sums(tensors, MAIN_KINDS, entry.main_blocks, entry.summed_main)
            entry.indexer_sums[:] = _sums(tensors, INDEXER_KINDS, entry.indexer_blocks, entry.summed_indexer)

    def _sampled(self, share: range, turn: int) -> range:
        """At least one block of a share that is not empty."""
        return share[turn % min(self._every, len(share)) :: self._every] if share else share


def _sums(
    tensors: dict[Kind, _Tensor], kinds: Sequence[Kind], blocks: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """Block by block, and of each block tensor by tensor."""
    places = [
        (tensors[kind].address + blocks[position] * tensors[kind].block_bytes, tensors[kind].block_bytes)
        for position in positions
        for kind in kinds
        if kind in tensors
    ]
    return checksums([address for address, _ in places], [size for _, size in places])
