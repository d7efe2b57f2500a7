"""A random batch for Copy-SFA, with every argument under its name."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import fused_scatter_copy_sparse_flash_attention
from tests.ops.paged_case import generator, i32, random_tables


def caches(blocks: int, block: int, dims: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.randn(blocks, block, dims, generator=rng).to(dtype)


def copy_case(
    *,
    rows: list[int],
    contexts: list[int],
    hot_lens: list[int],
    cache_tokens: list[int],
    topk: int,
    heads: int = 4,
    latent: int = 16,
    rope: int = 8,
    block: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor | float]:
    """`rows` query rows, `contexts` host positions, `hot_lens` logical hot slots per request; nothing is selected."""
    rng = generator(seed)
    total, requests = sum(rows), len(rows)
    dram_table, dram_blocks = random_tables(contexts, block, rng)
    hbm_table, hbm_blocks = random_tables(hot_lens, block, rng)
    capacity = topk * max(rows)
    return {
        "query_rope": torch.randn(total, heads, rope, generator=rng).to(dtype),
        "query": torch.randn(total, heads, latent, generator=rng).to(dtype),
        "actual_seq_lengths_query": torch.tensor(rows).cumsum(0).int(),
        "actual_seq_lengths_kv": i32(hot_lens),
        "num_cache_tokens": i32(cache_tokens),
        "topk_dst_slots": torch.full((total, 1, topk), -1, dtype=torch.int32),
        "topk_src_ids": torch.full((total, 1, topk), -1, dtype=torch.int32),
        "topk_miss_counts": torch.zeros(total, dtype=torch.int32),
        "miss_src_ids": torch.full((requests, capacity), -1, dtype=torch.int32),
        "miss_dst_slots": torch.full((requests, capacity), -1, dtype=torch.int32),
        "miss_counts": torch.zeros(requests, dtype=torch.int32),
        "hbm_block_table": hbm_table,
        "dram_block_table": dram_table,
        "hbm_k_rope": caches(hbm_blocks, block, rope, dtype, rng).unsqueeze(2),
        "hbm_kv_cache": caches(hbm_blocks, block, latent, dtype, rng).unsqueeze(2),
        "dram_k_rope": caches(dram_blocks, block, rope, dtype, rng),
        "dram_kv_cache": caches(dram_blocks, block, latent, dtype, rng),
        "scale_value": (latent + rope) ** -0.5,
        "attention_out": torch.full((total, heads, latent), 1234.0).to(dtype),
    }


def run(case: dict[str, Tensor | float]) -> int:
    """Runs the operator in place; returns the bytes it copied."""
    copied = torch.full((1,), -1, dtype=torch.int64)
    fused_scatter_copy_sparse_flash_attention(**case, copied_bytes=copied)
    return int(copied)
