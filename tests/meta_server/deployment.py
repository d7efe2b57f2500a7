"""A meta server with fake workers, asked over real HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from sluice.v1 import client_pb2, client_pb2_grpc, common_pb2

from engine.config import build_config
from meta_server.server import MetaServer
from tests.meta_server.fakes import FakeWorker, worker_info

MODEL_DIR = Path(__file__).resolve().parents[2] / "benchmarks" / "models" / "passkey-glm"


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for one in lists for item in one]


class Deployment:
    """`decode` and `prefill` are the first fake worker of each role, once added."""

    decode: FakeWorker
    prefill: FakeWorker

    def __init__(self, server: MetaServer) -> None:
        self.server = server
        self.workers: list[FakeWorker] = []
        self._stopped = False
        self.address = f"127.0.0.1:{server.grpc_port}"
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=20.0)
        self.channel = grpc.aio.insecure_channel(self.address)
        self.client = client_pb2_grpc.SluiceServiceStub(self.channel)

    async def add(self, role: str, **changes: Any) -> FakeWorker:
        worker = await FakeWorker(worker_info(role, **changes), self.address).start()
        self.workers.append(worker)
        if not hasattr(self, role):
            setattr(self, role, worker)
        return worker

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": [5, 6, 7], **body})

    async def post_json(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Sends pure ASCII, so that a body may hold half a surrogate pair."""
        headers = {"content-type": "application/json"}
        return await self.http.post(path, content=json.dumps(body).encode(), headers=headers)

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, which must end with [DONE]."""
        chunks: list[dict[str, Any]] = []
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            chunks.append(json.loads(line.removeprefix("data: ")))
        return chunks

    def generate(self, ids: list[int], max_tokens: int = 4, request_id: str = "", **sampling: Any) -> Any:
        """The gRPC call of one request."""
        return self.client.Generate(
            client_pb2.GenerateRequest(
                tokens=client_pb2.TokenIds(ids=ids),
                sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
                request_id=request_id,
            )
        )

    @property
    def in_flight(self) -> int:
        return self.server.frontend.in_flight

    def idle(self) -> bool:
        """Nothing of any request is left, neither here nor on the workers."""
        router = self.server.frontend.router
        replicas = [*self.server.registry.replicas(1), *self.server.registry.replicas(2)]
        return (
            self.in_flight == 0
            and all(router.load(replica.key).requests == 0 for replica in replicas)
            and all(worker.decode.open == 0 and worker.prefill.open == 0 for worker in self.workers)
        )

    async def stop(self) -> None:
        """Stops the meta server, once."""
        if not self._stopped:
            self._stopped = True
            await self.server.stop()

    async def close(self) -> None:
        await self.http.aclose()
        await self.channel.close()
        await self.stop()
        for worker in self.workers:
            await worker.die()


@asynccontextmanager
async def deployed(
    *, workers: bool = True, model_dir: Path = MODEL_DIR, lost_after_s: float = 5.0, **runtime: Any
) -> AsyncIterator[Deployment]:
    """A running meta server on free ports, with one prefill and one decode worker unless `workers` is false."""
    config = build_config(
        {
            "model": {"path": str(model_dir), "name": "passkey", "max_model_len": 4096},
            "http": {"port": 0},
            "grpc": {"port": 0},
            "runtime": {"lost_after_s": lost_after_s, "heartbeat_s": 0.2, "max_reruns": 0, **runtime},
        }
    )
    server = MetaServer(config)
    await server.start()
    deployment = Deployment(server)
    try:
        if workers:
            await deployment.add("prefill")
            await deployment.add("decode")
        yield deployment
    finally:
        await deployment.close()
