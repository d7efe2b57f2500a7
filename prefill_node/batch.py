"""A step's chunks as the packed tensors that the model and the operators take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.block_table import block_table, slot_mapping
from prefill_node.steps import Chunk, StepPlan


@dataclass(frozen=True)
class StepBatch:
    """T tokens of B chunks, packed chunk after chunk; S of the chunks end their prompt."""

    chunks: tuple[Chunk, ...]
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, within each request
    query_ends: Tensor  # [B] int32, cumulative
    key_lens: Tensor  # [B] int32, KV length seen by each chunk's last token
    last_rows: Tensor  # [S] int64, rows whose logits are wanted: the last token of each prompt that ends
    main_slots: Tensor  # [T] int64, block * block_size + offset, where each token's main KV goes
    indexer_slots: Tensor  # [T] int64
    main_table: Tensor  # [B, W] int32, blocks of positions [0, end), padded with 0
    indexer_table: Tensor  # [B, W] int32

    @property
    def ending(self) -> tuple[Chunk, ...]:
        """The chunks that end their prompt, in the order of `last_rows`."""
        return tuple(chunk for chunk in self.chunks if chunk.is_last)


def pack(plan: StepPlan, block_size: int) -> StepBatch:
    """Lays out a step's tokens."""
    chunks = plan.chunks
    positions = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
    ends = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0)

    def slots(kind: str) -> Tensor:
        return torch.cat(
            [slot_mapping(getattr(c, kind), where, block_size) for c, where in zip(chunks, positions, strict=True)]
        )

    def table(kind: str) -> Tensor:
        return block_table([getattr(c, kind)[: c.written_blocks(block_size).stop] for c in chunks])

    return StepBatch(
        chunks=chunks,
        token_ids=torch.tensor([token for chunk in chunks for token in chunk.tokens]),
        positions=torch.cat(positions),
        query_ends=ends.to(torch.int32),
        key_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32),
        last_rows=torch.tensor([int(end) - 1 for end, c in zip(ends, chunks, strict=True) if c.is_last]).long(),
        main_slots=slots("main_blocks"),
        indexer_slots=slots("indexer_blocks"),
        main_table=table("main_blocks"),
        indexer_table=table("indexer_blocks"),
    )
