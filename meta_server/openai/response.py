"""An HTTP answer that lives exactly as long as its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from meta_server.answers import Answers
from meta_server.errors import RequestFailed
from meta_server.openai.errors import error_body, error_response

Json = Mapping[str, Any]


class Renderer(Protocol):
    """How an endpoint shows answers."""

    async def whole(self, answers: Answers) -> Json:
        """The body of an answer that is not streamed. Raises RequestFailed."""

    def chunks(self, answers: Answers) -> AsyncIterator[Json]:
        """The chunks of a streamed answer. Raises RequestFailed, perhaps after some chunks."""


class GenerationResponse(Response):
    """Starts the requests, answers, and ends them when the client goes away (test_disconnect_cancels_the_request).

    A streamed answer that fails before its first chunk is a plain error with its status; later, the error is the
    last event before `[DONE]`, which ends every stream.
    """

    def __init__(self, answers: Answers, renderer: Renderer, stream: bool) -> None:
        super().__init__()
        self._answers = answers
        self._renderer = renderer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._answers:
                if self._stream:
                    await self._send_stream(send)
                    return
                response: Response = JSONResponse(await self._renderer.whole(self._answers))
        except RequestFailed as error:
            response = error_response(error.failure)
        await response(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        """Raises RequestFailed while nothing has been sent."""
        started = False
        try:
            async for chunk in self._renderer.chunks(self._answers):
                if not started:
                    await send(_STREAM_START)
                    started = True
                await send(_event(json.dumps(chunk, ensure_ascii=False, allow_nan=False)))
        except RequestFailed as error:
            if not started:
                raise
            await send(_event(json.dumps(error_body(error.failure))))
        await send(_event("[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


def _event(data: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
