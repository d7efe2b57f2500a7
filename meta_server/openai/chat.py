"""`POST /v1/chat/completions`: requests from a body, and the shape of the answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from sluice.v1 import common_pb2

from engine.sampling_params import MAX_LOGPROBS
from meta_server.answers import Answers
from meta_server.errors import invalid
from meta_server.frontend import Frontend
from meta_server.openai.logprobs import TokenNames, chat_logprobs
from meta_server.openai.prompts import plain_messages
from meta_server.openai.response import Json
from meta_server.openai.schema import ChatBody
from meta_server.openai.shapes import FINISH, Totals, choice_request_id
from meta_server.request import Done, GenerationRequest


async def chat_requests(frontend: Frontend, body: ChatBody, call_id: str) -> list[GenerationRequest]:
    """One request per choice; without a length the answer may fill the context. Raises RequestFailed."""
    validator = frontend.validator
    validator.check_model(body.model)
    body.check_supported()
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    fields = body.sampling(
        max_tokens=getattr(body, param), default_max_tokens=None, length_param=param, logprobs=_logprobs(body)
    )
    fields = replace(fields, names={"logprobs": "top_logprobs"})
    prompt = await validator.encode_chat(plain_messages(body.messages))
    requests = []
    for choice in range(body.choices):
        seed = None if fields.seed is None else (fields.seed + choice) % (1 << 64)
        request_id = choice_request_id(call_id, choice, body.choices)
        requests.append(
            validator.request(prompt, replace(fields, seed=seed), frontend.capacity(), request_id, "messages")
        )
    return requests


def _logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs", f"{body.top_logprobs} needs logprobs = true")
        return None
    count = body.top_logprobs or 0
    if not 0 <= count <= MAX_LOGPROBS:
        raise invalid("top_logprobs", f"is {count}; legal: 0 to {MAX_LOGPROBS}")
    return count


class ChatRenderer:
    """Choices hold an assistant message, or deltas of one."""

    def __init__(self, body: ChatBody, call_id: str, model: str, names: TokenNames) -> None:
        self._body = body
        self._names = names
        self._head = {"id": f"chatcmpl-{call_id}", "created": int(time.time()), "model": model}

    async def whole(self, answers: Answers) -> Json:
        totals = Totals()
        choices = []
        for index, answer in enumerate(await answers.collect()):
            totals.add(answer.end.usage, new_prompt=index == 0)
            message = {"role": "assistant", "content": answer.text}
            choices.append(self._choice(index, {"message": message}, answer.tokens, answer.end))
        whole = {**self._head, "object": "chat.completion", "choices": choices, "usage": totals.usage()}
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = list(answers.requests[0].prompt)
        return whole

    async def chunks(self, answers: Answers) -> AsyncIterator[Json]:
        totals = Totals()
        fresh = set(range(len(answers.requests)))
        async for index, event in answers.events():
            if index in fresh:
                fresh.discard(index)
                choice = self._choice(index, {"delta": {"role": "assistant", "content": ""}}, (), None)
                yield self._chunk([choice], None)
            delta = {"content": event.text} if event.text else {}
            if isinstance(event, Done):
                totals.add(event.usage, new_prompt=index == 0)
                yield self._chunk([self._choice(index, {"delta": delta}, (), event)], None)
            else:
                yield self._chunk([self._choice(index, {"delta": delta}, event.tokens, None)], None)
        if self._body.include_usage:
            yield self._chunk([], totals.usage())

    def _choice(
        self, index: int, content: Json, tokens: Sequence[common_pb2.Token], end: Done | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            **content,
            "logprobs": chat_logprobs(self._names, tokens) if self._body.logprobs and tokens else None,
            "finish_reason": None if end is None else FINISH[end.reason],
            "stop_reason": None if end is None else end.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        return choice

    def _chunk(self, choices: list[dict[str, Any]], usage: Json | None) -> Json:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": usage} if self._body.include_usage else chunk
