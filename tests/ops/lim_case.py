"""A random batch for the fused indexer, with every argument under its name."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import NO_SLOT, fused_lightning_indexer_manage, fused_quant_lightning_indexer_manage
from tests.ops.paged_case import IndexerCase, generator, i32
from tests.ops.quant_case import QuantCase

TOPK, BLOCK, POISON = 8, 4, 12345


def lim_case(
    requests: list[tuple[int, int, int, int, int]],
    *,
    width_blocks: int = 32,
    pool_rows: int = 6,
    topk: int = TOPK,
    heads: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """`requests` are (rows, keys, L, C, state); request i has pool row `pool_rows - 1 - i`. Outputs are poisoned."""
    base = IndexerCase.random(
        [(q, keys) for q, keys, *_ in requests],
        heads=heads,
        dims=5,
        block_size=BLOCK,
        dtype=dtype,
        seed=seed,
        integers=True,
    )
    rows, count = base.query.shape[0], len(requests)
    capacity = max(c for *_, c, _ in requests) + topk * max(q for q, *_ in requests)
    table = torch.full((count, width_blocks), -1, dtype=torch.int32)
    table[:, : base.block_table.shape[1]] = base.block_table

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, POISON, dtype=torch.int32)

    return {
        "index_weights": base.weights.to(dtype),
        "query_dequant_scale": torch.ones(rows, heads),
        "query": base.query,
        "index_key_dequant_scale": torch.ones(base.key_cache.shape[0], BLOCK, 1),
        "index_key_cache": base.key_cache,
        "index_block_table": table,
        "actual_seq_lengths_query": base.query_ends,
        "actual_seq_lengths_key": base.key_lens,
        "offload_seq_lengths_key": i32([stable for _, _, stable, *_ in requests]),
        "num_cache_tokens": i32([c for *_, c, _ in requests]),
        "request_state": i32([state for *_, state in requests]),
        "req_pool_entries": i32([pool_rows - 1 - i for i in range(count)]),
        "cache_slots_pool": torch.full((pool_rows, width_blocks * BLOCK), NO_SLOT, dtype=torch.int32),
        "topk_src_ids": poisoned(rows, 1, topk),
        "topk_dst_slots": poisoned(rows, 1, topk),
        "topk_miss_counts": poisoned(rows),
        "miss_src_ids": poisoned(count, capacity),
        "miss_dst_slots": poisoned(count, capacity),
        "miss_counts": poisoned(count),
    }


def cloned(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in case.items()}


def quantised(case: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The case with int8 queries and keys, and scales; all scores are still exact in float32, with ties."""
    rng = generator(seed)

    def values(like: Tensor) -> Tensor:
        return torch.randint(-2, 3, like.shape, generator=rng, dtype=torch.int8)

    def scales(like: Tensor) -> Tensor:
        return torch.exp2(torch.randint(-2, 1, like.shape, generator=rng).float()).half()

    return {
        **case,
        "query": values(case["query"]),
        "query_dequant_scale": scales(case["query_dequant_scale"]),
        "index_key_cache": values(case["index_key_cache"]),
        "index_key_dequant_scale": scales(case["index_key_dequant_scale"]),
    }


def run(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runs the operator of the case's dtype on a copy of it and returns the copy."""
    after = cloned(case)
    quant = case["query"].dtype == torch.int8
    (fused_quant_lightning_indexer_manage if quant else fused_lightning_indexer_manage)(*after.values())
    return after


def dense_scores(case: dict[str, Tensor]) -> list[Tensor]:
    """float64 scores of every row over all keys its causal position lets it see."""
    if case["query"].dtype == torch.int8:
        return QuantCase(
            *(case["query"], case["index_weights"], case["query_dequant_scale"]),
            *(case["index_key_cache"], case["index_key_dequant_scale"], case["index_block_table"]),
            *(case["actual_seq_lengths_query"], case["actual_seq_lengths_key"]),
        ).dense_scores()
    return IndexerCase(
        case["query"],
        case["index_weights"],
        case["index_key_cache"],
        case["index_block_table"],
        case["actual_seq_lengths_query"],
        case["actual_seq_lengths_key"],
    ).dense_scores()


def spans(case: dict[str, Tensor]) -> list[range]:
    ends = case["actual_seq_lengths_query"].tolist()
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
