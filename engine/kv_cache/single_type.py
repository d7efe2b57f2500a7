"""Blocks of one cache type, by request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv_cache.block_pool import BlockPool


@dataclass(frozen=True)
class CacheSpec:
    """One cache type of a node: `num_blocks` blocks of `block_size` tokens."""

    block_size: int
    num_blocks: int


class Usage(NamedTuple):
    used: int  # blocks
    total: int


class SingleTypeKVCacheManager:
    """Full-attention cache of one type: a request holds ceil(tokens / size) blocks, position p in number p // size.

    Subclasses for other types (a sliding window, say) override `blocks_for`.
    """

    def __init__(self, name: str, spec: CacheSpec) -> None:
        self.spec = spec
        self._pool = BlockPool(name, spec.num_blocks)
        self._blocks: dict[str, list[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks a request of `num_tokens` tokens holds. Pure."""
        return -(-num_tokens // self.spec.block_size)

    def _missing(self, request_id: str, num_tokens: int) -> int:
        return max(0, self.blocks_for(num_tokens) - len(self._blocks.get(request_id, ())))

    def can_allocate_together(self, num_tokens: Mapping[str, int], without: Collection[str] = ()) -> bool:
        """Whether all these requests could grow to their tokens, as if the requests `without` had been freed."""
        free = self._pool.num_free + sum(len(self._blocks.get(request_id, ())) for request_id in without)
        return sum(self._missing(request_id, tokens) for request_id, tokens in num_tokens.items()) <= free

    def can_allocate(self, request_id: str, num_tokens: int) -> bool:
        return self.can_allocate_together({request_id: num_tokens})

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Grows the request to `num_tokens` tokens; never shrinks. Raises NoFreeBlocks and changes nothing."""
        new = self._pool.allocate(self._missing(request_id, num_tokens))
        self._blocks.setdefault(request_id, []).extend(new)

    def blocks(self, request_id: str) -> list[int]:
        """Block ids in position order. KeyError for a request that holds none."""
        return list(self._blocks[request_id])

    def free(self, request_id: str) -> bool:
        """Gives everything back; False (and no effect) if the request holds nothing."""
        held = self._blocks.pop(request_id, None)
        if held is None:
            return False
        self._pool.free(held)
        return True

    def usage(self) -> Usage:
        return Usage(self._pool.num_used, self._pool.num_blocks)
