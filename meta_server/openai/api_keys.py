"""Serves the OpenAI API to those who have a key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.credentials import Keys
from meta_server.openai.errors import unauthorized

_OPEN = ("/health", "/metrics")
"""For load balancers and Prometheus."""


class ApiKeys:
    """Answers 401 to requests without a valid key, before anything of them is read.

    `/health` and `/metrics` need none (test_nothing_is_served_without_a_key).
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            refusal = self._keys.refusal(Headers(scope=scope).get("authorization"))
            app = app if refusal is None else unauthorized(refusal)
        await app(scope, receive, send)
