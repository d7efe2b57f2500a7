"""A pool that is slow or fails on demand."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from engine.faults import injected
from prefill_node.pool_client import PoolClient, WrappedPool
from transfer.mem_pool import PoolError

T = TypeVar("T")


class FaultyPool(WrappedPool):
    """Delays every operation by up to `delay_s` and makes a share `failure` of them raise PoolError. Thread safe.

    What fails has not reached the pool. Equal seeds give equal faults, in the order of the operations.
    """

    def __init__(self, pool: PoolClient, *, delay_s: float, failure: float, seed: int | str) -> None:
        self._pool, self._delay_s, self._failure = pool, delay_s, failure
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _call(self, operation: Callable[[PoolClient], T]) -> T:
        with self._lock:
            delay_s, luck = self._random.uniform(0, self._delay_s), self._random.random()
        time.sleep(delay_s)
        if luck < self._failure:
            injected("pool_failure", "an operation did not reach the pool")
            raise PoolError("the pool fails on demand (faults.pool_failure)")
        return operation(self._pool)
