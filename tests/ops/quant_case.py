"""Random int8 inputs for the quantised indexers and their scores by the formula, summed in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.paged_case import gather, generator, i32, random_tables


@dataclass
class QuantCase:
    """One batch for the int8 indexer."""

    query: Tensor
    weights: Tensor
    query_scale: Tensor
    key_cache: Tensor
    key_scale: Tensor
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
        seed: int,
        exact: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantCase:
        """`shapes` are (rows, key length) per request; `exact` makes every sum exact in float32, with many ties."""
        rng = generator(seed)
        rows = sum(q for q, _ in shapes)
        table, blocks = random_tables([length for _, length in shapes], block_size, rng)
        most = 2 if exact else 127

        def values(*shape: int) -> Tensor:
            return torch.randint(-most, most + 1, shape, generator=rng, dtype=torch.int8)

        def scales(*shape: int) -> Tensor:
            if exact:
                return torch.exp2(torch.randint(-2, 1, shape, generator=rng).float()).half()
            return (torch.rand(shape, generator=rng) * 0.02 + 1e-3).half()

        weights = (
            torch.randint(-2, 3, (rows, heads), generator=rng) if exact else torch.randn(rows, heads, generator=rng)
        )
        return QuantCase(
            values(rows, heads, dims),
            weights.to(dtype),
            scales(rows, heads),
            values(blocks, block_size, 1, dims),
            scales(blocks, block_size, 1),
            table,
            torch.tensor([q for q, _ in shapes]).cumsum(0).int(),
            i32([length for _, length in shapes]),
        )

    def args(self) -> tuple[Tensor, ...]:
        return (
            *(self.query, self.weights, self.query_scale, self.key_cache, self.key_scale),
            *(self.block_table, self.query_ends, self.key_lens),
        )

    def dense_scores(self) -> list[Tensor]:
        """float64 scores of every row over what it sees."""
        scores, start = [], 0
        for i, end in enumerate(self.query_ends.tolist()):
            length = int(self.key_lens[i])
            keys = gather(self.key_cache, self.block_table[i], length)
            key_scale = gather(self.key_scale, self.block_table[i], length)[:, 0]
            for row in range(start, end):
                visible = max(length - (end - 1 - row), 0)
                products = (self.query[row].long() @ keys[:visible].long().T).clamp(min=0)
                steps = (products.double() / 1024).half().double()
                weights = (self.weights[row].double() * self.query_scale[row].double()).half().double()
                scores.append((weights @ steps) * key_scale[:visible].double())
            start = end
        return scores
