"""`POST /v1/completions`: requests from a body, and the shape of the answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from sluice.v1 import common_pb2

from meta_server.answers import Answers
from meta_server.frontend import Frontend
from meta_server.openai.logprobs import TokenNames, completion_logprobs
from meta_server.openai.prompts import prompts_of
from meta_server.openai.response import Json
from meta_server.openai.schema import CompletionBody
from meta_server.openai.shapes import FINISH, Totals, choice_request_id
from meta_server.request import Done, GenerationRequest

DEFAULT_MAX_TOKENS = 16


async def completion_requests(frontend: Frontend, body: CompletionBody, call_id: str) -> list[GenerationRequest]:
    """One request per prompt and choice, in the order of the answer's choices. Raises RequestFailed."""
    validator, capacity = frontend.validator, frontend.capacity()
    validator.check_model(body.model)
    body.check_supported()
    fields = body.sampling(
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        length_param="max_tokens",
        logprobs=body.logprobs,
    )
    requests: list[GenerationRequest] = []
    prompts = prompts_of(body.prompt)
    total = len(prompts) * body.choices
    for prompt in prompts:
        ids = await validator.encode(prompt) if isinstance(prompt, str) else prompt
        for choice in range(body.choices):
            seed = None if fields.seed is None else (fields.seed + choice) % (1 << 64)
            request_id = choice_request_id(call_id, len(requests), total)
            requests.append(validator.request(ids, replace(fields, seed=seed), capacity, request_id))
    return requests


class CompletionRenderer:
    """Choices hold text, finish reason and, when asked for, token ids and log-probabilities."""

    def __init__(self, body: CompletionBody, call_id: str, model: str, names: TokenNames) -> None:
        self._body = body
        self._names = names
        self._head = {"id": f"cmpl-{call_id}", "object": "text_completion", "created": int(time.time()), "model": model}

    async def whole(self, answers: Answers) -> Json:
        totals = Totals()
        choices = []
        for index, answer in enumerate(await answers.collect()):
            totals.add(answer.end.usage, new_prompt=index % self._body.choices == 0)
            choice = self._choice(index, answer.text, answer.end)
            if self._body.logprobs is not None:
                choice["logprobs"] = completion_logprobs(self._names, answer.tokens, 0)
            if self._body.return_token_ids:
                choice["token_ids"] = [token.id for token in answer.tokens]
                choice["prompt_token_ids"] = list(answer.request.prompt)
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": totals.usage()}

    async def chunks(self, answers: Answers) -> AsyncIterator[Json]:
        totals = Totals()
        offsets = [0] * len(answers.requests)
        fresh = set(range(len(answers.requests)))
        async for index, event in answers.events():
            tokens: Sequence[common_pb2.Token] = ()
            if isinstance(event, Done):
                totals.add(event.usage, new_prompt=index % self._body.choices == 0)
                choice = self._choice(index, event.text, event)
            else:
                tokens = event.tokens
                choice = self._choice(index, event.text, None)
            if self._body.logprobs is not None and tokens:
                choice["logprobs"] = completion_logprobs(self._names, tokens, offsets[index])
                offsets[index] += sum(len(text) for text in choice["logprobs"]["tokens"])
            if self._body.return_token_ids:
                choice["token_ids"] = [token.id for token in tokens]
                if index in fresh:
                    choice["prompt_token_ids"] = list(answers.requests[index].prompt)
            fresh.discard(index)
            yield self._chunk([choice], None)
        if self._body.include_usage:
            yield self._chunk([], totals.usage())

    def _choice(self, index: int, text: str, end: Done | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None if end is None else FINISH[end.reason],
            "stop_reason": None if end is None else end.stop_reason,
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: Json | None) -> Json:
        """With stream_options.include_usage every chunk has `usage`, null in all but the last."""
        chunk = {**self._head, "choices": choices}
        return {**chunk, "usage": usage} if self._body.include_usage else chunk
