"""Uvicorn inside our own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from engine.security_section import SecuritySection

_GRACE_S = 2  # how long a stop waits for open answers


class _Server(uvicorn.Server):
    """Leaves the signals of the process to `main`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Listens as soon as it is made, so that a taken port is an error at start (OSError naming host and port)."""

    def __init__(self, app: FastAPI, host: str, port: int, security: SecuritySection) -> None:
        """`port` 0 picks a free one. Serves TLS if `security` names a certificate."""
        try:
            self._socket = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise OSError(f"http.host = {host}, http.port = {port}: cannot listen: {error.strerror}") from error
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=75,
            ssl_certfile=security.certificate,
            ssl_keyfile=security.private_key,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """Takes no new connection, waits up to `grace_s` for open answers, closes."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task})
        self._socket.close()
