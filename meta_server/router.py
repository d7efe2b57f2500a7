"""Which replica gets a request. Keeps its own account of what it has given out, because heartbeats are late."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meta_server.errors import unavailable
from meta_server.registry import DECODE, PREFILL, Registry, Replica, ReplicaKey


@dataclass
class Load:
    """What a replica was given and has not ended yet: requests, and their tokens (all at decode, prompt at prefill)."""

    requests: int = 0
    tokens: int = 0


class Router:
    """Decode by free capacity, prefill by least load; ties are broken at random, so that no replica is a favourite.

    Invariant: a replica's load is the sum over the claims open on it, and returns to zero when they are closed
    (test_loads_return_to_zero).
    """

    def __init__(self, registry: Registry, rng: random.Random | None = None) -> None:
        self._registry = registry
        self._rng = rng or random.Random()
        self._loads: dict[ReplicaKey, Load] = defaultdict(Load)

    def load(self, key: ReplicaKey) -> Load:
        open_load = self._loads.get(key)
        return Load() if open_load is None else Load(open_load.requests, open_load.tokens)

    @contextmanager
    def claim_decode(self, tokens: int, avoid: Collection[str] = ()) -> Iterator[Replica]:
        """Picks the decode replica with most free capacity for a request of `tokens` (prompt + longest output).

        Replicas whose leaders' epochs are in `avoid` are taken only if no other fits.

        Raises:
            RequestFailed: UNAVAILABLE when no complete replica can hold it.
        """
        fitting = self._fitting(DECODE, tokens)
        if not self._registry.replicas(DECODE):
            raise unavailable("no complete decode group is ready")
        if not fitting:
            raise unavailable(f"no decode group that is ready can hold a request of {tokens} tokens")
        with self._claim(self._least(_others(fitting, avoid) or fitting, self._decode_fill), tokens) as replica:
            yield replica

    @contextmanager
    def claim_prefill(self, tokens: int, avoid: Collection[str] = ()) -> Iterator[Replica]:
        """Picks the prefill replica with the fewest prompt tokens given out, running ones included.

        `avoid`: as for decode.

        Raises:
            RequestFailed: UNAVAILABLE when there is no complete replica.
        """
        replicas = self._registry.replicas(PREFILL)
        if not replicas:
            raise unavailable("no complete prefill group is ready")
        choice = self._least(_others(replicas, avoid) or replicas, lambda replica: self.load(replica.key).tokens)
        with self._claim(choice, tokens) as replica:
            yield replica

    def can_run(self, tokens: int, prompt_tokens: int, avoid: Collection[str] = ()) -> bool:
        """Whether a prefill and a decode replica, none of them to be avoided, can take such a request now."""
        decode, prefill = self._fitting(DECODE, tokens), self._fitting(PREFILL, prompt_tokens)
        return bool(_others(decode, avoid)) and bool(_others(prefill, avoid))

    def _fitting(self, role: int, tokens: int) -> list[Replica]:
        return [replica for replica in self._registry.replicas(role) if replica.max_request_tokens >= tokens]

    def _decode_fill(self, replica: Replica) -> float:
        """Fraction of the replica's scarcest resource that is given out; above 1 when requests wait there."""
        load = self.load(replica.key)
        info = replica.leader.info
        blocks = next((pool.total for pool in replica.leader.status.pools if pool.name == "host_blocks"), 0)
        capacity = max(blocks * info.layout.block_size, info.max_request_tokens, 1)
        return max(load.tokens / capacity, load.requests / max(info.max_requests, 1))

    def _least(self, replicas: Sequence[Replica], score: Callable[[Replica], float]) -> Replica:
        scores = [score(replica) for replica in replicas]
        best = min(scores)
        return self._rng.choice([replica for replica, value in zip(replicas, scores, strict=True) if value == best])

    @contextmanager
    def _claim(self, replica: Replica, tokens: int) -> Iterator[Replica]:
        load = self._loads[replica.key]
        load.requests += 1
        load.tokens += tokens
        try:
            yield replica
        finally:
            load.requests -= 1
            load.tokens -= tokens
            if load.requests == 0:
                self._loads.pop(replica.key, None)


def _others(replicas: Sequence[Replica], avoid: Collection[str]) -> list[Replica]:
    return [replica for replica in replicas if replica.leader.info.epoch not in avoid]
