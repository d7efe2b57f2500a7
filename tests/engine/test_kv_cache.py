"""Block bookkeeping keeps its invariants whatever the order of calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import BlockPool, CacheSpec, KVCacheManager, NoFreeBlocks
from engine.kv_cache.block_table import block_table, slot_mapping


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_every_block_is_free_or_held_exactly_once(steps: list[tuple[bool, int]]) -> None:
    pool = BlockPool("main", 20)
    held: list[list[int]] = []
    for take, count in steps:
        if take:
            try:
                held.append(pool.allocate(count))
            except NoFreeBlocks as error:
                assert error.wanted == count > error.free == pool.num_free
        elif held:
            pool.free(held.pop(count % len(held)))
        ids = [b for blocks in held for b in blocks]
        assert len(set(ids)) == len(ids) == pool.num_used
        assert pool.num_used + pool.num_free == 20


def test_double_free_is_refused_and_frees_nothing() -> None:
    pool = BlockPool("main", 4)
    blocks = pool.allocate(2)
    with pytest.raises(ValueError, match=r"main: blocks \[3\] are not held"):
        pool.free([blocks[0], 3])
    with pytest.raises(ValueError, match="not held exactly once"):
        pool.free([blocks[0], blocks[0]])
    assert pool.num_used == 2
    pool.free(blocks)
    with pytest.raises(ValueError, match="not held"):
        pool.free(blocks)


def test_all_or_nothing_allocation() -> None:
    manager = KVCacheManager({"main": CacheSpec(16, 8), "indexer": CacheSpec(16, 3)})
    manager.allocate("a", 17)
    before = manager.blocks("a")
    with pytest.raises(NoFreeBlocks, match="indexer"):
        manager.allocate("b", 33)
    with pytest.raises(NoFreeBlocks, match="indexer"):
        manager.allocate("a", 49)
    assert manager.blocks("a") == before
    with pytest.raises(KeyError):
        manager.blocks("b")
    assert manager.usage() == {"main": (2, 8), "indexer": (2, 3)}


def test_accounting_returns_to_zero() -> None:
    manager = KVCacheManager({"main": CacheSpec(16, 8), "indexer": CacheSpec(16, 8)})
    for name, tokens in (("a", 1), ("b", 16), ("c", 17)):
        manager.allocate(name, tokens)
    assert manager.usage()["main"].used == 4
    assert [manager.free(name) for name in ("b", "a", "c", "c")] == [True, True, True, False]
    assert all(usage.used == 0 for usage in manager.usage().values())


def test_what_fits_together_counts_what_each_holds_and_what_others_give_back() -> None:
    manager = KVCacheManager({"main": CacheSpec(16, 8), "indexer": CacheSpec(16, 6)})
    manager.allocate("a", 32)
    manager.allocate("b", 16)
    assert manager.can_allocate_together({"a": 48, "b": 48})
    assert not manager.can_allocate_together({"a": 48, "b": 64}), "each would fit alone, but the indexer has 3 left"
    assert manager.can_allocate("a", 80)
    assert not manager.can_allocate("a", 96)
    assert manager.can_allocate("a", 96, without={"b"})
    assert manager.usage()["main"].used == 3, "a question changes nothing"


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_request_holds_ceil_tokens_over_block_size(tokens: int, blocks: int) -> None:
    manager = KVCacheManager({"main": CacheSpec(16, 3)})
    manager.allocate("r", tokens)
    assert len(manager.blocks("r")["main"]) == blocks
    assert manager.can_ever_allocate(48)
    assert not manager.can_ever_allocate(49)


def test_slot_mapping_follows_the_block_table() -> None:
    table = block_table([[5, 2], [7]], width=3)
    assert table.tolist() == [[5, 2, 0], [7, 0, 0]]
    assert table.dtype == torch.int32
    assert slot_mapping([5, 2], torch.tensor([0, 3, 4, 7]), 4).tolist() == [20, 23, 8, 11]
    with pytest.raises(IndexError):
        slot_mapping([5], torch.tensor([4]), 4)
    with pytest.raises(ValueError, match="room for 1"):
        block_table([[1, 2]], width=1)
