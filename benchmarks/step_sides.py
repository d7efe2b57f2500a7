"""The sides of the decode-step benchmark: the node's own backend, and attention over a cache that is all resident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode_node.backend import DecodeBackend
from decode_node.geometry import DecodeGeometry, plan_geometry
from decode_node.memory import DecodeMemory, RowTables
from decode_node.selection import LruSelector
from engine.config import SluiceConfig
from engine.indexer_cache import IndexerCache
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from engine.ops import sparse_flash_attention

TOPK, BLOCK, LATENT, ROPE, INDEX_DIM = 2048, 128, 512, 64, 128


@dataclass(frozen=True)
class StepShape:
    """`batch` requests of `context` tokens, the last `rows` of which are the step's own; `heads` attention heads."""

    family: str
    heads: int
    context: int
    batch: int = 1
    rows: int = 1
    layers: int = 2

    @property
    def index_heads(self) -> int:
        return 64 if self.family == "deepseek_v32" else 32

    @property
    def label(self) -> str:
        """For result rows."""
        shape = f"{self.context // 1024}K, batch {self.batch}, Q {self.rows}"
        return f"step {self.heads} heads, {self.index_heads} index heads, {shape}"

    @property
    def tokens(self) -> int:
        return self.batch * self.rows


class Inputs(NamedTuple):
    """What a layer's projections give the backend."""

    q_nope: Tensor
    q_rope: Tensor
    ckv: Tensor
    k_rope: Tensor

    @staticmethod
    def random(shape: StepShape, rng: torch.Generator) -> Inputs:
        sizes = (shape.heads, LATENT), (shape.heads, ROPE), (LATENT,), (ROPE,)
        return Inputs(*(torch.randn(shape.tokens, *size, generator=rng).bfloat16() for size in sizes))


class PlainMemory:
    """Host and device memory, filled with one block of random rows over and over."""

    address = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        block = torch.randn(1, *shape[1:], generator=torch.Generator().manual_seed(7)).to(dtype)
        return block.expand(*shape).clone()

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.empty(shape, dtype)


class Offloaded:
    """A `DecodeBackend` whose hot rows hold twice a step's top-k; everything else is in its host pool."""

    def __init__(self, shape: StepShape) -> None:
        tokens = shape.context * shape.batch
        self.model = ModelConfig.from_dict(
            {
                "model_type": shape.family,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads,
                "first_k_dense_replace": shape.layers,
            }
        )
        sections = {
            "model": {"path": "unused", "dtype": "bfloat16", "max_model_len": shape.context},
            "kv": {"block_size": BLOCK},
            "decode": {
                "host_pool_bytes": tokens * (LATENT + ROPE) * 2 * shape.layers,
                "hot_tokens": 2 * TOPK * shape.rows,
                "max_requests": shape.batch,
            },
        }
        self.geometry: DecodeGeometry = plan_geometry(SluiceConfig.model_validate(sections), self.model)
        self.memory = DecodeMemory(self.geometry, torch.bfloat16, PlainMemory(), PlainMemory())
        rng = torch.Generator().manual_seed(5)
        for cache in self.memory.indexers.values():
            cache.keys.copy_(torch.randn(cache.keys.shape, generator=rng))
        self.tables = RowTables(self.geometry)
        blocks = torch.randperm(self.geometry.num_blocks, generator=rng).view(shape.batch, -1).tolist()
        for row, mine in enumerate(blocks):
            self.tables.bind(row, mine, mine)
        selector = LruSelector(self.model, self.memory, self.tables)
        self.backend = DecodeBackend(self.model, self.memory, self.tables, selector, writes_host=True)
        self._rows, self._generations = torch.arange(shape.batch), torch.ones(shape.batch, dtype=torch.int64)
        self._starts = torch.full((shape.batch,), shape.context - shape.rows)
        self._counts = torch.full((shape.batch,), shape.rows)

    def begin(self) -> Tensor:
        """Positions of the step's tokens; always the same ones."""
        return self.backend.begin(self._rows, self._generations, self._starts, self._counts)

    def attend(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, indexer: IndexerQuery | None
    ) -> Tensor:
        return self.backend.attend(layer, q_nope, q_rope, ckv, k_rope, indexer)

    def miss_share(self) -> float:
        """Misses over hits and misses since the last time it was asked."""
        counters = self.backend.counters
        share = counters.misses / (counters.hits + counters.misses)
        counters.hits = counters.misses = 0
        return share


class Resident:
    """The same attention with all main KV on the device: plain top-k, and sparse attention where the rows lie.

    Index keys and tables are those of the other side; the main KV is its own.
    """

    def __init__(self, offloaded: Offloaded, shape: StepShape) -> None:
        self._model, self._indexers = offloaded.model, offloaded.memory.indexers
        self._table = offloaded.tables.main
        caches = offloaded.memory.host_ckv, offloaded.memory.host_k_rope
        self._ckv, self._k_rope = ([cache.unsqueeze(2).clone() for cache in side] for side in caches)
        self._starts = torch.full((shape.batch,), shape.context - shape.rows)
        self._counts = torch.full((shape.batch,), shape.rows)

    def begin(self) -> Tensor:
        """What a backend without hot rows works out before a step."""
        ends = self._counts.cumsum(0)
        batch = torch.arange(len(self._starts)).repeat_interleave(self._counts)
        positions = torch.arange(len(batch)) + (self._starts - ends + self._counts)[batch]
        blocks = self._table[batch, positions // BLOCK].long()
        self._slots = blocks * BLOCK + positions % BLOCK
        self._ends, self._visible = ends.int(), (self._starts + self._counts).int()
        return positions

    def attend(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, indexer: IndexerQuery | None
    ) -> Tensor:
        for rows, cache in ((ckv, self._ckv[layer]), (k_rope, self._k_rope[layer])):
            cache.view(-1, rows.shape[1])[self._slots] = rows
        assert indexer is not None
        keys = self._indexers[layer]
        keys.write(self._slots, indexer.k)
        topk = keys.select(indexer, self._table, self._ends, self._visible, self._model.index_topk)
        return sparse_flash_attention(
            *(q_nope, q_rope, self._ckv[layer], self._k_rope[layer], self._table, self._ends, topk),
            self._model.softmax_scale,
        )


class Picked(IndexerCache):
    """Picks made beforehand in place of an indexer's: what is left of a step is what is not index scoring."""

    def __init__(self, picks: Sequence[Tensor]) -> None:
        super().__init__(torch.empty(0))
        self._picks = list(picks)
        self._next = 0

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Nothing: writing a key is part of scoring."""

    def select(
        self, query: IndexerQuery, block_table: Tensor, query_ends: Tensor, key_lens: Tensor, topk: int
    ) -> Tensor:
        self._next = (self._next + 1) % len(self._picks)
        return self._picks[self._next]
