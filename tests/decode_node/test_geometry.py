"""Sizes of a decode rank, and what is refused at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode_node.geometry import DecodeGeometry, HotRows, plan_geometry
from decode_node.memory import DTYPES, DecodeMemory
from engine.config import ConfigError, build_config
from engine.device import ALIGNMENT
from engine.model.config import ModelConfig
from tests.checkpoints import tiny_config

LAYERS, KV_LORA, ROPE = 4, 48, 16  # of the tiny models


def geometry(
    block_size: int = 16, dtype: str = "float32", max_model_len: int | None = None, **decode: Any
) -> DecodeGeometry:
    tree = {
        "model": {"path": "unused", "dtype": dtype, "max_model_len": max_model_len},
        "kv": {"block_size": block_size},
        "decode": decode,
    }
    return plan_geometry(build_config(tree), ModelConfig.from_dict(tiny_config("glm_moe_dsa")))


def test_hot_rows_are_disjoint() -> None:
    hot = HotRows(rows=5, tokens=48, block_size=16)
    assert hot.stride == 64
    assert hot.blocks_per_row == 4
    assert [block for row in range(5) for block in hot.blocks(row)] == list(range(hot.num_blocks))
    with pytest.raises(IndexError, match="hot row 5 does not exist; legal: 0 to 4"):
        hot.blocks(5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_regions_tile_the_host_pool(dtype: str) -> None:
    g = geometry(dtype=dtype, host_pool_bytes=1_000_000)
    row = (KV_LORA + ROPE) * g.item_bytes
    assert g.num_blocks == 1_000_000 // (LAYERS * 16 * row)
    end = 0
    for region in g.regions():
        assert region.ckv == end
        assert region.k_rope == end + g.num_blocks * 16 * KV_LORA * g.item_bytes
        end = region.k_rope + g.num_blocks * 16 * ROPE * g.item_bytes
    assert end == g.host_pool_bytes <= 1_000_000


class _Pages:
    """A device and a host that only count: each device tensor takes whole pages."""

    address = 0
    device_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.device_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return tensor

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("indexer_dtype", ["model", "int8"])
def test_the_device_holds_what_the_geometry_says(dtype: str, indexer_dtype: str) -> None:
    g = replace(geometry(dtype=dtype, host_pool_bytes=40 << 20), indexer_dtype=indexer_dtype)
    pages = _Pages()
    memory = DecodeMemory(g, DTYPES[dtype], pages, pages)
    assert pages.device_bytes == g.device_bytes
    tensors = [tensor for indexer in memory.indexers.values() for tensor in indexer.tensors]
    assert sum(tensor.nbytes for tensor in tensors) == g.indexer_bytes
    hot = [*memory.hot_ckv, *memory.hot_k_rope]
    assert sum(tensor.nbytes for tensor in hot) == g.hot_bytes_per_request * g.hot.rows
    host = [*memory.host_ckv, *memory.host_k_rope]
    assert sum(tensor.nbytes for tensor in host) == g.host_block_bytes * g.num_blocks == g.host_pool_bytes


def test_a_small_pool_lowers_the_longest_request() -> None:
    block = LAYERS * 16 * (KV_LORA + ROPE) * 4
    assert geometry(host_pool_bytes=7 * block).max_request_tokens == 7 * 16
    assert geometry(host_pool_bytes=7 * block, max_model_len=100).max_request_tokens == 100
    assert geometry(host_pool_bytes=7 * block).max_blocks_per_request == 7
    assert geometry(host_pool_bytes=1 << 30).max_request_tokens == 5120  # the checkpoint's own limit


def test_a_pool_without_a_block_is_refused() -> None:
    block = LAYERS * 16 * (KV_LORA + ROPE) * 4
    with pytest.raises(ConfigError, match=f"decode.host_pool_bytes = {block - 1} holds no block.*takes {block} bytes"):
        geometry(host_pool_bytes=block - 1)


def test_a_hot_buffer_below_top_k_is_refused() -> None:
    assert geometry(block_size=24, hot_tokens=72).hot.tokens == 72
    with pytest.raises(ConfigError, match=r"decode.hot_tokens = 48 cannot hold the 64 .*kv.block_size = 24 from 72"):
        geometry(block_size=24, hot_tokens=48)
