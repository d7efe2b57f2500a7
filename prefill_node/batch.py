"""A step's chunks as the packed tensors that the model and the operators take."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.block_table import block_table, slot_mapping
from prefill_node.steps import Chunk, StepPlan


@dataclass(frozen=True)
class StepBatch:
    """T tokens of B chunks, packed chunk after chunk in the step's order; S of the chunks end their prompt.

    Nothing is padded: T is the number of real tokens (test_no_padding_is_computed). Nothing is sorted either, so row i
    of the logits of `last_rows` belongs to `ending[i]` (test_answers_come_back_in_the_order_of_the_requests).
    """

    chunks: tuple[Chunk, ...]
    packed_input_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [B + 1] int32: chunk i is rows [cu_seqlens[i], cu_seqlens[i + 1])
    positions: Tensor  # [T] int64, within each request
    key_lens: Tensor  # [B] int32, KV length seen by each chunk's last token
    last_rows: Tensor  # [S] int64, rows whose logits are wanted: the last token of each prompt that ends
    main_slots: Tensor  # [T] int64, block * block_size + offset, where each token's main KV goes
    indexer_slots: Tensor  # [T] int64
    main_table: Tensor  # [B, W] int32, blocks of positions [0, end), padded with 0
    indexer_table: Tensor  # [B, W] int32

    @property
    def query_ends(self) -> Tensor:
        """[B] int32, where each chunk's rows end, as the operators take it."""
        return self.cu_seqlens[1:]

    @property
    def ending(self) -> tuple[Chunk, ...]:
        """The chunks that end their prompt, in the order of `last_rows`."""
        return tuple(chunk for chunk in self.chunks if chunk.is_last)


def pack(plan: StepPlan, block_size: int) -> StepBatch:
    """Lays out a step's tokens."""
    chunks = plan.chunks
    positions = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
    ends = list(itertools.accumulate(len(chunk.tokens) for chunk in chunks))

    def slots(kind: str) -> Tensor:
        return torch.cat(
            [slot_mapping(getattr(c, kind), where, block_size) for c, where in zip(chunks, positions, strict=True)]
        )

    def table(kind: str) -> Tensor:
        return block_table([getattr(c, kind)[: c.written_blocks(block_size).stop] for c in chunks])

    return StepBatch(
        chunks=chunks,
        packed_input_ids=torch.tensor([token for chunk in chunks for token in chunk.tokens]),
        cu_seqlens=torch.tensor([0, *ends], dtype=torch.int32),
        positions=torch.cat(positions),
        key_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32),
        last_rows=torch.tensor([end - 1 for end, c in zip(ends, chunks, strict=True) if c.is_last]).long(),
        main_slots=slots("main_blocks"),
        indexer_slots=slots("indexer_blocks"),
        main_table=table("main_blocks"),
        indexer_table=table("indexer_blocks"),
    )
