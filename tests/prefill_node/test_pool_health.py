from __future__ import annotations

import time

import pytest

from prefill_node.faulty_pool import FaultyPool
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


def test_faults_on_demand_are_those_of_the_seed():
    def faults(seed):
        pool, failed = FaultyPool(MemoryPool(), delay_s=0.0, failure=0.3, seed=seed), []
        for _ in range(100):
            try:
                pool.exists(["a"])
            except PoolError as error:
                assert "faults.pool_failure" in str(error)
                failed.append(True)
            else:
                failed.append(False)
        return failed

    assert faults(1) == faults(1) != faults(2)
    assert 15 < sum(faults(1)) < 45


def test_a_slow_pool_on_demand_answers_late():
    pool = FaultyPool(MemoryPool(), delay_s=0.02, failure=0.0, seed=0)
    started = time.monotonic()
    for _ in range(10):
        assert pool.exists(["a"]) == [False]
    assert 0.04 < time.monotonic() - started < 1.0
