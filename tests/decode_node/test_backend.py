"""Invariants of the hot buffer, step by step: what counts as a hit, and what a row may hold."""

from __future__ import annotations

import random

import pytest
import torch

from decode_node.backend import SELECTORS, DecodeBackend
from decode_node.geometry import plan_geometry
from decode_node.memory import DecodeMemory, RowTables
from decode_node.selection import LruSelector
from engine.config import SluiceConfig
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from tests.checkpoints import tiny_config
from tests.decode_node.local_node import PoisonedMemory

BLOCK, HOT, TOPK = 16, 64, 64
HEADS, INDEX_HEADS, INDEX_DIM = 4, 16, 32


class Caches:
    """Decode memory of one layer with random rows, and a backend over it."""

    def __init__(self, hot: int = HOT, selection: str = "residency") -> None:
        self.model = ModelConfig.from_dict(tiny_config("glm_moe_dsa", num_hidden_layers=1))
        decode = {"hot_tokens": hot, "host_pool_bytes": 1 << 20, "selection": selection}
        sections = {"model": {"path": "unused"}, "decode": decode}
        self.geometry = plan_geometry(SluiceConfig.model_validate(sections), self.model)
        self.memory = DecodeMemory(self.geometry, torch.float32, PoisonedMemory(), PoisonedMemory())
        self.tables = RowTables(self.geometry)
        self.selector = SELECTORS[selection](self.model, self.memory, self.tables)
        self.backend = DecodeBackend(self.model, self.memory, self.tables, self.selector, writes_host=True)
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
        self.pass_over(row, generation, position, tokens=1)
        return self.backend.counters.hits - before[0], self.backend.counters.misses - before[1]

    def pass_over(self, row: int, generation: int, position: int, tokens: int) -> None:
        """Some new random tokens of one request, from `position` on."""
        assert not self.attend(row, generation, position, self.new_rows(tokens)).isnan().any()

    def attend(self, row: int, generation: int, position: int, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """`rows` as of `new_rows`, at `position` and behind it; returns the attention's output."""
        q_nope, q_rope, ckv, k_rope, *query = rows
        counts = torch.tensor([len(ckv)])
        self.backend.begin(torch.tensor([row]), torch.tensor([generation]), torch.tensor([position]), counts)
        return self.backend.attend(0, q_nope, q_rope, ckv, k_rope, IndexerQuery(*query))

    def new_rows(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Random q_nope, q_rope, ckv, k_rope and the indexer's q, k, w."""
        latent, rope = self.geometry.kv_lora_rank, self.geometry.rope_dim
        main = self.random(tokens, HEADS, latent), self.random(tokens, HEADS, rope)
        new = self.random(tokens, latent), self.random(tokens, rope)
        index = self.random(tokens, INDEX_HEADS, INDEX_DIM), self.random(tokens, INDEX_DIM)
        return (*main, *new, *index, self.random(tokens, INDEX_HEADS).abs())

    @staticmethod
    def joined(rows: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """Several `new_rows` as one."""
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def test_sealed_prefix() -> None:
    """The step's own token is neither hit nor miss; the next step, for which it is sealed, must fetch it once."""
    caches = Caches()
    caches.tables.bind(0, [3, 4], [3, 4])
    caches.fill([3, 4])
    assert caches.step(row=0, generation=1, position=10) == (0, 10)  # positions 0 to 9 come from the host
    assert caches.step(row=0, generation=1, position=11) == (10, 1)  # 10, the last step's own
    assert caches.step(row=0, generation=1, position=12) == (11, 1)


def test_rollback_never_leaves_a_wrong_row_resident() -> None:
    """Of each pass a random number of tokens is right; what is wrong is written anew by the next one, with other rows.

    So a hot row holds sealed positions only, and of each the bytes that the host pool ended up with.
    """
    caches = Caches(hot=4 * TOPK)
    caches.tables.bind(2, list(range(3, 15)), list(range(3, 15)))
    caches.fill(list(range(3, 15)))
    rng = random.Random(1)
    position = 60
    for _ in range(30):
        tokens = rng.randint(1, 4)
        caches.pass_over(row=2, generation=1, position=position, tokens=tokens)
        assert isinstance(caches.selector, LruSelector)
        state = caches.selector._states[0]
        slots = state.slot_to_token[2]
        resident = [(slot, token) for slot, token in enumerate(slots.tolist()) if token >= 0]
        assert resident
        assert all(token < position for _, token in resident)
        hot = caches.memory.hot_ckv[0].view(caches.geometry.hot.rows, caches.geometry.hot.stride, -1)[2]
        host = caches.memory.host_ckv[0][3:15].flatten(0, 1)
        for slot, token in resident:
            assert torch.equal(hot[slot], host[token]), f"position {token} in slot {slot}"
        position += rng.randint(1, tokens)  # the others were wrong: the next pass starts among them


def test_several_tokens_of_a_request_are_causal_and_equal_one_at_a_time() -> None:
    """Three tokens in one pass attend to what three passes of one token do."""
    together, apart = Caches(hot=3 * TOPK), Caches(hot=3 * TOPK)
    for caches in (together, apart):
        caches.tables.bind(0, list(range(1, 9)), list(range(1, 9)))
        caches.fill(list(range(1, 9)))
    rows = [together.new_rows(1) for _ in range(3)]
    one_by_one = [apart.attend(0, 1, 90 + index, row) for index, row in enumerate(rows)]
    at_once = together.attend(0, 1, 90, together.joined(rows))
    assert torch.allclose(at_once, torch.cat(one_by_one), atol=1e-5)
    assert together.backend.counters.misses <= apart.backend.counters.misses


def test_more_tokens_than_the_tail_holds_are_refused() -> None:
    caches = Caches()
    row, generation, position = torch.tensor([0]), torch.tensor([1]), torch.tensor([5])
    with pytest.raises(ValueError, match=f"{BLOCK + 1} tokens of a request in its tail of {BLOCK} tokens"):
        caches.backend.begin(row, generation, position, counts=torch.tensor([BLOCK + 1]))
    with pytest.raises(ValueError, match="in its tail"):
        caches.backend.begin(row, generation, position + BLOCK, stable_prefix=position)


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
    caches.backend = DecodeBackend(caches.model, caches.memory, caches.tables, caches.selector, writes_host=False)
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


def test_a_layer_before_the_one_whose_top_k_it_uses_is_an_error() -> None:
    """What the pass before selected is not taken for this one's."""
    caches = Caches()
    caches.tables.bind(0, [3, 4], [3, 4])
    caches.fill([3, 4])
    caches.step(row=0, generation=1, position=20)
    q_nope, q_rope, ckv, k_rope, *_ = caches.new_rows(1)
    caches.backend.begin(torch.tensor([0]), torch.tensor([1]), torch.tensor([21]))
    with pytest.raises(RuntimeError, match="layer 0 uses the top-k of 0, not selected in this pass"):
        caches.backend.attend(0, q_nope, q_rope, ckv, k_rope, None)
