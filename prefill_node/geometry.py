"""Bytes of a prefill device's KV blocks, and how many of them fit. Pure: no tensors, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from prefill_node.plan import LayerBufferPlan
from transfer.layout import indexer_token_bytes

REGION_ALIGNMENT = 2 << 20  # memory is registered for peers in whole 2 MiB pages


class CapacityError(ValueError):
    """The configured device cannot hold the KV cache it must; the text names the fields to change."""


class BlockBytes(NamedTuple):
    """Bytes of one block of one layer; a part is 0 where there is none."""

    ckv: int
    k_rope: int
    indexer_key: int
    indexer_scale: int  # of int8 keys

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def indexer(self) -> int:
        return self.indexer_key + self.indexer_scale


@dataclass(frozen=True)
class KvGeometry:
    """Shapes of the KV cache: rows of `kv_lora_rank`, `rope_dim` and, on indexer layers, `index_dim` elements."""

    block_size: int  # tokens
    kv_lora_rank: int
    rope_dim: int
    index_dim: int
    element_bytes: int
    indexer_layers: frozenset[int]  # layers which own an indexer
    indexer_dtype: str = "model"  # or "int8", with one scale per row

    def layer_block(self, layer: int) -> BlockBytes:
        """Bytes of one block of `layer`."""
        return self._block(layer in self.indexer_layers)

    def slot_block(self, layers: tuple[int, ...]) -> BlockBytes:
        """Bytes of one block of a slot that holds any of `layers` in turn."""
        return self._block(not self.indexer_layers.isdisjoint(layers))

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def region_bytes(self, layers: tuple[int, ...], blocks: int) -> int:
        """Device memory of one slot of `blocks` blocks: its tensors one after the other, in whole 2 MiB pages."""
        return round_up(self.slot_block(layers).total * blocks, REGION_ALIGNMENT)

    def main_bytes(self, layers: int, blocks: int) -> int:
        """Main KV (ckv and k_rope) of `layers` layers of `blocks` blocks each."""
        block = self._block(False)
        return layers * blocks * block.total

    def _block(self, has_indexer: bool) -> BlockBytes:
        row = self.block_size * self.element_bytes
        key, scale = (
            indexer_token_bytes(self.index_dim, self.element_bytes, self.indexer_dtype) if has_indexer else (0, 0)
        )
        return BlockBytes(self.kv_lora_rank * row, self.rope_dim * row, key * self.block_size, scale * self.block_size)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def total_bytes(plan: LayerBufferPlan, geometry: KvGeometry, blocks: int) -> int:
    """Device memory of all layer buffers with `blocks` blocks each."""
    return sum(geometry.region_bytes(layers, blocks) for layers in plan.slots)


def choose_kv_blocks(
    plan: LayerBufferPlan,
    geometry: KvGeometry,
    *,
    free_bytes: int,
    max_model_len: int,
    max_requests: int,
    configured: int | None = None,
) -> int:
    """Blocks of each layer buffer.

    `configured` (`prefill.kv_blocks`) if given, else what `free_bytes` of device memory hold, but no more than
    `max_requests` requests of `max_model_len` tokens can use. Raises CapacityError if one request of
    `max_model_len` tokens would not fit, or the configured number does not.
    """
    need = geometry.blocks_of(max_model_len)
    if configured is not None:
        if configured < need:
            raise CapacityError(
                f"prefill.kv_blocks = {configured} cannot hold one request of model.max_model_len = {max_model_len} "
                f"tokens; it must be at least {need}, or lower model.max_model_len"
            )
        if total_bytes(plan, geometry, configured) > free_bytes:
            raise CapacityError(
                f"prefill.kv_blocks = {configured} needs {total_bytes(plan, geometry, configured)} bytes of device "
                f"memory in {plan.num_slots} layer buffers, but {free_bytes} are free; {_remedies('prefill.kv_blocks')}"
            )
        return configured
    if total_bytes(plan, geometry, need) > free_bytes:
        raise CapacityError(
            f"one request of model.max_model_len = {max_model_len} tokens needs {total_bytes(plan, geometry, need)} "
            f"bytes of device memory in {plan.num_slots} layer buffers, but {free_bytes} are free; "
            f"{_remedies('model.max_model_len')}"
        )
    fits, too_many = need, max_requests * need + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if total_bytes(plan, geometry, middle) <= free_bytes:
            fits = middle
        else:
            too_many = middle
    return fits


def _remedies(field: str) -> str:
    return f"lower {field}, prefill.shared_buffers or prefill.independent_layers, or raise hostcann.hbm_bytes"
