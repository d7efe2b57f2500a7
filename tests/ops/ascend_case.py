"""Decode steps of a few requests at the sizes Ascend demands, as the decode loop hands them to Copy-SFA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops import ResidencyState, lru_residency
from tests.ops.paged_case import generator, i32, random_tables

TOPK, BLOCK, LATENT, ROPE = 2048, 128, 512, 64
CONTEXTS = (2700, 90)  # one much longer than the hot buffer, one shorter than top-k

Allocate = Callable[[tuple[int, ...]], Tensor]


def zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@dataclass
class DecodeCase:
    """Requests with random main KV in host caches, and hot caches of the same; `rows` new tokens per request and step.

    A request's hot row is `capacity` slots that residency manages, then one block of tail.
    """

    dram_k_rope: Tensor
    dram_kv_cache: Tensor
    hbm_k_rope: Tensor
    hbm_kv_cache: Tensor
    dram_block_table: Tensor
    hbm_block_table: Tensor
    rng: torch.Generator
    heads: int
    rows: int

    @property
    def stride(self) -> int:
        return self.hbm_block_table.shape[1] * BLOCK

    @property
    def capacity(self) -> int:
        return self.stride - BLOCK

    @staticmethod
    def random(
        heads: int, rows: int = 1, seed: int = 0, host: Allocate = zeros, device: Allocate = zeros
    ) -> DecodeCase:
        """`host` and `device` make bfloat16 tensors of a shape there."""
        rng, hot = generator(seed), rows * TOPK + 2 * BLOCK
        dram_table, dram_blocks = random_tables([n + 16 for n in CONTEXTS], BLOCK, rng)
        hbm_table, hbm_blocks = random_tables([hot] * len(CONTEXTS), BLOCK, rng)
        case = DecodeCase(
            host((dram_blocks, BLOCK, ROPE)),
            host((dram_blocks, BLOCK, LATENT)),
            device((hbm_blocks, BLOCK, 1, ROPE)),
            device((hbm_blocks, BLOCK, 1, LATENT)),
            dram_table,
            hbm_table,
            rng,
            heads,
            rows,
        )
        for cache in (case.dram_k_rope, case.dram_kv_cache):
            cache.copy_(torch.randn(cache.shape, generator=rng))
        for cache in (case.hbm_k_rope, case.hbm_kv_cache):
            cache.fill_(float("nan"))  # what is attended to without having been copied shows
        return case

    def steps(self, count: int) -> Iterator[dict[str, Tensor | float]]:
        """The arguments of each step; the caller makes the copies before it asks for the next one."""
        requests, total = len(CONTEXTS), len(CONTEXTS) * self.rows
        state, lengths = ResidencyState.empty(requests, self.capacity), list(CONTEXTS)
        ends, stride = torch.arange(1, requests + 1).int() * self.rows, i32([self.stride] * requests)
        for _ in range(count):
            ids = torch.full((total, TOPK), -1, dtype=torch.int32)
            for row in range(total):
                i, new = divmod(row, self.rows)
                position = lengths[i] + new
                self._write_tail(i, new, position)
                chosen = torch.randperm(position, generator=self.rng)[: TOPK - 1].tolist()
                ids[row, : len(chosen) + 1] = i32([*chosen, position])
            found = lru_residency(
                *(ids, i32(lengths), torch.arange(requests) + 5, torch.arange(requests).int(), state),
                query_ends=ends,
            )
            yield {
                "query_rope": torch.randn(total, self.heads, ROPE, generator=self.rng).bfloat16(),
                "query": torch.randn(total, self.heads, LATENT, generator=self.rng).bfloat16(),
                "actual_seq_lengths_query": ends,
                "actual_seq_lengths_kv": stride,
                "num_cache_tokens": stride,
                "topk_dst_slots": found.slots.unsqueeze(1),
                "topk_src_ids": ids.unsqueeze(1),
                "topk_miss_counts": torch.zeros(total, dtype=torch.int32),
                "miss_src_ids": found.miss_ids,
                "miss_dst_slots": found.miss_slots,
                "miss_counts": found.miss_counts,
                "hbm_block_table": self.hbm_block_table,
                "dram_block_table": self.dram_block_table,
                "hbm_k_rope": self.hbm_k_rope,
                "hbm_kv_cache": self.hbm_kv_cache,
                "dram_k_rope": self.dram_k_rope,
                "dram_kv_cache": self.dram_kv_cache,
                "scale_value": (LATENT + ROPE) ** -0.5,
                "attention_out": torch.full((total, self.heads, LATENT), 1234.0).bfloat16(),
            }
            lengths = [length + self.rows for length in lengths]

    def _write_tail(self, request: int, new: int, position: int) -> None:
        """A new token's row: in the host cache since before, now also in its slot of the tail."""
        block, offset = int(self.dram_block_table[request, position // BLOCK]), position % BLOCK
        tail = int(self.hbm_block_table[request, self.capacity // BLOCK])
        for hbm, dram in ((self.hbm_k_rope, self.dram_k_rope), (self.hbm_kv_cache, self.dram_kv_cache)):
            hbm[tail, new, 0] = dram[block, offset]


def with_clones(arguments: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
    """`arguments` with what the operator writes copied."""
    written = ("hbm_k_rope", "hbm_kv_cache", "attention_out")
    return {name: value.clone() if name in written else value for name, value in arguments.items()}  # type: ignore[union-attr]
