"""What LIM and LIM C8 share: their arguments, the checks of these, and the way to the back ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.ops import native, reference_lim
from engine.ops.backends import current_backend
from engine.ops.checks import FLOAT_DTYPES, check_index_batch, check_positive, check_tensor

NO_SLOT = torch.iinfo(torch.int32).min
"""Entry of ``cache_slots_pool`` for a position that is not in the hot buffer."""

SCHEMA = (
    "Tensor index_weights, Tensor query_dequant_scale, Tensor query, "
    "Tensor index_key_dequant_scale, Tensor index_key_cache, Tensor index_block_table, "
    "Tensor actual_seq_lengths_query, Tensor actual_seq_lengths_key, Tensor offload_seq_lengths_key, "
    "Tensor num_cache_tokens, Tensor request_state, Tensor req_pool_entries, Tensor(a!) cache_slots_pool, "
    "Tensor(b!) topk_src_ids, Tensor(c!) topk_dst_slots, Tensor(d!) topk_miss_counts, Tensor(e!) miss_src_ids, "
    "Tensor(f!) miss_dst_slots, Tensor(g!) miss_counts, Tensor(h!)? topk_scores=None"
)


class LimCall(NamedTuple):
    """One call; the fields are the arguments of ``fused_lightning_indexer_manage``."""

    index_weights: Tensor
    query_dequant_scale: Tensor
    query: Tensor
    index_key_dequant_scale: Tensor
    index_key_cache: Tensor
    index_block_table: Tensor
    actual_seq_lengths_query: Tensor
    actual_seq_lengths_key: Tensor
    offload_seq_lengths_key: Tensor
    num_cache_tokens: Tensor
    request_state: Tensor
    req_pool_entries: Tensor
    cache_slots_pool: Tensor
    topk_src_ids: Tensor
    topk_dst_slots: Tensor
    topk_miss_counts: Tensor
    miss_src_ids: Tensor
    miss_dst_slots: Tensor
    miss_counts: Tensor
    topk_scores: Tensor | None = None

    @staticmethod
    def of(arguments: Sequence[Tensor | None]) -> LimCall:
        """From the operator's positional arguments; the last may be left out."""
        return LimCall(*cast("list[Tensor]", arguments))

    def run(self, *, quantised: bool) -> None:
        """Check the arguments and run the current back end. Raises ValueError."""
        self._check(quantised)
        query_scale = self.query_dequant_scale if quantised else None
        key_scale = self.index_key_dequant_scale if quantised else None
        if current_backend() == "reference":
            reference_lim.fused_lightning_indexer_manage(self, query_scale, key_scale)
            return
        rows, heads, dims = self.query.shape
        blocks, block_size = self.index_key_cache.shape[:2]
        native.call(
            "lightning_indexer_manage",
            {
                "weights": self.index_weights,
                "query_scale": query_scale,
                "query": self.query,
                "key_scale": key_scale,
                "key_cache": self.index_key_cache,
                "block_table": self.index_block_table,
                "query_ends": self.actual_seq_lengths_query,
                "key_lens": self.actual_seq_lengths_key,
                "stable_lens": self.offload_seq_lengths_key,
                "cache_tokens": self.num_cache_tokens,
                "states": self.request_state,
                "pool_entries": self.req_pool_entries,
                "slots_pool": self.cache_slots_pool,
                "topk_src_ids": self.topk_src_ids,
                "topk_dst_slots": self.topk_dst_slots,
                "topk_miss_counts": self.topk_miss_counts,
                "miss_src_ids": self.miss_src_ids,
                "miss_dst_slots": self.miss_dst_slots,
                "miss_counts": self.miss_counts,
                "topk_scores": self.topk_scores,
                "rows": rows,
                "heads": heads,
                "dims": dims,
                "requests": self.index_block_table.shape[0],
                "blocks": blocks,
                "block_size": block_size,
                "max_blocks": self.index_block_table.shape[1],
                "topk": self.topk_src_ids.shape[2],
                "pool_rows": self.cache_slots_pool.shape[0],
                "pool_width": self.cache_slots_pool.shape[1],
                "miss_capacity": self.miss_src_ids.shape[1],
                "dtype": native.dtype_code(self.query),
                "weights_dtype": native.dtype_code(self.index_weights),
            },
        )

    def _check(self, quantised: bool) -> None:
        scale_dtype, name = (torch.float16, "fp16") if quantised else (torch.float32, "fp32")
        scales = {
            "query_dequant_scale": self.query_dequant_scale,
            "index_key_dequant_scale": self.index_key_dequant_scale,
        }
        if any(scale.dtype != scale_dtype for scale in scales.values()):
            given = ", ".join(f"{argument} is {scale.dtype}" for argument, scale in scales.items())
            raise ValueError(f"dequant scales must be {name}; {given}")
        rows = check_index_batch(
            ("query", self.query),
            ("index_weights", self.index_weights),
            ("index_key_cache", self.index_key_cache),
            tuple(scales.items()),
            dtypes=torch.int8 if quantised else FLOAT_DTYPES,
            weight_dtypes=FLOAT_DTYPES if quantised else self.query.dtype,
            scale_dtype=scale_dtype,
        )
        check_tensor("index_block_table", self.index_block_table, (None, None), torch.int32)
        requests, max_blocks = self.index_block_table.shape
        for argument in (
            *("actual_seq_lengths_query", "actual_seq_lengths_key", "offload_seq_lengths_key", "num_cache_tokens"),
            *("request_state", "req_pool_entries", "miss_counts"),
        ):
            check_tensor(argument, getattr(self, argument), (requests,), torch.int32)
        block_size = self.index_key_cache.shape[1]
        check_tensor("cache_slots_pool", self.cache_slots_pool, (None, max_blocks * block_size), torch.int32)
        check_tensor("topk_src_ids", self.topk_src_ids, (rows, 1, None), torch.int32)
        topk = self.topk_src_ids.shape[2]
        check_positive("topk_src_ids.shape[2] (top-k)", topk)
        check_tensor("topk_dst_slots", self.topk_dst_slots, (rows, 1, topk), torch.int32)
        check_tensor("topk_miss_counts", self.topk_miss_counts, (rows,), torch.int32)
        try:
            check_tensor("miss_src_ids", self.miss_src_ids, (requests, None), torch.int32)
            check_tensor("miss_dst_slots", self.miss_dst_slots, tuple(self.miss_src_ids.shape), torch.int32)
        except ValueError as error:
            raise ValueError(f"miss outputs must be two like contiguous int32 lists per request: {error}") from None
        if self.topk_scores is not None:
            check_tensor("topk_scores", self.topk_scores, (rows, 1, topk), torch.float32)
