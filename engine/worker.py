"""What every worker process serves and does besides computing: health, status, registration, heartbeats, clean stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from sluice.v1 import common_pb2, registry_pb2, worker_pb2, worker_pb2_grpc

from engine.config import SluiceConfig
from engine.credentials import Credentials
from engine.registration import Member, Registration

log = logging.getLogger(__name__)
WORKER_SERVICE = "sluice.v1.WorkerService"
_STARTUP_SLACK_S = 1.0  # what knows more about why a start takes too long speaks first
MAX_MESSAGE_BYTES = 64 << 20  # a prompt of 1M token ids is about 3 MiB on the wire
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)


class _WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    async def GetWorkerStatus(
        self, request: worker_pb2.GetWorkerStatusRequest, context: object
    ) -> worker_pb2.GetWorkerStatusResponse:
        return worker_pb2.GetWorkerStatusResponse(info=self._process.info, status=self._process.status())


class WorkerProcess:
    """One worker process towards the rest of the deployment.

    Health is NOT_SERVING for "" and for every service until `set_ready`, and again from the moment a stop begins
    (test_not_serving_until_ready). The process stays registered: when the meta server does not know it (it was
    restarted), it registers again (`engine/registration.py`). A refused registration ends the process, because it can
    never serve. So does a start that takes too long (test_a_start_that_hangs_ends_the_process): the wheels may wait
    without end for peers that died.
    """

    def __init__(
        self,
        config: SluiceConfig,
        info: registry_pb2.WorkerInfo,
        status: Callable[[], common_pb2.WorkerStatus],
        port: int = 0,
    ) -> None:
        """`info.grpc_address` is filled in by `start`. `status` is called on the event loop and must not block.

        `port`: where it listens on `runtime.host`; 0 = a free one. Raises ConfigError: what `security` names cannot be
        used.
        """
        self.config = config
        self.info = info
        self._status = status
        self._port = port
        self._ready = False
        self._stop = asyncio.Event()
        self.failure: str | None = None  # why the process ends with status 1
        self._credentials = Credentials.of(config.security)
        self._server = grpc.aio.server(options=GRPC_OPTIONS, interceptors=self._credentials.interceptors)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._services: list[str] = ["", WORKER_SERVICE]
        member = Member(info, self.status, self.fail, config.runtime.heartbeat_s)
        self._registration = Registration(config.grpc.host, config.grpc.port, member, self._credentials.as_worker)
        self._too_late: asyncio.TimerHandle | None = None

    def status(self) -> common_pb2.WorkerStatus:
        status = self._status()
        status.ready = self._ready and not self._stop.is_set()
        return status

    async def start(self, add_services: Callable[[grpc.aio.Server], Sequence[str]] | None = None) -> None:
        """Listens and begins to register. `add_services` adds servicers, returns their full names.

        Raises OSError naming the field when the port is taken.
        """
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_WorkerService(self), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if add_services is not None:
            self._services.extend(add_services(self._server))
        names = [*self._services[1:], health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        host = self.config.runtime.host
        try:
            port = self._credentials.listen(self._server, f"{host}:{self._port}")
        except RuntimeError as error:
            raise OSError(
                f"runtime.host = {host}, port {self._port} (from grpc.worker_port): cannot listen: {error}"
            ) from error
        self.info.grpc_address = f"{host}:{port}"
        await self._server.start()
        self._watch_signals()
        self._registration.start()
        patience = self.config.runtime.startup_timeout_s + _STARTUP_SLACK_S
        self._too_late = asyncio.get_running_loop().call_later(patience, self._give_up_starting)

    async def set_ready(self) -> None:
        """Called once, when requests can be served."""
        if self._too_late is not None:
            self._too_late.cancel()
        self._watch_signals()  # again: MemCache's client sets its own handlers when it joins the pool
        self._ready = True
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def fail(self, reason: str) -> None:
        """Ends the process with exit status 1. May be called from any thread through `loop.call_soon_threadsafe`."""
        if self.failure is None:
            self.failure = reason
            log.error("%s: %s", self.info.worker_id, reason)
        self._stop.set()

    async def run(self) -> int:
        """Waits for SIGTERM, SIGINT or `fail`; then it is NOT_SERVING, and the meta servers know it. Returns the exit
        status."""
        await self._stop.wait()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._registration.tell()
        return 0 if self.failure is None else 1

    async def stop(self, grace_s: float = 2.0) -> None:
        """Leaves the registry and closes the server; running calls get `grace_s` seconds."""
        if self._too_late is not None:
            self._too_late.cancel()
        await self._registration.leave()
        await self._server.stop(grace_s)

    def _give_up_starting(self) -> None:
        detail = self._status().detail
        self.fail(f"not ready within runtime.startup_timeout_s = {self.config.runtime.startup_timeout_s:g}: {detail}")

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _set_health(self, status: int) -> None:
        for name in self._services:
            await self._health.set(name, status)
