"""The whole meta server: one event loop with a gRPC server, an HTTP server and the watch over the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from sluice.v1 import client_pb2_grpc, registry_pb2_grpc

from engine.config import SluiceConfig
from engine.config_check import max_model_len
from engine.credentials import Credentials
from engine.model.config import ModelConfig
from engine.tokenizer import Tokenizer
from engine.worker import GRPC_OPTIONS
from meta_server.frontend import Frontend
from meta_server.http_server import HttpServer
from meta_server.metrics import Metrics
from meta_server.openai.app import create_app
from meta_server.registry import Registry
from meta_server.request import RunTerms
from meta_server.service import REGISTRY_SERVICE, SLUICE_SERVICE, RegistryService, SluiceService
from meta_server.validation import RequestValidator

log = logging.getLogger(__name__)
_WATCH_PERIOD_S = 0.1
_GRPC_GRACE_S = 1.0
_NOTICE_S = 5.0
"""How long clients may still come to a server that is not ready any more: kube-proxy and others learn of it late."""


class MetaServer:
    """Start and stop of everything the process serves.

    Invariant: "" and SluiceService are SERVING exactly while requests can be served: a complete prefill and a complete
    decode group are ready, and no stop has begun (test_health_follows_the_groups). RegistryService is SERVING from the
    start to the stop, because workers need it before anything is ready.
    """

    def __init__(self, config: SluiceConfig) -> None:
        """Reads the model's config and tokenizer, certificates and keys.

        Raises ModelConfigError, TokenizerError, ConfigError.
        """
        self._credentials = Credentials.of(config.security)
        model = ModelConfig.from_dir(config.model.path)
        tokenizer = Tokenizer.from_dir(config.model.path)
        if tokenizer is None:
            log.warning("%s has no tokenizer.json: only token-id prompts are served", config.model.path)
        validator = RequestValidator(config.model_name, model, max_model_len(config, model), tokenizer)
        self._config = config
        self.registry = Registry(config.runtime.lost_after_s)
        runtime = config.runtime
        terms = RunTerms(runtime.request_timeout_s, runtime.max_reruns, runtime.rerun_patience_s)
        self.frontend = Frontend(
            validator, self.registry, Metrics(self.registry), terms, trust=self._credentials.as_worker
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._grpc = grpc.aio.server(options=GRPC_OPTIONS, interceptors=self._credentials.interceptors)
        self._http: HttpServer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._shown_ready: bool | None = None
        self.grpc_port = 0
        self.http_port = 0

    async def start(self) -> None:
        """Listens on both ports. Raises OSError naming the field when one is taken."""
        client_pb2_grpc.add_SluiceServiceServicer_to_server(SluiceService(self.frontend), self._grpc)
        registry = RegistryService(self.registry, self._config.runtime.heartbeat_s)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = [SLUICE_SERVICE, REGISTRY_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._grpc)
        await self._show_health()
        await self._health.set(REGISTRY_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        host, port = self._config.grpc.host, self._config.grpc.port
        try:
            self.grpc_port = self._credentials.listen(self._grpc, f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"grpc.host = {host}, grpc.port = {port}: cannot listen: {error}") from error
        app = create_app(self.frontend, self._credentials.clients)
        self._http = HttpServer(app, self._config.http.host, self._config.http.port, self._config.security)
        self.http_port = self._http.port
        await self._grpc.start()
        self._http.start()
        self._watch = asyncio.create_task(self._watch_workers(), name="watch")

    async def drain(self) -> None:
        """NOT_SERVING; goes on serving for `runtime.drain_s` at most: until load balancers have noticed, and then until
        no request is running (test_a_draining_server_ends_its_requests). With 0 it does not wait.

        New HTTP connections are refused after the first of these times. gRPC ones are not: workers' heartbeats come
        on them, too.
        """
        patience = self._config.runtime.drain_s
        deadline = time.monotonic() + patience
        self.frontend.drain()
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(min(_NOTICE_S, patience))
        if self._http is not None and patience:
            self._closing = asyncio.create_task(self._http.stop(patience), name="close http")
        while self.frontend.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_WATCH_PERIOD_S)

    async def stop(self) -> None:
        """NOT_SERVING, running requests end with an error, connections close. Takes at most about 4 s."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        stopped = asyncio.create_task(self.frontend.shutdown())
        await self._health.enter_graceful_shutdown()
        await stopped
        if self._http is not None:
            await self._http.stop()
        await self._grpc.stop(_GRPC_GRACE_S)

    async def _watch_workers(self) -> None:
        while True:
            for worker_id in self.registry.sweep():
                log.warning("%s is lost: no heartbeat for %g s", worker_id, self._config.runtime.lost_after_s)
            await self.frontend.channels.forget(self.registry.live())
            await self._show_health()
            await asyncio.sleep(_WATCH_PERIOD_S)

    async def _show_health(self) -> None:
        if self.frontend.ready == self._shown_ready:
            return
        self._shown_ready = self.frontend.ready
        state = health_pb2.HealthCheckResponse
        status = state.SERVING if self._shown_ready else state.NOT_SERVING
        for name in ("", SLUICE_SERVICE):
            await self._health.set(name, status)
        log.info("ready" if self._shown_ready else "not ready")
