from __future__ import annotations

import time

import pytest

from prefill_node.pool_health import GuardedPool
from tests.prefill_node.harness import MemoryPool
from transfer.mem_pool import PoolError, PoolFull


class CountingPool(MemoryPool):
    """Counts the calls that reach it."""

    calls = 0

    def exists(self, keys):
        self.calls += 1
        return super().exists(keys)


def test_a_pool_that_is_down_is_asked_seldom():
    inner = CountingPool()
    pool = GuardedPool(inner, retry_s=0.05)
    inner.fail.add("exists")
    for _ in range(20):
        with pytest.raises(PoolError, match="exists fails on demand"):
            pool.exists(["a"])
    assert inner.calls == 1
    assert "fails on demand" in pool.down
    time.sleep(0.06)
    with pytest.raises(PoolError):
        pool.exists(["a"])
    assert inner.calls == 2
    inner.fail.clear()
    time.sleep(0.06)
    assert pool.exists(["a"]) == [False]
    assert pool.down == ""
    assert pool.counters() == (2, 1)


def test_a_full_pool_is_not_down():
    inner = MemoryPool()

    def full(keys, sizes, *, wait_s=0.0):
        raise PoolFull("no room")

    inner.alloc = full
    pool = GuardedPool(inner)
    with pytest.raises(PoolFull):
        pool.alloc(["a"], [1])
    assert pool.down == ""
