"""Ascend's operators on CPU tensors, as strict as their documentation: what they leave undefined is an error here.

For processes without torch_npu and vllm-ascend. torch_npu's schemas are the stored ones, which another test compares
with the wheel; those of the fused operators are written down here from the operators' reference, argument by argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from engine.ops import fused_lightning_indexer_manage
from engine.ops.ascend_schemas import NPU_SCHEMAS

TOPK, BLOCK = 2048, 128

MANAGE = (
    *("index_weights", "query_dequant_scale", "query", "index_key_dequant_scale", "index_key_cache"),
    *("index_block_table", "actual_seq_lengths_query", "actual_seq_lengths_key", "offload_seq_lengths_key"),
    *("num_cache_tokens", "request_state", "req_pool_entries", "cache_slots_pool", "topk_src_ids", "topk_dst_slots"),
    *("topk_miss_counts", "miss_src_ids", "miss_dst_slots", "miss_counts"),
)
COPY_SFA = (
    *("query_rope", "query", "actual_seq_lengths_query", "actual_seq_lengths_kv", "num_cache_tokens"),
    *("topk_dst_slots", "topk_src_ids", "topk_miss_counts", "miss_src_ids", "miss_dst_slots", "miss_counts"),
    *("hbm_block_table", "dram_block_table", "hbm_k_rope", "hbm_kv_cache", "dram_k_rope", "dram_kv_cache"),
    *("scale_value", "attention_out"),
)

calls: list[tuple[str, dict[str, Any]]] = []
"""What the fused operators were given, by argument name; tests clear it."""


@cache
def install() -> list[Library]:
    """Register the operators, for as long as the process lives."""
    npu, fused = Library("npu", "DEF"), Library("_C_ascend", "DEF")
    kernels: dict[str, Callable[..., Any]] = {
        "npu_lightning_indexer": lightning_indexer,
        "npu_quant_lightning_indexer": quant_lightning_indexer,
        "npu_sparse_flash_attention": sparse_flash_attention,
        "npu_scatter_nd_update_": scatter,
        "npu_interleave_rope": interleave_rope,
        "npu_rotary_mul": rotary_mul,
        "npu_rms_norm": rms_norm,
        "npu_dynamic_quant": dynamic_quant,
        "npu_kv_rmsnorm_rope_cache": kv_rmsnorm_rope_cache,
    }
    for schema in NPU_SCHEMAS:
        npu.define(schema.removeprefix("npu::"))
    for name, kernel in kernels.items():
        npu.impl(name, kernel, "CPU")
    for name, arguments, kernel in (
        ("npu_fused_lightning_indexer_manage", MANAGE, manage),
        ("npu_fused_quant_lightning_indexer_manage", MANAGE, noted_only),
        ("npu_fused_scatter_copy_sparse_flash_attention", COPY_SFA, copy_sfa),
    ):
        types = ", ".join(f"{'float' if argument == 'scale_value' else 'Tensor'} {argument}" for argument in arguments)
        fused.define(f"{name}({types}) -> ()")
        fused.impl(name, noted(name, arguments, kernel), "CPU")
        fused.impl(name, lambda *_: None, "Meta")
    return [npu, fused]


def noted(name: str, arguments: tuple[str, ...], kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*values: Any) -> None:
        given = dict(zip(arguments, values, strict=True))
        calls.append((name, given))
        kernel(**given)

    return run


def noted_only(**_: Tensor) -> None:
    """The int8 LIM: only what it is given is of interest."""


def manage(**given: Tensor) -> None:
    fused_lightning_indexer_manage(**given)


def rows_of(query_ends: Tensor) -> list[tuple[int, int, int]]:
    """(row, request, rows of the request that follow it)."""
    ends = query_ends.tolist()
    spans = zip([0, *ends], ends, strict=False)
    return [(row, i, end - 1 - row) for i, (begin, end) in enumerate(spans) for row in range(begin, end)]


def flat_rows(cache: Tensor, table_row: Tensor, positions: Tensor) -> Tensor:
    blocks = table_row[positions // BLOCK].long()
    return cache.reshape(-1, cache.shape[-1])[blocks * BLOCK + positions % BLOCK]


def select(scores: Callable[[int, int, Tensor], Tensor], options: dict[str, Any]) -> Tensor:
    """Rows of top-k of `scores(row, request, positions)` among the visible positions, padded with -1."""
    layout = options["layout_query"], options["layout_key"], options["sparse_mode"]
    assert layout == ("TND", "PA_BSND", 3)
    ends, lens = options["actual_seq_lengths_query"], options["actual_seq_lengths_key"]
    ids = torch.full((int(ends[-1]), 1, options["sparse_count"]), -1, dtype=torch.int32)
    for row, request, behind in rows_of(ends):
        visible = torch.arange(max(int(lens[request]) - behind, 0))
        order = torch.sort(scores(row, request, visible), descending=True, stable=True).indices
        order = order[: options["sparse_count"]]
        ids[row, 0, : len(order)] = order.int()
    return ids


def lightning_indexer(query: Tensor, key: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    assert query.dtype == key.dtype == weights.dtype in (torch.bfloat16, torch.float16)

    def scores(row: int, request: int, positions: Tensor) -> Tensor:
        keys = flat_rows(key, options["block_table"][request], positions).double()
        return weights[row].double() @ (query[row].double() @ keys.T).relu()

    return select(scores, _with_defaults(options)), query.new_empty(0)


def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    **options: Any,
) -> Tensor:
    assert query.dtype == key.dtype == torch.int8 and (query_quant_mode, key_quant_mode) == (0, 0)
    assert {weights.dtype, query_dequant_scale.dtype, key_dequant_scale.dtype} == {torch.float16}
    assert key_dequant_scale.shape == key.shape[:3]

    def scores(row: int, request: int, positions: Tensor) -> Tensor:
        table = options["block_table"][request]
        keys = flat_rows(key, table, positions).double()
        key_scale = flat_rows(key_dequant_scale, table, positions).squeeze(1).double()
        products = (query[row].double() @ keys.T).relu() / 1024
        return (weights[row] * query_dequant_scale[row]).double() @ products * key_scale

    return select(scores, _with_defaults(options))


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    return {"sparse_count": TOPK, "sparse_mode": 3, **options}


def attend(q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, scale: float) -> Tensor:
    if len(ckv) == 0:
        return torch.zeros_like(q_nope)
    scores = (q_nope.double() @ ckv.double().T + q_rope.double() @ k_rope.double().T) * scale
    return (scores.softmax(-1) @ ckv.double()).to(q_nope.dtype)


def selected(row: Tensor) -> Tensor:
    """The valid entries of a row of selections: all before any padding, none twice."""
    count = int((row >= 0).sum())
    assert bool((row[:count] >= 0).all()), "padding stands before a selected entry"
    assert len(row[:count].unique()) == count, "an entry is selected twice"
    return row[:count]


def sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    assert value.data_ptr() == key.data_ptr() and options["attention_mode"] == 2
    assert (options["layout_query"], options["layout_kv"], options.get("sparse_block_size", 1)) == ("TND", "PA_BSND", 1)
    out = torch.zeros_like(query)
    ends, lens = options["actual_seq_lengths_query"], options["actual_seq_lengths_kv"]
    for row, request, behind in rows_of(ends):
        ids = selected(sparse_indices[row, 0])
        visible = int(lens[request]) - (behind if options.get("sparse_mode", 3) == 3 else 0)
        assert bool((ids < visible).all()), "a selected entry lies behind what the row sees"
        table = options["block_table"][request]
        ckv, k_rope = flat_rows(key, table, ids), flat_rows(options["key_rope"], table, ids)
        out[row] = attend(query[row], options["query_rope"][row], ckv, k_rope, scale_value)
    return out, query.new_empty(0), query.new_empty(0)


def copy_sfa(**given: Any) -> None:
    """Rows run at once: what a row does not copy itself, it reads as it was before the call (steady path)."""
    assert given["miss_src_ids"].shape[1] == given["miss_dst_slots"].shape[1] == 32768
    assert given["query"].shape[1] in (8, 16, 32, 64, 128)
    caches = [(given["hbm_kv_cache"], given["dram_kv_cache"]), (given["hbm_k_rope"], given["dram_k_rope"])]
    fills = bool((given["miss_counts"] >= given["num_cache_tokens"]).any())
    if fills:
        for i, count in enumerate(given["miss_counts"].tolist()):
            _copy(given, i, given["miss_src_ids"][i, :count], given["miss_dst_slots"][i, :count], caches)
    before = [hbm.clone() for hbm, _ in caches]
    for row, i, behind in rows_of(given["actual_seq_lengths_query"]):
        if given["actual_seq_lengths_kv"][i] == 0:
            given["attention_out"][row] = 0  # inactive
            continue
        kept, visible = int(given["num_cache_tokens"][i]), int(given["actual_seq_lengths_kv"][i]) - behind
        assert kept == 0 or TOPK <= kept <= visible, "the row would attend to nothing"
        dst = selected(given["topk_dst_slots"][row, 0]) if kept else torch.empty(0, dtype=torch.int32)
        misses = 0 if fills else int(given["topk_miss_counts"][row])
        src = given["topk_src_ids"][row, 0, :misses]
        assert bool((dst < visible).all()), "a selected slot lies behind what the row sees"
        slots = torch.cat([dst[misses:], torch.arange(kept, visible, dtype=torch.int32)])
        parts = []
        for (_, dram), hbm in zip(caches, before, strict=True):
            fetched = flat_rows(dram, given["dram_block_table"][i], src)
            parts.append(torch.cat([fetched, flat_rows(hbm, given["hbm_block_table"][i], slots)]))
        query = given["query"][row], given["query_rope"][row]
        given["attention_out"][row] = attend(*query, *parts, given["scale_value"])
        _copy(given, i, src, dst[:misses], caches)


def _copy(given: dict[str, Any], request: int, src: Tensor, dst: Tensor, caches: list[tuple[Tensor, Tensor]]) -> None:
    assert bool((src >= 0).all() and (dst >= 0).all()), "an active entry is negative"
    slots = given["hbm_block_table"][request][dst // BLOCK].long() * BLOCK + dst % BLOCK
    for hbm, dram in caches:
        hbm.view(-1, hbm.shape[-1])[slots] = flat_rows(dram, given["dram_block_table"][request], src)


def scatter(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    input[indices.squeeze(1)] = updates
    return input


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotary_mul(pairs, cos, sin)


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    first, second = input.chunk(2, -1)
    return input * r1 + torch.cat([-second, first], -1) * r2


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    scale = (input.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (input.float() * scale).to(input.dtype) * gamma, scale


def dynamic_quant(input: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    scale = input.float().abs().amax(-1) / 127
    return (input.float() / scale.unsqueeze(-1)).round().to(torch.int8), scale


def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert cache_mode == "PA"
    latent = gamma.shape[0]
    ckv, _ = rms_norm(kv[..., :latent], gamma, epsilon)
    k_rope = interleave_rope(kv[..., latent:], cos, sin)
    scatter(ckv_cache.view(-1, latent), index.view(-1, 1), ckv.view(-1, latent))
    scatter(k_cache.view(-1, k_rope.shape[-1]), index.view(-1, 1), k_rope.reshape(-1, k_rope.shape[-1]))
    return k_cache, ckv_cache, k_rope, ckv
