"""How a decode rank divides its memory. Pure arithmetic over the configuration and the model's shape.

Main KV of all tokens lies in the host pool, layer after layer; the device holds the indexer keys of all tokens and,
per layer and running request, one *hot row*: the cache slots of the tokens which the last steps attended to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.config import ConfigError, SluiceConfig
from engine.config_check import min_hot_tokens
from engine.model.config import ModelConfig
from transfer.layout import indexer_token_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
DEVICE_GRANULE = 2 << 20  # a tensor in device memory takes whole pages of this size (engine.device)


@dataclass(frozen=True)
class HotRows:
    """Layout of the hot buffer of one layer: `rows` rows of `tokens` cache slots and a tail each.

    Slot s < tokens of a row is a cache slot, filled from the host pool on a miss. The tail holds what is not to be
    fetched: with residency, in one block, the tokens of the current step; with LIM, in two, all since the last whole
    block.

    Invariant (test_hot_rows_are_disjoint): the blocks of the rows partition the buffer, so no request can reach the
    slots of another one.
    """

    rows: int
    tokens: int  # cache slots of one row, a multiple of block_size
    block_size: int
    tail_blocks: int = 1

    @property
    def stride(self) -> int:
        """Slots from the start of a row to the start of the next one."""
        return self.tokens + self.tail_blocks * self.block_size

    @property
    def blocks_per_row(self) -> int:
        return self.stride // self.block_size

    @property
    def num_blocks(self) -> int:
        return self.rows * self.blocks_per_row

    def blocks(self, row: int) -> range:
        """Block ids of a row, in slot order. IndexError for a row that does not exist."""
        if not 0 <= row < self.rows:
            raise IndexError(f"hot row {row} does not exist; legal: 0 to {self.rows - 1}")
        return range(row * self.blocks_per_row, (row + 1) * self.blocks_per_row)


@dataclass(frozen=True)
class LayerRegion:
    """Byte offsets, from the host pool's start, of one layer's two tensors."""

    ckv: int  # [blocks, block_size, kv_lora_rank]
    k_rope: int  # [blocks, block_size, rope_dim]


@dataclass(frozen=True)
class DecodeGeometry:
    """Everything about sizes that a decode rank decides at start."""

    num_layers: int
    block_size: int  # tokens per block
    item_bytes: int
    kv_lora_rank: int
    rope_dim: int
    index_dim: int
    indexer_layers: tuple[int, ...]
    indexer_dtype: str  # "model", or "int8" with one scale per row
    num_blocks: int  # of the host pool and of each indexer cache
    hot: HotRows
    model_tokens: int  # longest prompt + output the model and its configuration allow
    max_request_tokens: int  # longest prompt + output this rank can hold: model_tokens, or less with a small pool

    @property
    def ckv_block_bytes(self) -> int:
        return self.block_size * self.kv_lora_rank * self.item_bytes

    @property
    def k_rope_block_bytes(self) -> int:
        return self.block_size * self.rope_dim * self.item_bytes

    @property
    def index_key_block_bytes(self) -> int:
        return self.block_size * self._indexer_token_bytes[0]

    @property
    def index_scale_block_bytes(self) -> int:
        """0 without scales."""
        return self.block_size * self._indexer_token_bytes[1]

    @property
    def indexer_bytes(self) -> int:
        """Index keys and scales of all layers that own an indexer."""
        return len(self.indexer_layers) * self.num_blocks * (self.index_key_block_bytes + self.index_scale_block_bytes)

    @property
    def hot_bytes_per_request(self) -> int:
        """One hot row in all layers."""
        return self.hot.blocks_per_row * self.host_block_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory of the indexer caches and hot buffers (test_the_device_holds_what_the_geometry_says)."""
        hot = [self.hot.num_blocks * size for size in (self.ckv_block_bytes, self.k_rope_block_bytes)]
        indexer = [self.num_blocks * size for size in (self.index_key_block_bytes, self.index_scale_block_bytes)]
        tensors = hot * self.num_layers + indexer * len(self.indexer_layers)
        return sum(-(-size // DEVICE_GRANULE) * DEVICE_GRANULE for size in tensors)

    @property
    def _indexer_token_bytes(self) -> tuple[int, int]:
        return indexer_token_bytes(self.index_dim, self.item_bytes, self.indexer_dtype)

    @property
    def host_block_bytes(self) -> int:
        """Host pool bytes of one block in all layers."""
        return self.num_layers * (self.ckv_block_bytes + self.k_rope_block_bytes)

    @property
    def layer_bytes(self) -> int:
        """Host pool bytes of one layer."""
        return self.num_blocks * (self.ckv_block_bytes + self.k_rope_block_bytes)

    @property
    def host_pool_bytes(self) -> int:
        """Host pool bytes of all layers, at most `decode.host_pool_bytes`."""
        return self.num_layers * self.layer_bytes

    @property
    def max_blocks_per_request(self) -> int:
        """Width of a block table."""
        return -(-self.max_request_tokens // self.block_size)

    def regions(self) -> Iterator[LayerRegion]:
        """Where each layer lies in the host pool, in order of layers; regions neither overlap nor leave gaps."""
        for layer in range(self.num_layers):
            start = layer * self.layer_bytes
            yield LayerRegion(ckv=start, k_rope=start + self.num_blocks * self.ckv_block_bytes)


def plan_geometry(config: SluiceConfig, model: ModelConfig) -> DecodeGeometry:
    """Sizes of one decode rank.

    A host pool too small for one request of the model's full length is legal: then `max_request_tokens` is lowered.

    Raises:
        ConfigError: the hot buffer cannot hold one step's top-k, or the host pool not even one block.
    """
    decode, block_size = config.decode, config.kv.block_size
    least = min_hot_tokens(config, model)
    if decode.hot_tokens < least:
        raise ConfigError(
            f"decode.hot_tokens = {decode.hot_tokens} cannot hold the {model.index_topk} tokens each row of a step "
            f"attends to (index_topk), with 1 + {decode.speculative_tokens} (decode.speculative_tokens) rows; legal: "
            f"multiples of kv.block_size = {block_size} from {least}"
        )
    item_bytes = ITEM_BYTES[config.model.dtype]
    row_bytes = (model.kv_lora_rank + model.qk_rope_head_dim) * item_bytes
    block_bytes = model.num_layers * block_size * row_bytes
    num_blocks = decode.host_pool_bytes // block_bytes
    if num_blocks == 0:
        raise ConfigError(
            f"decode.host_pool_bytes = {decode.host_pool_bytes} holds no block: one block of kv.block_size = "
            f"{block_size} tokens in all {model.num_layers} layers takes {block_bytes} bytes"
        )
    model_tokens = config.model.max_model_len or model.max_position_embeddings
    return DecodeGeometry(
        num_layers=model.num_layers,
        block_size=block_size,
        item_bytes=item_bytes,
        kv_lora_rank=model.kv_lora_rank,
        rope_dim=model.qk_rope_head_dim,
        index_dim=model.index_head_dim,
        indexer_layers=model.indexer_layers,
        indexer_dtype=config.kv.indexer_dtype,
        num_blocks=num_blocks,
        hot=HotRows(
            rows=decode.max_requests,
            tokens=decode.hot_tokens,
            block_size=block_size,
            tail_blocks=2 if decode.selection == "lim" else 1,
        ),
        model_tokens=model_tokens,
        max_request_tokens=min(model_tokens, num_blocks * block_size),
    )
