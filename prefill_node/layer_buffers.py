"""The tensors of prefill's physical layer buffers, in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from sluice.v1 import wire_pb2
from torch import Tensor

from engine.indexer_cache import IndexerCache
from prefill_node import block_checksums
from prefill_node.block_checksums import NamedBlocks
from prefill_node.geometry import REGION_ALIGNMENT, KvGeometry, round_up
from prefill_node.plan import LayerBufferPlan
from prefill_node.pool_layout import TensorAddress
from transfer.layout import INDEXER_KINDS, MAIN_KINDS


class Allocator(Protocol):
    """Where tensors come from: `engine.device.Device`."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of unspecified contents."""


@dataclass(frozen=True)
class SlotTensors:
    """One physical slot. The layers assigned to it take turns in these tensors."""

    ckv: Tensor  # [blocks, block_size, 1, kv_lora_rank], model dtype
    k_rope: Tensor  # [blocks, block_size, 1, rope_dim], model dtype
    indexer: IndexerCache | None  # None if no layer of the slot has one

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of a pool object's parts."""
        return (self.ckv, self.k_rope, *(self.indexer.tensors if self.indexer else ()))


class LayerBuffers:
    """All slots of one prefill rank, each one allocation, and the generation word of each slot.

    Exactly `plan.num_slots` buffers are held, whatever the number of layers
    (test_the_device_holds_one_allocation_per_slot). The memory belongs to the allocator and lives as long as it.
    """

    def __init__(
        self,
        allocator: Allocator,
        plan: LayerBufferPlan,
        geometry: KvGeometry,
        num_blocks: int,
        dtype: torch.dtype,
        *,
        checksums: bool = False,
    ) -> None:
        """Allocates; with `checksums` also a word for each block. Raises what the allocator raises when it is full."""
        self.plan = plan
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._dtype = dtype
        self._regions: list[Tensor] = []
        self.slots = tuple(self._slot(allocator, layers) for layers in plan.slots)
        self._checksums = allocator.empty((plan.num_slots, num_blocks), torch.int32) if checksums else None
        self.generation_words = allocator.empty((plan.num_slots,), torch.int64)  # for GenerationWords to fill
        self._own = tuple(self._own_addresses(layer) for layer in range(plan.num_layers))
        self._stored = tuple(self._stored_addresses(layer) for layer in range(plan.num_layers))

    def regions(self) -> list[tuple[int, int]]:
        """`(address, bytes)` of the KV memory, one region per slot, in whole 2 MiB pages."""
        return [(region.data_ptr(), region.numel()) for region in self._regions]

    def pool_regions(self) -> list[tuple[int, int]]:
        """`(address, bytes)` of the memory that is copied from and to the pool."""
        sums = self._checksums
        return [
            *self.regions(),
            *([(sums.data_ptr(), round_up(sums.nbytes, REGION_ALIGNMENT))] if sums is not None else []),
        ]

    def generation_region(self) -> tuple[int, int]:
        """`(address, bytes)` of the page that holds the generation words."""
        return self.generation_words.data_ptr(), REGION_ALIGNMENT

    def of_layer(self, layer: int) -> SlotTensors:
        """The slot that `layer` is computed in."""
        return self.slots[self.plan.slot_of_layer[layer]]

    def addresses(self, layer: int) -> tuple[TensorAddress, ...]:
        """Where the tensors of `layer`'s slot lie."""
        return tuple(_address(tensor) for tensor in self.of_layer(layer).tensors)

    def pool_addresses(self, layer: int) -> tuple[TensorAddress, ...]:
        """Where the parts of `layer`'s pool objects lie: its own tensors, and the words of its checksums."""
        return self._stored[layer]

    def seal(self, layer: int, blocks: NamedBlocks) -> None:
        """Notes the checksums of blocks that were written completely; without checksums nothing."""
        if (words := self._words(layer)) is not None:
            block_checksums.seal(layer, blocks, words, self._own[layer])

    def broken_blocks(self, layer: int, blocks: NamedBlocks) -> list[int]:
        """Indices of the blocks that are not as they were sealed; without checksums none."""
        words = self._words(layer)
        return [] if words is None else block_checksums.broken(layer, blocks, words, self._own[layer])

    def layouts(self) -> list[wire_pb2.LayerLayout]:
        """What the hand-shake tells a reader: slot and tensors of every layer."""
        kinds = MAIN_KINDS + INDEXER_KINDS  # the scale only with int8 keys
        layouts = []
        for layer in range(self.plan.num_layers):
            owned = kinds if layer in self.geometry.indexer_layers else MAIN_KINDS
            tensors = [
                wire_pb2.TensorLayout(
                    kind=kind, address=place.address, block_bytes=place.block_bytes, num_blocks=self.num_blocks
                )
                for kind, place in zip(owned, self.addresses(layer), strict=False)
            ]
            layouts.append(wire_pb2.LayerLayout(layer=layer, slot=self.plan.slot_of_layer[layer], tensors=tensors))
        return layouts

    def _own_addresses(self, layer: int) -> tuple[TensorAddress, ...]:
        """Those tensors of its slot that `layer` uses."""
        addresses = self.addresses(layer)
        return addresses if layer in self.geometry.indexer_layers else addresses[: len(MAIN_KINDS)]

    def _stored_addresses(self, layer: int) -> tuple[TensorAddress, ...]:
        words = self._words(layer)
        return self._own[layer] if words is None else (*self._own[layer], _address(words))

    def _words(self, layer: int) -> Tensor | None:
        """[blocks] int32 checksums of the layer's slot."""
        return None if self._checksums is None else self._checksums[self.plan.slot_of_layer[layer]]

    def _slot(self, allocator: Allocator, layers: tuple[int, ...]) -> SlotTensors:
        geometry = self.geometry
        region = allocator.empty((geometry.region_bytes(layers, self.num_blocks),), torch.uint8)
        self._regions.append(region)
        quantised = geometry.indexer_dtype == "int8"
        block, blocks = geometry.slot_block(layers), (self.num_blocks, geometry.block_size)
        shapes = [
            (block.ckv, (*blocks, 1, geometry.kv_lora_rank), self._dtype),
            (block.k_rope, (*blocks, 1, geometry.rope_dim), self._dtype),
            (block.indexer_key, (*blocks, 1, geometry.index_dim), torch.int8 if quantised else self._dtype),
            (block.indexer_scale, (*blocks, 1), torch.float16),
        ]
        tensors, start = [], 0
        for block_bytes, shape, dtype in shapes:
            if block_bytes:
                end = start + block_bytes * self.num_blocks
                tensors.append(region[start:end].view(dtype).view(shape))
                start = end
        return SlotTensors(tensors[0], tensors[1], IndexerCache(*tensors[2:]) if block.indexer_key else None)


def _address(tensor: Tensor) -> TensorAddress:
    return TensorAddress(tensor.data_ptr(), tensor[0].nbytes)
