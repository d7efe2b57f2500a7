"""Random paged inputs and dense float64 formulas that the operators are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def i32(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_tables(lengths: list[int], block_size: int, rng: torch.Generator, spare: int = 2) -> tuple[Tensor, int]:
    """(block tables of requests in random, disjoint blocks, number of blocks); unused columns hold an illegal block."""
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + spare
    order = torch.randperm(blocks, generator=rng)
    table = torch.full((len(lengths), max([*needed, 1])), blocks + 7, dtype=torch.int32)
    start = 0
    for i, count in enumerate(needed):
        table[i, :count] = order[start : start + count]
        start += count
    return table, blocks


def gather(cache: Tensor, table_row: Tensor, length: int) -> Tensor:
    """[length, dims] rows of one request in order of position, by plain indexing."""
    block_size = cache.shape[1]
    flat = cache.reshape(-1, cache.shape[-1])
    return torch.stack([flat[int(table_row[p // block_size]) * block_size + p % block_size] for p in range(length)])


@dataclass
class IndexerCase:
    """One batch for the indexer; row r of request i sees `visible(i, r)` keys."""

    query: Tensor
    weights: Tensor
    key_cache: Tensor
    block_table: Tensor
    query_ends: Tensor
    key_lens: Tensor

    @staticmethod
    def random(
        shapes: list[tuple[int, int]],
        *,
        heads: int,
        dims: int,
        block_size: int,
        dtype: torch.dtype,
        seed: int,
        integers: bool = False,
    ) -> IndexerCase:
        """`shapes` are (rows, key length) per request; `integers` makes all sums exact, with many ties."""
        rng = generator(seed)
        rows = sum(q for q, _ in shapes)

        def draw(*shape: int) -> Tensor:
            if integers:
                return torch.randint(-2, 3, shape, generator=rng).to(dtype)
            return torch.randn(*shape, generator=rng).to(dtype)

        table, blocks = random_tables([length for _, length in shapes], block_size, rng)
        return IndexerCase(
            draw(rows, heads, dims),
            draw(rows, heads).float(),
            draw(blocks, block_size, 1, dims),
            table,
            torch.tensor([q for q, _ in shapes]).cumsum(0).int(),
            i32([length for _, length in shapes]),
        )

    def args(self) -> tuple[Tensor, ...]:
        return (self.query, self.weights, self.key_cache, self.block_table, self.query_ends, self.key_lens)

    def dense_scores(self) -> list[Tensor]:
        """float64 scores of every row over what it sees."""
        scores, start = [], 0
        for i, end in enumerate(self.query_ends.tolist()):
            length = int(self.key_lens[i])
            keys = (
                gather(self.key_cache, self.block_table[i], length).double() if length else torch.empty(0, 1).double()
            )
            for row in range(start, end):
                visible = max(length - (end - 1 - row), 0)
                if visible == 0:
                    scores.append(torch.empty(0, dtype=torch.float64))
                    continue
                products = torch.einsum("hd,sd->hs", self.query[row].double(), keys[:visible]).clamp(min=0)
                scores.append((self.weights[row].double()[:, None] * products).sum(0))
            start = end
        return scores


def dense_attention(
    q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, positions: list[int], scale: float
) -> Tensor:
    """float64 attention of one row [N, L] over the named positions of ckv [S, L], k_rope [S, R]."""
    if not positions:
        return torch.zeros_like(q_nope).double()
    keys = torch.cat([ckv, k_rope], dim=-1).double()[positions]
    scores = torch.cat([q_nope, q_rope], dim=-1).double() @ keys.T * scale
    return torch.softmax(scores, -1) @ ckv.double()[positions]


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
