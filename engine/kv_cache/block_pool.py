"""The free list of one kind of block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class NoFreeBlocks(Exception):
    """Fewer blocks are free than were asked for. Nothing was allocated."""

    def __init__(self, pool: str, wanted: int, free: int, total: int) -> None:
        super().__init__(f"{pool}: {wanted} blocks wanted, {free} of {total} free")
        self.pool, self.wanted, self.free, self.total = pool, wanted, free, total


class BlockPool:
    """Hands out block ids 0 .. num_blocks-1.

    Invariant (test_every_block_is_free_or_held_exactly_once): each id is either in the free list once or held once.
    Freeing an id that is not held is refused, so a double free can never hand one block to two requests.
    Freed blocks go to the end of the list: the block which was free the longest is used first.
    """

    def __init__(self, name: str, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"{name}: num_blocks = {num_blocks}; at least 1 is needed")
        self.name = name
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._held)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, or none and raises NoFreeBlocks."""
        if count > len(self._free):
            raise NoFreeBlocks(self.name, count, len(self._free), self.num_blocks)
        blocks = [self._free.popleft() for _ in range(count)]
        self._held.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Gives blocks back. ValueError if one is not held or is named twice; then nothing is freed."""
        given = list(blocks)
        if len(set(given)) != len(given) or not self._held.issuperset(given):
            bad = sorted({b for b in given if b not in self._held or given.count(b) > 1})
            raise ValueError(f"{self.name}: blocks {bad} are not held exactly once, so they cannot be freed")
        self._held.difference_update(given)
        self._free.extend(given)
