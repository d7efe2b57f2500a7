"""Invariants of the hot buffer, step by step: what counts as a hit, and what a row may hold."""

from __future__ import annotations

import pytest
import torch

from decode_node.backend import DecodeBackend
from decode_node.geometry import plan_geometry
from decode_node.memory import DecodeMemory, RowTables
from engine.config import SluiceConfig
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from tests.checkpoints import tiny_config
from tests.decode_node.local_node import PoisonedMemory

BLOCK, HOT, TOPK = 16, 64, 64
HEADS, INDEX_HEADS, INDEX_DIM = 4, 16, 32


class Caches:
    """Decode memory of one layer with random rows, and a backend over it."""

    def __init__(self) -> None:
        self.model = ModelConfig.from_dict(tiny_config("glm_moe_dsa", num_hidden_layers=1))
        sections = {"model": {"path": "unused"}, "decode": {"hot_tokens": HOT, "host_pool_bytes": 1 << 20}}
        self.geometry = plan_geometry(SluiceConfig.model_validate(sections), self.model)
        self.memory = DecodeMemory(self.geometry, torch.float32, PoisonedMemory(), PoisonedMemory())
        self.tables = RowTables(self.geometry)
        self.backend = DecodeBackend(self.model, self.memory, self.tables, writes_host=True)
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def fill(self, blocks: list[int]) -> None:
        """Random rows in these host and indexer blocks."""
        self.memory.host_ckv[0][blocks] = self.random(len(blocks), BLOCK, self.geometry.kv_lora_rank)
        self.memory.host_k_rope[0][blocks] = self.random(len(blocks), BLOCK, self.geometry.rope_dim)
        self.memory.indexers[0].keys[blocks] = self.random(len(blocks), BLOCK, 1, INDEX_DIM)

    def step(self, row: int, generation: int, position: int) -> tuple[int, int]:
        """One request's step over the one layer; returns its (hits, misses)."""
        before = (self.backend.counters.hits, self.backend.counters.misses)
        self.backend.begin(torch.tensor([row]), torch.tensor([generation]), torch.tensor([position]))
        ckv, k_rope = self.random(1, self.geometry.kv_lora_rank), self.random(1, self.geometry.rope_dim)
        query = IndexerQuery(
            self.random(1, INDEX_HEADS, INDEX_DIM), self.random(1, INDEX_DIM), self.random(1, INDEX_HEADS).abs()
        )
        q_nope, q_rope = self.random(1, HEADS, ckv.shape[1]), self.random(1, HEADS, k_rope.shape[1])
        out = self.backend.attend(0, q_nope, q_rope, ckv, k_rope, query)
        assert not out.isnan().any()
        return self.backend.counters.hits - before[0], self.backend.counters.misses - before[1]


def test_sealed_prefix() -> None:
    """The step's own token is neither hit nor miss; the next step, for which it is sealed, must fetch it once."""
    caches = Caches()
    caches.tables.bind(0, [3, 4], [3, 4])
    caches.fill([3, 4])
    assert caches.step(row=0, generation=1, position=10) == (0, 10)  # positions 0 to 9 come from the host
    assert caches.step(row=0, generation=1, position=11) == (10, 1)  # 10, the last step's own
    assert caches.step(row=0, generation=1, position=12) == (11, 1)


def test_a_new_generation_of_a_row_hits_nothing() -> None:
    caches = Caches()
    caches.tables.bind(0, [3, 4], [3, 4])
    caches.fill([3, 4])
    caches.step(row=0, generation=1, position=20)
    caches.tables.bind(0, [5, 6], [5, 6])
    caches.fill([5, 6])
    assert caches.step(row=0, generation=2, position=20) == (0, 20)
    hot = caches.memory.hot_ckv[0].flatten(0, 2)[:HOT]
    host = caches.memory.host_ckv[0][[5, 6]].flatten(0, 1)[:20]
    held = hot[~hot.isnan().any(dim=1)]
    assert torch.equal(held[held[:, 0].argsort()], host[host[:, 0].argsort()])


def test_a_step_touches_only_its_rows() -> None:
    caches = Caches()
    for row, blocks in ((0, [1, 2]), (1, [7, 8])):
        caches.tables.bind(row, blocks, blocks)
        caches.fill(blocks)
    caches.step(row=0, generation=1, position=20)
    others = [block for row in range(1, caches.geometry.hot.rows) for block in caches.geometry.hot.blocks(row)]
    assert caches.memory.hot_ckv[0][others].isnan().all()
    assert caches.memory.hot_k_rope[0][others].isnan().all()
    assert caches.memory.host_ckv[0][9:].isnan().all()


def test_a_new_row_goes_to_the_host_pool_and_to_the_tail() -> None:
    caches = Caches()
    caches.tables.bind(0, [3, 9], [3, 5])
    caches.fill([3])
    caches.step(row=0, generation=1, position=16)  # the first slot of the second block
    tail = caches.memory.hot_ckv[0].flatten(0, 2)[HOT]
    assert not tail.isnan().any()
    assert torch.equal(caches.memory.host_ckv[0][9, 0], tail)
    assert caches.memory.host_ckv[0][9, 1:].isnan().all()
    assert not caches.memory.indexers[0].keys[5, 0].isnan().any()


def test_a_rank_that_does_not_own_the_host_pool_leaves_it_alone() -> None:
    caches = Caches()
    caches.backend = DecodeBackend(caches.model, caches.memory, caches.tables, writes_host=False)
    caches.tables.bind(0, [3], [3])
    caches.fill([3])
    before = caches.memory.host_ckv[0].clone()
    caches.step(row=0, generation=1, position=5)
    assert torch.equal(caches.memory.host_ckv[0].nan_to_num(0), before.nan_to_num(0))


def test_misses_are_copied_byte_for_byte() -> None:
    caches = Caches()
    blocks = [2, 11, 5, 8, 7, 13, 1]
    caches.tables.bind(3, blocks, blocks)
    caches.fill(blocks)
    _, misses = caches.step(row=3, generation=9, position=107)
    row_bytes = (caches.geometry.kv_lora_rank + caches.geometry.rope_dim) * 4
    assert TOPK - 1 <= misses <= TOPK
    assert caches.backend.counters.bytes_host_to_device == misses * row_bytes


def test_row_tables_keep_other_rows() -> None:
    tables = RowTables(Caches().geometry)
    tables.bind(0, [1, 2, 3], [4, 5, 6])
    tables.bind(1, [7, 8], [9, 10])
    tables.bind(0, [11], [12])
    assert tables.main[0].tolist()[:4] == [11, 0, 0, 0]
    assert tables.main[1].tolist()[:3] == [7, 8, 0]
    assert tables.indexer[1].tolist()[:3] == [9, 10, 0]


def test_attending_without_a_step_is_an_error() -> None:
    caches = Caches()
    none = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"no step was begun; call begin\(\)"):
        caches.backend.attend(0, none, none, none, none, None)
