"""The indexers on Ascend: LIM and its int8 twin of vllm-ascend, the plain ones of torch_npu.

Arguments are those of ``engine.ops`` unless said otherwise, on one device, within ``AscendLimits``. Values are not read
on the host; the operators treat illegal ones as ``fused_lightning_indexer_manage`` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.ascend_limits import AscendLimits
from engine.ops.ascend_schemas import operator
from engine.ops.checks import check_layout
from engine.ops.lim_call import LimCall

_PER_TOKEN_AND_HEAD = 0  # the operators' only quantisation mode
_PER_REQUEST = (
    *("actual_seq_lengths_query", "actual_seq_lengths_key", "offload_seq_lengths_key", "num_cache_tokens"),
    *("request_state", "req_pool_entries", "miss_counts"),
)
_CAUSAL = 3  # sparse_mode: row t of a request sees the keys before it, right-aligned


def lightning_indexer(
    query: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
) -> Tensor:
    """``engine.ops.lightning_indexer`` by ``npu_lightning_indexer``.

    ``weights`` is rounded to the dtype of ``query``: the operator takes no other.
    """
    _check_paged(query, key_cache, block_table, query_ends, key_lens, topk, AscendLimits.DTYPES)
    check_layout("weights", weights, query.shape[:2], (torch.float32, *AscendLimits.DTYPES))
    check_same_device(query=query, weights=weights, key_cache=key_cache, block_table=block_table)
    ids, _ = operator("npu::npu_lightning_indexer")(
        query,
        key_cache,
        weights.to(query.dtype),
        actual_seq_lengths_query=query_ends,
        actual_seq_lengths_key=key_lens,
        block_table=block_table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=topk,
        sparse_mode=_CAUSAL,
    )
    return _rows(ids)


def quant_lightning_indexer(
    query: Tensor,
    weights: Tensor,
    query_scale: Tensor,
    key_cache: Tensor,
    key_scale: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
) -> Tensor:
    """``engine.ops.quant_lightning_indexer`` by ``npu_quant_lightning_indexer``.

    ``weights`` is rounded to float16: the operator takes no other. Which of two equal scores wins is not defined.
    """
    _check_paged(query, key_cache, block_table, query_ends, key_lens, topk, (torch.int8,))
    check_layout("query_scale", query_scale, query.shape[:2], torch.float16)
    check_layout("weights", weights, query.shape[:2], (torch.float32, *AscendLimits.DTYPES))
    check_layout("key_scale", key_scale, key_cache.shape[:3], torch.float16)
    check_same_device(query=query, weights=weights, key_cache=key_cache, key_scale=key_scale, block_table=block_table)
    ids = operator("npu::npu_quant_lightning_indexer")(
        query,
        key_cache,
        weights.to(torch.float16),
        query_scale,
        key_scale,
        _PER_TOKEN_AND_HEAD,
        _PER_TOKEN_AND_HEAD,
        actual_seq_lengths_query=query_ends,
        actual_seq_lengths_key=key_lens,
        block_table=block_table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=topk,
        sparse_mode=_CAUSAL,
    )
    return _rows(ids)


def fused_lightning_indexer_manage(*arguments: Tensor, **named: Tensor) -> None:
    """``engine.ops.fused_lightning_indexer_manage`` by ``npu_fused_lightning_indexer_manage``."""
    given = LimCall(*arguments, **named)
    check_layout("query", given.query, (None, None, None), AscendLimits.DTYPES)
    _check_manage(given, weights_dtype=given.query.dtype, scale_dtype=torch.float32)
    operator("_C_ascend::npu_fused_lightning_indexer_manage")(*given[:-1])


def fused_quant_lightning_indexer_manage(*arguments: Tensor, **named: Tensor) -> None:
    """``engine.ops.fused_quant_lightning_indexer_manage`` by ``npu_fused_quant_lightning_indexer_manage``.

    ``index_weights`` must be bfloat16.
    """
    given = LimCall(*arguments, **named)
    check_layout("query", given.query, (None, None, None), torch.int8)
    _check_manage(given, weights_dtype=torch.bfloat16, scale_dtype=torch.float16)
    operator("_C_ascend::npu_fused_quant_lightning_indexer_manage")(*given[:-1])


def check_same_device(**tensors: Tensor) -> None:
    """Raise ValueError unless all of ``tensors`` are on the device of the first."""
    (first, expected), *others = ((name, tensor.device) for name, tensor in tensors.items())
    for name, device in others:
        if device != expected:
            raise ValueError(f"{name} is on {device}; legal: the device of {first}, {expected}")


def _check_paged(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    topk: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    check_layout("query", query, (None, None, None), dtypes)
    check_layout("key_cache", key_cache, (None, None, 1, query.shape[2]), query.dtype)
    check_layout("block_table", block_table, (None, None), torch.int32)
    check_layout("query_ends", query_ends, (block_table.shape[0],), torch.int32)
    check_layout("key_lens", key_lens, (block_table.shape[0],), torch.int32)
    AscendLimits.check_indexer(
        heads=query.shape[1],
        dims=query.shape[2],
        block_size=key_cache.shape[1],
        max_blocks=block_table.shape[1],
        topk=topk,
        dtype=query.dtype,
    )


def _rows(ids: Tensor) -> Tensor:
    """[T, 1, topk], one list per key head, to [T, topk]."""
    return ids.squeeze(1)


def _check_manage(given: LimCall, *, weights_dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Check what LIM and its int8 twin have in common; ``given.query`` has three dimensions and the right dtype."""
    if given.topk_scores is not None:
        raise ValueError("topk_scores is given; legal on Ascend: None, the operator keeps its scores")
    rows, heads, dims = given.query.shape
    check_layout("index_weights", given.index_weights, (rows, heads), weights_dtype)
    check_layout("index_key_cache", given.index_key_cache, (None, None, 1, dims), given.query.dtype)
    blocks, block_size = given.index_key_cache.shape[:2]
    scales = given.query_dequant_scale, given.index_key_dequant_scale
    if any(scale.dtype != scale_dtype for scale in scales):
        wanted = "fp32" if scale_dtype == torch.float32 else "fp16"
        raise ValueError(
            f"dequant scales must be {wanted}; query_dequant_scale is {scales[0].dtype}, "
            f"index_key_dequant_scale {scales[1].dtype}"
        )
    check_layout("query_dequant_scale", scales[0], (rows, heads), scale_dtype)
    check_layout("index_key_dequant_scale", scales[1], (blocks, block_size, 1), scale_dtype)
    check_layout("index_block_table", given.index_block_table, (None, None), torch.int32)
    requests, max_blocks = given.index_block_table.shape
    for name in _PER_REQUEST:
        check_layout(name, getattr(given, name), (requests,), torch.int32)
    check_layout("cache_slots_pool", given.cache_slots_pool, (None, max_blocks * block_size), torch.int32)
    check_layout("topk_src_ids", given.topk_src_ids, (rows, 1, None), torch.int32)
    check_layout("topk_dst_slots", given.topk_dst_slots, given.topk_src_ids.shape, torch.int32)
    check_layout("topk_miss_counts", given.topk_miss_counts, (rows,), torch.int32)
    check_layout("miss_src_ids", given.miss_src_ids, (requests, None), torch.int32)
    check_layout("miss_dst_slots", given.miss_dst_slots, given.miss_src_ids.shape, torch.int32)
    check_same_device(**{name: tensor for name, tensor in given._asdict().items() if tensor is not None})
    AscendLimits.check_indexer_manage(
        rows=rows,
        requests=requests,
        heads=heads,
        dims=dims,
        block_size=block_size,
        max_blocks=max_blocks,
        topk=given.topk_src_ids.shape[2],
        miss_capacity=given.miss_src_ids.shape[1],
        dtype=given.query.dtype,
    )
