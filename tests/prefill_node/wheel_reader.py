"""The decode side of test_over_wheels.py, in a process of its own: real puller, engine and device memory.

`python -m tests.prefill_node.wheel_reader SLUICE_YAML`: waits for the prefill group, sends it prompts, pulls what it
publishes, compares every row with a dense model's, and prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch
from sluice.v1 import common_pb2, registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc

from decode_node.batch_reader import SOURCE_SCRATCH_BYTES
from decode_node.pull_plan import LayerMemory, TensorMemory
from decode_node.puller import Puller
from engine.config import SluiceConfig, load_config
from engine.device import Device
from tests.model.dense_backend import DenseBackend
from tests.model.runner import Runner
from tests.started_puller import started_puller
from transfer.memfabric import MemFabricEngine

PROMPTS = {"long": 300, "aligned": 64, "short": 37, "one": 1}
AGAIN = {f"{name} again": length for name, length in PROMPTS.items()}  # the same prompts, when the first have ended
LENGTHS = PROMPTS | AGAIN
BLOCKS = 64
TIMEOUT_S = 60.0


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self) -> None:
        self.workers: dict[str, registry_pb2.WorkerInfo] = {}

    async def Register(self, request: registry_pb2.RegisterRequest, context: object) -> registry_pb2.RegisterResponse:
        self.workers[request.info.worker_id] = request.info
        return registry_pb2.RegisterResponse(heartbeat_interval_ms=500)

    async def Heartbeat(
        self, request: registry_pb2.HeartbeatRequest, context: object
    ) -> registry_pb2.HeartbeatResponse:
        return registry_pb2.HeartbeatResponse(known=request.worker_id in self.workers)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: object) -> registry_pb2.LeaveResponse:
        return registry_pb2.LeaveResponse()


@dataclass
class Rank:
    """One decode TP rank's memory and puller. The main KV has a single copy, which all ranks fill together."""

    device: Device
    puller: Puller
    ended: dict[str, str | None] = field(default_factory=dict)


class Reader:
    def __init__(self, config: SluiceConfig, layout: registry_pb2.KvLayout) -> None:
        self.config, self.layout = config, layout
        self.runner = Runner(config.model.path)
        self.cached: dict[str, int] = {}
        shape = (BLOCKS, layout.block_size)
        host = Device(config.decode_device(0, 0, 0))
        self.ckv = [host.empty((*shape, layout.kv_lora_rank), torch.float32) for _ in range(layout.num_layers)]
        self.k_rope = [host.empty((*shape, layout.rope_dim), torch.float32) for _ in range(layout.num_layers)]
        self.keys: list[dict[int, torch.Tensor]] = []
        self.ranks = [self._rank(rank) for rank in range(config.decode.tp)]

    def _rank(self, tp_rank: int) -> Rank:
        config, layout = self.config, self.layout
        device = Device(config.decode_device(0, 0, tp_rank))
        shape = (BLOCKS, layout.block_size, layout.index_dim)
        keys = {layer: device.empty(shape, torch.float32) for layer in layout.indexer_layers}
        self.keys.append(keys)
        scratch = device.empty((64 * SOURCE_SCRATCH_BYTES,), torch.uint8)
        engine = MemFabricEngine(
            host="127.0.0.1", device_id=device.device_id, role="decode", protocol="sdma", store_url="tcp://127.0.0.1:0"
        )
        for tensor in (*self.ckv, *self.k_rope, *keys.values(), scratch):
            engine.register(tensor.data_ptr(), tensor.nbytes)
        ended: dict[str, str | None] = {}
        puller = started_puller(
            worker_id=f"decode-0/dp0/tp{tp_rank}",
            epoch=f"epoch-{tp_rank}",
            layout=layout,
            tp_rank=tp_rank,
            tp_size=config.decode.tp,
            memory=[
                LayerMemory(_memory(ckv), _memory(k_rope), _memory(keys[layer]) if layer in keys else None)
                for layer, (ckv, k_rope) in enumerate(zip(self.ckv, self.k_rope, strict=True))
            ],
            engine=engine,
            scratch_address=scratch.data_ptr(),
            read_timeout_s=config.transfer.read_timeout_s,
            read_retries=config.transfer.read_retries,
            handshake_timeout_s=config.transfer.handshake_timeout_s,
            on_terminal=lambda request_id, generation, error: ended.__setitem__(request_id, error),
            on_quiescent=lambda request_id: None,
        )
        return Rank(device, puller, ended)

    async def prefill(self, stub: Any, name: str, prompt: list[int], blocks: list[int]) -> tuple[int, list[str | None]]:
        """The first token, and how the request ended on every rank."""
        for rank in self.ranks:
            rank.puller.expect(
                name,
                1,
                blocks,
                blocks,
                self.config.prefill.tp // self.config.decode.tp,
                wanted=range(len(blocks)),
                lease_s=30.0,
            )
        endpoints = [
            worker_pb2.ReadEndpoint(tp_rank=index, address=rank.puller.address, epoch=f"epoch-{index}")
            for index, rank in enumerate(self.ranks)
        ]
        response = await stub.Prefill(
            worker_pb2.PrefillRequest(
                request_id=name,
                prompt=prompt,
                sampling=common_pb2.SamplingParams(max_tokens=4),
                destination=worker_pb2.Destination(
                    request_id=name,
                    group="decode-0",
                    tp_size=len(endpoints),
                    endpoints=endpoints,
                    generation=1,
                    lease_ms=30_000,
                ),
            ),
            timeout=TIMEOUT_S,
        )
        deadline = time.monotonic() + 10.0
        while not all(name in rank.ended for rank in self.ranks) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        self.cached[name] = response.cached_tokens
        return response.first_token.id, [rank.ended.get(name, "not terminal") for rank in self.ranks]

    def worst_error(self, reference: DenseBackend, name: str, length: int, blocks: list[int]) -> float:
        """Largest difference of any pulled element from the dense model's."""
        worst = 0.0
        for layer in range(self.layout.num_layers):
            rows = torch.cat([self.ckv[layer][blocks], self.k_rope[layer][blocks]], dim=-1).flatten(0, 1)[:length]
            worst = max(worst, float((rows - reference._main[layer, name]).abs().max()))
            for keys in self.keys:
                pulled = keys[layer][blocks].flatten(0, 1)[:length]
                worst = max(worst, float((pulled - reference._index[layer, name]).abs().max()))
        return worst


def _memory(tensor: torch.Tensor) -> TensorMemory:
    return TensorMemory(tensor.data_ptr(), tensor[0].nbytes, tensor.shape[0])


async def _wait_ready(registry: Registry, ranks: int) -> list[registry_pb2.WorkerInfo]:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        ready = []
        for info in list(registry.workers.values()):
            async with grpc.aio.insecure_channel(info.grpc_address) as channel:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    status = await worker_pb2_grpc.WorkerServiceStub(channel).GetWorkerStatus(
                        worker_pb2.GetWorkerStatusRequest(), timeout=2
                    )
                    ready.extend([info] if status.status.ready else [])
        if len(ready) == ranks:
            return sorted(ready, key=lambda info: info.tp_rank)
    raise TimeoutError(f"only {sorted(registry.workers)} registered, not all became ready")


async def _main(config: SluiceConfig) -> dict[str, Any]:
    server, registry = grpc.aio.server(), Registry()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    server.add_insecure_port(f"{config.grpc.host}:{config.grpc.port}")
    await server.start()
    workers = await _wait_ready(registry, config.prefill.tp)
    reader = Reader(config, workers[0].layout)
    reference = DenseBackend(reader.runner.config)
    prompts, tables, expected, used = {}, {}, {}, 0
    for name, length in LENGTHS.items():
        seeded = torch.Generator().manual_seed(length)
        prompts[name] = torch.randint(2, 320, (length,), generator=seeded).tolist()
        count = -(-length // reader.layout.block_size)
        tables[name] = list(range(used, used + count))[::-1]
        used += count
        reference.begin([(name, length)])
        logits = reader.runner.decoder.forward(torch.tensor(prompts[name]), torch.arange(length), reference)
        expected[name] = int(logits[-1].argmax())
    async with grpc.aio.insecure_channel(workers[0].grpc_address) as channel:
        stub = worker_pb2_grpc.PrefillServiceStub(channel)
        answers = await asyncio.gather(*(reader.prefill(stub, name, prompts[name], tables[name]) for name in PROMPTS))
        answers += await asyncio.gather(*(reader.prefill(stub, name, prompts[name], tables[name]) for name in AGAIN))
        await asyncio.sleep(0.3)
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        status = (await worker.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=5)).status
    result = {
        name: {
            "token": token,
            "expected": expected[name],
            "ended": ended,
            "error": reader.worst_error(reference, name, LENGTHS[name], tables[name]),
            "cached": reader.cached[name],
        }
        for name, (token, ended) in zip(LENGTHS, answers, strict=True)
    }
    for rank in reader.ranks:
        rank.puller.close()
    await server.stop(0.1)
    return {
        "requests": result,
        "pools": {pool.name: [pool.used, pool.total] for pool in status.pools},
        "counters": dict(status.counters),
        "gauges": dict(status.gauges),
        "detail": status.detail,
        "leader": workers[0].grpc_address,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_main(load_config(sys.argv[1])))), flush=True)
