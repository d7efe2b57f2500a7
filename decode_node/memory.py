"""The tensors of one decode rank: the shared host pool, and the indexer caches and hot buffers on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from decode_node.geometry import DecodeGeometry
from decode_node.pull_plan import LayerMemory, TensorMemory
from engine.indexer_cache import IndexerCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HostMemory(Protocol):
    """Host memory that all TP ranks of the DP rank address (transfer.host_pool.HostPool)."""

    @property
    def address(self) -> int: ...

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The bytes from `offset` on as a contiguous CPU tensor."""


class DeviceMemory(Protocol):
    """The rank's device (engine.device.Device)."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


class DecodeMemory:
    """Where this rank's KV lies. L kv_lora_rank, R rope_dim, D index_dim, bs block_size, all in the model's dtype.

    host_ckv[layer]    [blocks, bs, L]         host pool, every token of every request, shared by the TP ranks
    host_k_rope[layer] [blocks, bs, R]
    indexers[layer]    [blocks, bs, 1, D]      device, only layers which own an indexer; perhaps int8 with scales
    hot_ckv[layer]     [hot blocks, bs, 1, L]  device, laid out by `geometry.hot`
    hot_k_rope[layer]  [hot blocks, bs, 1, R]
    """

    def __init__(self, geometry: DecodeGeometry, dtype: torch.dtype, device: DeviceMemory, host: HostMemory) -> None:
        """Allocates the device's part and lays tensors over `host`, of at least `geometry.host_pool_bytes` bytes.

        Raises:
            DeviceOutOfMemory: (transfer.hostcann.runtime) the device cannot hold the caches.
        """
        g = geometry
        self.geometry = g
        self._host_address = host.address
        hot_blocks = g.hot.num_blocks
        self.host_ckv: list[Tensor] = []
        self.host_k_rope: list[Tensor] = []
        for region in g.regions():
            self.host_ckv.append(host.tensor(region.ckv, (g.num_blocks, g.block_size, g.kv_lora_rank), dtype))
            self.host_k_rope.append(host.tensor(region.k_rope, (g.num_blocks, g.block_size, g.rope_dim), dtype))
        self.indexers = {layer: _indexer_cache(g, dtype, device) for layer in g.indexer_layers}
        layers = range(g.num_layers)
        self.hot_ckv = [device.empty((hot_blocks, g.block_size, 1, g.kv_lora_rank), dtype) for _ in layers]
        self.hot_k_rope = [device.empty((hot_blocks, g.block_size, 1, g.rope_dim), dtype) for _ in layers]

    def pull_targets(self) -> list[LayerMemory]:
        """By layer, where pulled blocks go."""
        g = self.geometry
        targets = []
        for layer, region in enumerate(g.regions()):
            indexer = self.indexers.get(layer)
            targets.append(
                LayerMemory(
                    ckv=TensorMemory(self._host_address + region.ckv, g.ckv_block_bytes, g.num_blocks),
                    k_rope=TensorMemory(self._host_address + region.k_rope, g.k_rope_block_bytes, g.num_blocks),
                    indexer_key=_pull_target(indexer.keys if indexer else None),
                    indexer_scale=_pull_target(indexer.scales if indexer else None),
                )
            )
        return targets


def _indexer_cache(g: DecodeGeometry, dtype: torch.dtype, device: DeviceMemory) -> IndexerCache:
    blocks = (g.num_blocks, g.block_size)
    if g.indexer_dtype == "int8":
        return IndexerCache(
            device.empty((*blocks, 1, g.index_dim), torch.int8), device.empty((*blocks, 1), torch.float16)
        )
    return IndexerCache(device.empty((*blocks, 1, g.index_dim), dtype))


def _pull_target(tensor: Tensor | None) -> TensorMemory | None:
    return None if tensor is None else TensorMemory(tensor.data_ptr(), tensor[0].nbytes, tensor.shape[0])


class RowTables:
    """Block tables of the requests, by hot row: written as requests get blocks, read in every step.

    Invariant (test_row_tables_keep_other_rows): binding or extending a row changes no other row.
    """

    def __init__(self, geometry: DecodeGeometry) -> None:
        width = geometry.max_blocks_per_request
        self.main = torch.zeros(geometry.hot.rows, width, dtype=torch.int32)
        self.indexer = torch.zeros(geometry.hot.rows, width, dtype=torch.int32)
        hot = [list(geometry.hot.blocks(row)) for row in range(geometry.hot.rows)]
        self.hot = torch.tensor(hot, dtype=torch.int32)  # [rows, blocks_per_row]

    def bind(self, row: int, main_blocks: Sequence[int], indexer_blocks: Sequence[int]) -> None:
        """Row `row` now belongs to a request with these blocks, in position order."""
        self.main[row].zero_()
        self.indexer[row].zero_()
        self.extend(row, 0, main_blocks, indexer_blocks)

    def extend(self, row: int, start: int, main_blocks: Sequence[int], indexer_blocks: Sequence[int]) -> None:
        """The request of row `row` has these blocks from its `start`-th on."""
        for table, blocks in ((self.main, main_blocks), (self.indexer, indexer_blocks)):
            table[row, start : start + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
