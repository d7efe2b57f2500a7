"""A decode rank next to a prefill rig in one process: real publisher, sockets and puller; reads as slow as asked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from sluice.v1 import wire_pb2, worker_pb2
from torch import Tensor

from decode_node.batch_reader import SOURCE_SCRATCH_BYTES
from decode_node.pull_plan import LayerMemory, TensorMemory
from prefill_node.link import Endpoint, SourceInfo
from prefill_node.publisher import Publisher
from tests.kv_peers import LocalEngine, eventually
from tests.started_puller import started_puller
from transfer.layout import kv_layout

BLOCKS = 96
EPOCH = "decode-epoch"
KINDS = ("ckv", "k_rope", "indexer")


class PullingReader:
    """Takes the place of `SlowReader`. A read begins up to `delay_s` after its announcement, at random by `seed`."""

    failure: str | None = None

    def __init__(self, rig: Any, *, delay_s: float, seed: int) -> None:
        config, geometry = rig.config, rig.buffers.geometry
        layout = kv_layout(
            fingerprint="model",
            dtype="float32",
            block_size=geometry.block_size,
            num_layers=config.num_layers,
            kv_lora_rank=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
            index_dim=config.index_head_dim,
            indexer_layers=config.indexer_layers,
            protocol="sdma",
        )
        self._block_size, self._random, self._delay_s = geometry.block_size, random.Random(seed), delay_s
        widths = dict(zip(KINDS, (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim), strict=True))
        shape = (BLOCKS, geometry.block_size)
        self._memory = [
            {kind: torch.full((*shape, width), float("nan")) for kind, width in widths.items()}
            for _ in range(config.num_layers)
        ]
        self._blocks: dict[str, list[int]] = {}
        self._ended: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._engine = LocalEngine()
        self._engine.before_read = self._wait
        self._scratch = torch.zeros(8 * SOURCE_SCRATCH_BYTES, dtype=torch.uint8)
        self.puller = started_puller(
            epoch=EPOCH,
            layout=layout,
            memory=[
                LayerMemory(
                    _memory(layer["ckv"]),
                    _memory(layer["k_rope"]),
                    _memory(layer["indexer"]) if index in config.indexer_layers else None,
                )
                for index, layer in enumerate(self._memory)
            ],
            engine=self._engine,
            scratch_address=self._scratch.data_ptr(),
            on_terminal=lambda request_id, generation, error: self._ended.__setitem__(request_id, error),
            on_quiescent=lambda request_id: None,
            max_sources=8,
        )
        self.publisher = Publisher(
            SourceInfo(
                worker_id="prefill-0/tp0",
                epoch="prefill-epoch",
                session_id="session",
                tp_rank=0,
                tp_size=1,
                layout=layout,
                layers=rig.buffers.layouts(),
                generation_address=rig.words.address,
            ),
            rig.gate,
            rig.words,
            lease_s=20.0,
            handshake_timeout_s=5.0,
            on_request_error=lambda request_id, text: rig.request_errors.put((request_id, text)),
        )
        self.publisher.start()

    def destination(self, request_id: str, tokens: int, cached_tokens: int) -> worker_pb2.Destination:
        """Decode's side of a new request: its blocks wait to be filled."""
        used = sum(len(blocks) for blocks in self._blocks.values())
        count = -(-tokens // self._block_size)
        self._blocks[request_id] = list(range(used, used + count))[::-1]
        blocks = self._blocks[request_id]
        self.puller.expect(request_id, 1, blocks, blocks, 1, wanted=range(count), lease_s=20.0)
        endpoint = worker_pb2.ReadEndpoint(tp_rank=0, address=self.puller.address, epoch=EPOCH)
        return worker_pb2.Destination(
            request_id=request_id, group="decode-0", tp_size=1, endpoints=[endpoint], generation=1, lease_ms=20_000
        )

    def connect(self, destination: worker_pb2.Destination) -> Endpoint:
        return self.publisher.connect(destination)

    def drop(self, request_id: str) -> None:
        self.publisher.drop(request_id)

    def publish(
        self,
        layer: int,
        slot: int,
        endpoint: Endpoint,
        entries: Sequence[wire_pb2.ReadEntry],
        finished: Sequence[str] = (),
    ) -> int | None:
        return self.publisher.publish(layer, slot, endpoint, entries, finished)

    def ended(self, request_id: str) -> str | None:
        """Waits until decode has all of the request; why it has not, None if it has."""
        eventually(lambda: request_id in self._ended)
        return self._ended[request_id]

    def pulled(self, layer: int, request_id: str, kind: str, tokens: int) -> Tensor:
        """[tokens, width] of what decode has."""
        return self._memory[layer][kind][self._blocks[request_id]].flatten(0, 1)[:tokens]

    def close(self) -> None:
        self.publisher.close()
        self.puller.close()

    def _wait(self, session: str, sizes: Sequence[int]) -> None:
        if 8 not in sizes:  # not the generation word, which is read at once after the rows
            with self._lock:
                delay_s = self._random.uniform(0, self._delay_s)
            time.sleep(delay_s)


def _memory(tensor: Tensor) -> TensorMemory:
    return TensorMemory(tensor.data_ptr(), tensor[0].nbytes, tensor.shape[0])
