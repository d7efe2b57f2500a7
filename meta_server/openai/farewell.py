"""Sends kept connections elsewhere while the server drains."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Farewell:
    """While `draining()`, every answer ends its connection (test_answers_of_a_draining_server_end_their_connection).

    Otherwise a client with kept connections would never learn that there is another server.
    """

    def __init__(self, app: ASGIApp, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def farewell(message: Message) -> None:
            if message["type"] == "http.response.start" and self._draining():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, farewell if scope["type"] == "http" else send)
