"""The answers to one call of a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from sluice.v1 import common_pb2

from meta_server.errors import Failure, RequestFailed
from meta_server.frontend import Frontend
from meta_server.lifecycle import Generation
from meta_server.request import Done, Event, GenerationRequest, TokenChunk


@dataclass(frozen=True)
class Answer:
    """A whole answer: all tokens, all text, how it ended."""

    request: GenerationRequest
    tokens: tuple[common_pb2.Token, ...]
    text: str
    end: Done


class Answers:
    """One or more requests that start and end together.

    Entering starts them (RequestFailed when one cannot be admitted, and then none is started); leaving ends those
    that still run and waits for them, so a client that goes away leaves nothing behind
    (test_disconnect_cancels_the_request).
    """

    def __init__(self, frontend: Frontend, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        self._frontend = frontend
        self._generations: list[Generation] = []
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def __aenter__(self) -> Answers:
        self._frontend.admit(self.requests)
        for index, request in enumerate(self.requests):

            def emit(event: Event, index: int = index) -> None:
                self._events.put_nowait((index, event))

            self._generations.append(self._frontend.start(request, emit))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generation in self._generations:
            generation.abort()
        for generation in self._generations:
            await generation.closed()

    async def events(self) -> AsyncIterator[tuple[int, TokenChunk | Done]]:
        """(index of the request, event) until every request has sent its Done.

        Raises:
            RequestFailed: as soon as one request fails; the others end when the answers are left.
        """
        open_requests = len(self.requests)
        while open_requests:
            index, event = await self._events.get()
            if isinstance(event, Failure):
                raise RequestFailed(event)
            open_requests -= isinstance(event, Done)
            yield index, event

    async def collect(self) -> list[Answer]:
        """Waits for all answers; in the order of the requests. Raises RequestFailed like `events`."""
        tokens: list[list[common_pb2.Token]] = [[] for _ in self.requests]
        texts = [""] * len(self.requests)
        ends: list[Done | None] = [None] * len(self.requests)
        async for index, event in self.events():
            texts[index] += event.text
            if isinstance(event, Done):
                ends[index] = event
            else:
                tokens[index].extend(event.tokens)
        return [
            Answer(request, tuple(made), text, end)
            for request, made, text, end in zip(self.requests, tokens, texts, ends, strict=True)
            if end is not None
        ]
