"""The pool objects of a process, over a pool that fails and evicts whenever it likes."""

from __future__ import annotations

import contextlib
import ctypes
import random

import pytest

from prefill_node.block_keys import Writers
from prefill_node.pool_objects import PoolObjects
from tests.prefill_node.harness import MemoryPool
from transfer.mem_pool import PoolError

REQUESTS = ["a", "b", "c"]
KEYS = [f"block-{number}" for number in range(6)]


class MoodyPool(MemoryPool):
    """Any call may fail, before or after it has done its work; finished objects without a lease may be evicted."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng, self.failing = rng, True

    def _enter(self, call, keys=()):
        if self.failing and self._rng.random() < 0.25:
            raise PoolError(f"{call} fails")
        for key in sorted(self.finished - self.leased):
            if self._rng.random() < 0.1:
                self.remove([key])

    def written_by_another_group(self, keys):
        names = [f"{key}@1" for key in keys if f"{key}@1" not in self.objects]
        self.objects |= {name: ctypes.create_string_buffer(64) for name in names}
        self.finished.update(names)

    def lease(self, keys, ttl_ms):
        """Objects may go between the look-up and the lease."""
        for key in keys:
            if key not in self.leased and self._rng.random() < 0.2:
                self.remove([key])
        return super().lease(keys, ttl_ms)


@pytest.mark.parametrize("seed", range(400))
def test_no_object_outlives_the_requests_that_use_it(seed):
    """Or it would be counted, and never be written again, for as long as the process lives."""
    rng = random.Random(seed)
    pool = MoodyPool(rng)
    objects = PoolObjects(pool, Writers(0, 2), 64, lease_s=100.0)
    writing: dict[str, list[str]] = {}

    def act(request: str) -> None:
        first = rng.randrange(len(KEYS))
        match rng.randrange(7):
            case 0:
                objects.find(request, KEYS)
            case 1:
                objects.hold(request, KEYS[:first])
            case 2 if request not in writing:
                writing[request] = list(objects.begin(request, KEYS[first:], 0.0))
            case 3 if request in writing:
                keys = writing.pop(request)
                try:
                    objects.finish(keys)
                except PoolError:
                    objects.abort(keys)
            case 4:
                objects.distrust(request)
            case 5:
                writing.pop(request, None)
                objects.drop(request)
            case 6:
                pool.written_by_another_group(KEYS)

    for _ in range(60):
        with contextlib.suppress(PoolError):
            act(rng.choice(REQUESTS))
    pool.failing = False
    for request in REQUESTS:
        objects.drop(request)
    assert len(objects) == 0
