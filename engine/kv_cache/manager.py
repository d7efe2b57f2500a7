"""All cache types of a node together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from engine.kv_cache.block_pool import NoFreeBlocks
from engine.kv_cache.single_type import CacheSpec, SingleTypeKVCacheManager, Usage


class KVCacheManager:
    """Allocates a request's blocks in every cache type.

    Invariant "all or nothing allocation" (test_all_or_nothing_allocation): a request gets its blocks in every type, or
    keeps exactly what it had. Invariant "accounting returns to zero": after the last `free` every usage is zero.
    """

    def __init__(self, specs: Mapping[str, CacheSpec]) -> None:
        if not specs:
            raise ValueError("a KVCacheManager needs at least one cache type")
        self._types = {name: SingleTypeKVCacheManager(name, spec) for name, spec in specs.items()}

    def can_ever_allocate(self, num_tokens: int) -> bool:
        """True if an empty node could hold the request."""
        return all(t.blocks_for(num_tokens) <= t.spec.num_blocks for t in self._types.values())

    def can_allocate(self, request_id: str, num_tokens: int, without: Collection[str] = ()) -> bool:
        """Whether the request could grow to `num_tokens`, as if the (other) requests `without` had been freed."""
        return self.can_allocate_together({request_id: num_tokens}, without)

    def can_allocate_together(self, num_tokens: Mapping[str, int], without: Collection[str] = ()) -> bool:
        """Whether all these requests could grow to their tokens at the same time."""
        return all(t.can_allocate_together(num_tokens, without) for t in self._types.values())

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Grows the request to `num_tokens` tokens in every type, or raises NoFreeBlocks and changes nothing."""
        for name, single in self._types.items():
            if not single.can_allocate(request_id, num_tokens):
                used, total = single.usage()
                raise NoFreeBlocks(name, single.blocks_for(num_tokens), total - used, total)
        for single in self._types.values():
            single.allocate(request_id, num_tokens)

    def blocks(self, request_id: str) -> dict[str, list[int]]:
        """Block ids by cache type, in position order. KeyError for an unknown request."""
        return {name: single.blocks(request_id) for name, single in self._types.items()}

    def free(self, request_id: str) -> bool:
        """Gives back every block of the request; False if it held none."""
        freed = [single.free(request_id) for single in self._types.values()]
        return any(freed)

    def usage(self) -> dict[str, Usage]:
        return {name: single.usage() for name, single in self._types.items()}
