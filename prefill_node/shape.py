"""How much a prefill group holds, from configuration and model alone; decided before anything is loaded. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config import SluiceConfig
from engine.config_check import max_model_len
from engine.kv_cache import CacheSpec
from engine.model.config import ModelConfig
from prefill_node.geometry import REGION_ALIGNMENT, CapacityError, KvGeometry, choose_kv_blocks, round_up, total_bytes
from prefill_node.plan import LayerBufferPlan, plan_layer_buffers
from prefill_node.pool_layout import CHECKSUM_BYTES, PoolObjectLayout
from prefill_node.scheduler import INDEXER, MAIN
from transfer.layout import DTYPE_BYTES

POOL = "pool"  # third cache type: places in the pool
POOL_GRANULE = 4096  # bytes the pool rounds an object up to
POOL_USABLE = 0.85  # share given out, so that the pool never comes near 0.9, where it begins to evict


@dataclass(frozen=True)
class PrefillShape:
    plan: LayerBufferPlan
    geometry: KvGeometry
    object_layout: PoolObjectLayout
    kv_blocks: int  # of every layer buffer
    pool_blocks: int  # blocks of all layers that one rank's share of the pool holds; each rank saves its own
    max_prompt_tokens: int  # longest prompt this group can ever take

    @property
    def main_kv_bytes(self) -> int:
        """Main KV on the device."""
        return self.geometry.main_bytes(self.plan.num_slots, self.kv_blocks)

    @property
    def device_bytes(self) -> int:
        """All layer buffers, the page of their generation words, and the words of their checksums."""
        return total_bytes(self.plan, self.geometry, self.kv_blocks) + _words_bytes(
            self.plan, self.kv_blocks, checksums=self.object_layout.checksums
        )

    @property
    def indexer_bytes(self) -> int:
        """Index keys and scales on the device."""
        return self.kv_blocks * sum(self.geometry.slot_block(layers).indexer for layers in self.plan.slots)

    @property
    def main_kv_bytes_all_resident(self) -> int:
        """What it would be with a buffer for every layer."""
        return self.geometry.main_bytes(self.plan.num_layers, self.kv_blocks)

    def cache_specs(self) -> dict[str, CacheSpec]:
        """What a request must be given before it runs.

        With layer reuse its blocks also need a place in the pool, from which later chunks reload them; without, saving
        is only good for later requests, and no request waits for it.
        """
        block_size = self.geometry.block_size
        specs = {MAIN: CacheSpec(block_size, self.kv_blocks), INDEXER: CacheSpec(block_size, self.kv_blocks)}
        return specs | ({POOL: CacheSpec(block_size, self.pool_blocks)} if self.plan.has_reuse else {})


def stored_bytes(layout: PoolObjectLayout) -> int:
    """What one block of all layers takes of the pool."""
    return round_up(layout.object_bytes, POOL_GRANULE)


def pool_bytes_for(blocks: int, layout: PoolObjectLayout) -> int:
    """The smallest whole MiB of `pool.dram_bytes` with which one rank's share of the pool holds `blocks` blocks."""
    return round_up(math.ceil(blocks * stored_bytes(layout) / POOL_USABLE), 1 << 20)


def prefill_shape(config: SluiceConfig, model: ModelConfig) -> PrefillShape:
    """Sizes one prefill group. A pool too small for the longest prompt is legal and lowers `max_prompt_tokens`.

    Raises CapacityError naming the fields to change, TypeError or ValueError for illegal layer buffers.
    """
    section = config.prefill
    plan = plan_layer_buffers(model.num_layers, section.independent_layers, section.shared_buffers)
    geometry = KvGeometry(
        block_size=config.kv.block_size,
        kv_lora_rank=model.kv_lora_rank,
        rope_dim=model.qk_rope_head_dim,
        index_dim=model.index_head_dim,
        element_bytes=DTYPE_BYTES[config.model.dtype],
        indexer_layers=frozenset(model.indexer_layers),
        indexer_dtype=config.kv.indexer_dtype,
    )
    tokens = max_model_len(config, model)
    checksums = config.pool.checksum == "on"
    most_blocks = section.kv_blocks or section.max_requests * geometry.blocks_of(tokens)
    kv_blocks = choose_kv_blocks(
        plan,
        geometry,
        free_bytes=max(0, config.hostcann.hbm_bytes - _words_bytes(plan, most_blocks, checksums=checksums)),
        max_model_len=tokens,
        max_requests=section.max_requests,
        configured=section.kv_blocks,
    )
    object_layout = PoolObjectLayout(geometry, model.num_layers, checksums=checksums)
    stored = stored_bytes(object_layout)
    pool_blocks = int(config.pool.dram_bytes * POOL_USABLE) // stored
    if plan.has_reuse and not pool_blocks:
        raise CapacityError(
            f"pool.dram_bytes = {config.pool.dram_bytes} cannot hold one block of all {model.num_layers} layers "
            f"({stored} bytes), from which reused layer buffers are reloaded"
        )
    prompt = min(tokens, pool_blocks * geometry.block_size) if plan.has_reuse else tokens
    return PrefillShape(plan, geometry, object_layout, kv_blocks, pool_blocks, prompt)


def _words_bytes(plan: LayerBufferPlan, kv_blocks: int, *, checksums: bool) -> int:
    """Device memory for other things than KV: the generation words and, with checksums, a word for each block."""
    words = plan.num_slots * kv_blocks * CHECKSUM_BYTES if checksums else 0
    return REGION_ALIGNMENT + round_up(words, REGION_ALIGNMENT)
