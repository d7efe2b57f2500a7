"""What a batch moves where: checks against both sides' memory, then copy descriptors. Pure; no byte moves here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.v1 import registry_pb2, wire_pb2

from transfer.checksum import checksums
from transfer.layout import INDEXER_KINDS, MAIN_KINDS, Kind, block_bytes, kind_name, kinds_of, require_same_layout
from transfer.memfabric import Copies
from transfer.topology import Contributor, contributor_of, indexer_share, main_share

WORD_BYTES = 8  # of a generation word
_ADDRESS_LIMIT = 1 << 64


class PullRefused(ValueError):
    """A hand-shake, batch or entry that must not be read; the text says what does not fit."""


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """Blocks of one tensor: block b is ``block_bytes`` bytes at ``address + b * block_bytes``."""

    address: int
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """This decode rank's destinations of one layer: main KV in the host pool, indexer tensors on its device."""

    ckv: TensorMemory
    k_rope: TensorMemory
    indexer_key: TensorMemory | None = None
    indexer_scale: TensorMemory | None = None

    def tensors(self) -> dict[Kind, TensorMemory]:
        """By ``TensorKind``."""
        named = {
            wire_pb2.TENSOR_KIND_CKV: self.ckv,
            wire_pb2.TENSOR_KIND_K_ROPE: self.k_rope,
            wire_pb2.TENSOR_KIND_INDEXER_KEY: self.indexer_key,
            wire_pb2.TENSOR_KIND_INDEXER_SCALE: self.indexer_scale,
        }
        return {kind: memory for kind, memory in named.items() if memory is not None}


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """Where prefill keeps a layer."""

    slot: int
    tensors: Mapping[Kind, TensorMemory]


@dataclass(frozen=True, slots=True)
class SourceMap:
    """A prefill rank after its Hello was found in order."""

    name: str  # worker id
    epoch: str
    session_id: str
    part: Contributor
    layers: Sequence[SourceLayer]
    generation_address: int

    def generation_word(self, slot: int) -> int:
        """Address of the slot's generation, in prefill's memory."""
        return self.generation_address + WORD_BYTES * slot


@dataclass(slots=True)
class Descriptors:
    """One-sided copies: ``sizes[i]`` bytes from ``remote[i]`` to ``local[i]``.

    Afterwards the ``summed_sizes[i]`` bytes at ``summed[i]`` must have the checksum ``sums[i]``.
    """

    local: list[int] = field(default_factory=list)
    remote: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    summed: list[int] = field(default_factory=list)
    summed_sizes: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def add(self, source: TensorMemory, remote: Sequence[int], destination: TensorMemory, local: Sequence[int]) -> None:
        """Block ``remote[i]`` of the source's to ``local[i]`` of the destination's, for each i."""
        self.local += [destination.address + block * destination.block_bytes for block in local]
        self.remote += [source.address + block * source.block_bytes for block in remote]
        self.sizes += [source.block_bytes] * len(remote)

    def extend(self, other: Descriptors) -> None:
        self.local += other.local
        self.remote += other.remote
        self.sizes += other.sizes
        self.summed += other.summed
        self.summed_sizes += other.summed_sizes
        self.sums += other.sums

    def expect(self, destination: TensorMemory, local_block: int, checksum: int) -> None:
        self.summed.append(destination.address + local_block * destination.block_bytes)
        self.summed_sizes.append(destination.block_bytes)
        self.sums.append(checksum)

    def nbytes(self) -> int:
        """What the copies move."""
        return sum(self.sizes)

    def copies(self) -> Copies:
        return Copies(self.local, self.remote, self.sizes)

    def damaged(self) -> int:
        """How many of the checksums are wrong."""
        if not self.sums:
            return 0
        found = checksums(self.summed, self.summed_sizes)
        return sum(mine != theirs for mine, theirs in zip(found, self.sums, strict=True))


class PullPlanner:
    """One decode TP rank's memory, and what may be read into it."""

    def __init__(
        self, layout: registry_pb2.KvLayout, memory: Sequence[LayerMemory], *, name: str, tp_rank: int, tp_size: int
    ) -> None:
        """``memory``: one per layer. Raises ValueError when it does not have the layout's shape."""
        self.layout = layout
        self.name = name
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self._memory = [layer.tensors() for layer in memory]
        if len(memory) != layout.num_layers:
            raise ValueError(f"memory of {len(memory)} layers for a layout of {layout.num_layers}")
        for layer, tensors in enumerate(self._memory):
            if problem := self._layer_problem(layer, tensors):
                raise ValueError(f"{name}: memory of {problem}")
        self._main_blocks = _least_blocks(self._memory, MAIN_KINDS)
        self._indexer_blocks = _least_blocks(self._memory, INDEXER_KINDS)

    def check_blocks(self, request_id: str, main_blocks: Sequence[int], indexer_blocks: Sequence[int]) -> None:
        """Raises ValueError when a destination block does not exist."""
        for name, blocks, count in (
            ("main", main_blocks, self._main_blocks),
            ("indexer", indexer_blocks, self._indexer_blocks),
        ):
            if outside := [block for block in blocks if not 0 <= block < count]:
                raise ValueError(f"request {request_id}: {name} blocks {outside[:4]} are not in 0..{count - 1}")

    def layers_owed_by(self, member: int) -> Iterable[int]:
        """The layers of which this member must announce every block: only member 0 gives main KV."""
        return range(self.layout.num_layers) if member == 0 else self.layout.indexer_layers

    def source(self, hello: wire_pb2.Hello) -> SourceMap:
        """Checks a Hello. Raises PullRefused naming both sides' values."""
        if not hello.worker_id or not hello.session_id or not hello.epoch:
            raise PullRefused("Hello without worker_id, epoch or session_id")
        try:
            require_same_layout(self.layout, hello.layout, self.name, hello.worker_id)
            part = contributor_of(hello.tp_rank, hello.tp_size, self.tp_size)
        except ValueError as error:
            raise PullRefused(str(error)) from None
        if part.decode_rank != self.tp_rank:
            raise PullRefused(f"{hello.worker_id} feeds decode TP rank {part.decode_rank}, not {self.name}")
        given = sorted(described.layer for described in hello.layers)
        if given != list(range(self.layout.num_layers)):
            raise PullRefused(
                f"Hello of {hello.worker_id} describes layers {given[:8]}, not 0..{len(self._memory) - 1}"
            )
        layers = [self._source_layer(described) for described in sorted(hello.layers, key=lambda each: each.layer)]
        last_word = hello.generation_address + WORD_BYTES * max(layer.slot for layer in layers)
        if hello.generation_address == 0 or hello.generation_address % WORD_BYTES or last_word >= _ADDRESS_LIMIT:
            raise PullRefused(f"generation_address {hello.generation_address:#x} is not that of 64-bit words")
        return SourceMap(hello.worker_id, hello.epoch, hello.session_id, part, layers, hello.generation_address)

    def check_batch(self, source: SourceMap, batch: wire_pb2.ReadReady) -> None:
        """Raises PullRefused when the batch as a whole cannot be read."""
        if batch.layer >= self.layout.num_layers:
            raise PullRefused(f"layer {batch.layer} is not in 0..{self.layout.num_layers - 1}")
        if batch.slot != source.layers[batch.layer].slot:
            raise PullRefused(
                f"layer {batch.layer} in slot {batch.slot}, not {source.layers[batch.layer].slot} as in Hello"
            )
        if (batch.member, batch.members) != (source.part.member, source.part.members):
            raise PullRefused(
                f"contributor {batch.member} of {batch.members}, but {source.name} is {source.part.member} of "
                f"{source.part.members}"
            )
        requests = [entry.request_id for entry in batch.entries]
        if len(set(requests)) != len(requests):
            raise PullRefused("a request has more than one entry")
        if missing := sorted(set(batch.finished) - set(requests)):
            raise PullRefused(f"finished requests {missing[:4]} have no entry")

    def entry(
        self,
        source: SourceMap,
        layer: int,
        entry: wire_pb2.ReadEntry,
        main_blocks: Sequence[int],
        indexer_blocks: Sequence[int],
    ) -> Descriptors:
        """This rank's share of an entry; ``main_blocks``, ``indexer_blocks``: the request's own, in request order.

        May be empty. Raises PullRefused, see the texts.
        """
        theirs, ours = source.layers[layer].tensors, self._memory[layer]
        part, main, indexer = source.part, list(entry.main_blocks), list(entry.indexer_blocks)
        indexer_kinds = [kind for kind in INDEXER_KINDS if kind in ours]
        if indexer_kinds and (len(main), entry.main_start) != (len(indexer), entry.indexer_start):
            raise PullRefused(
                f"indexer presence mismatch: {len(indexer)} indexer blocks from {entry.indexer_start}, "
                f"but {len(main)} main blocks from {entry.main_start}"
            )
        if indexer and not indexer_kinds:
            raise PullRefused(
                f"indexer presence mismatch: {len(indexer)} indexer blocks, but layer {layer} has no indexer"
            )
        descriptors = Descriptors()
        share = main_share(len(main), entry.main_start, self.tp_rank, self.tp_size, part.member)
        half = _Half("main", MAIN_KINDS, entry.main_start, main, share, entry.summed_main, entry.main_sums)
        half.plan(theirs, ours, main_blocks, descriptors)
        if indexer_kinds or entry.summed_indexer or entry.indexer_sums:
            share = indexer_share(len(indexer), entry.indexer_start, part.member, part.members)
            summed, sums = entry.summed_indexer, entry.indexer_sums
            half = _Half("indexer", indexer_kinds, entry.indexer_start, indexer, share, summed, sums)
            half.plan(theirs, ours, indexer_blocks, descriptors)
        return descriptors

    def _source_layer(self, described: wire_pb2.LayerLayout) -> SourceLayer:
        tensors = {
            tensor.kind: TensorMemory(tensor.address, tensor.block_bytes, tensor.num_blocks)
            for tensor in described.tensors
        }
        if len(tensors) != len(described.tensors):
            raise PullRefused(f"layer {described.layer} has two tensors of one kind")
        if problem := self._layer_problem(described.layer, tensors):
            raise PullRefused(problem)
        if described.slot >= self.layout.num_layers:
            raise PullRefused(
                f"layer {described.layer} is in slot {described.slot}; there are at most as many as layers"
            )
        return SourceLayer(described.slot, tensors)

    def _layer_problem(self, layer: int, tensors: Mapping[Kind, TensorMemory]) -> str | None:
        """What does not fit the layout in a layer's tensors of either side."""
        wanted = kinds_of(self.layout, layer)
        if set(tensors) != set(wanted):
            have, want = (", ".join(map(kind_name, sorted(kinds))) for kinds in (tensors, wanted))
            return f"layer {layer} consists of {have or 'nothing'}; it must be {want}"
        for kind in wanted:
            tensor, size = tensors[kind], block_bytes(self.layout, kind)
            name = kind_name(kind)
            if tensor.block_bytes != size:
                return f"layer {layer}: {name} has blocks of {tensor.block_bytes} bytes; {self.name} expects {size}"
            if not tensor.num_blocks or not 0 < tensor.address < _ADDRESS_LIMIT - size * tensor.num_blocks:
                return f"layer {layer}: {name} has {tensor.num_blocks} blocks at address {tensor.address:#x}"
        return None


def _least_blocks(memory: Sequence[Mapping[Kind, TensorMemory]], kinds: Iterable[Kind]) -> int:
    return min((layer[kind].num_blocks for layer in memory for kind in kinds if kind in layer), default=0)


class _Half(NamedTuple):
    """The main or the indexer blocks of an entry."""

    name: str
    kinds: Sequence[Kind]  # the tensors that each block is in
    start: int  # the request's index of the first block
    blocks: Sequence[int]  # prefill's
    share: range  # which of them are to be read here
    summed: Sequence[int]  # and of which there are checksums
    sums: Sequence[int]

    def plan(
        self,
        theirs: Mapping[Kind, TensorMemory],
        ours: Mapping[Kind, TensorMemory],
        places: Sequence[int],
        descriptors: Descriptors,
    ) -> None:
        """Adds the copies of this share; `places`: the request's blocks here. Raises PullRefused."""
        count, largest = len(self.blocks), max(self.blocks, default=-1)
        if self.start + count > len(places):
            raise PullRefused(
                f"{self.name} destination range is incomplete: blocks {self.start}..{self.start + count - 1}, "
                f"but {len(places)} are reserved"
            )
        for kind in self.kinds:
            if largest >= theirs[kind].num_blocks:
                raise PullRefused(
                    f"prefill block {largest} of {kind_name(kind)} is not in 0..{theirs[kind].num_blocks - 1}"
                )
        if self.summed or self.sums:
            self._check_sums()
        remote = self.blocks[self.share.start : self.share.stop]
        local = places[self.start + self.share.start : self.start + self.share.stop]
        for kind in self.kinds:
            descriptors.add(theirs[kind], remote, ours[kind], local)
        owners = [(kind, places[self.start + position]) for position in self.summed for kind in self.kinds]
        for (kind, place), checksum in zip(owners, self.sums, strict=True):
            descriptors.expect(ours[kind], place, checksum)

    def _check_sums(self) -> None:
        if len(self.sums) != len(self.summed) * len(self.kinds):
            raise PullRefused(
                f"{len(self.sums)} {self.name} checksums for {len(self.summed)} blocks of {len(self.kinds)} tensors"
            )
        if list(self.summed) != sorted(set(self.summed)):
            raise PullRefused(f"the positions of {self.name} checksums are not in ascending order")
        if outside := [position for position in self.summed if position not in self.share]:
            raise PullRefused(f"{self.name} checksums of blocks {outside[:4]}, but {self.share} are to be read here")
