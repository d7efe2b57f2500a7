"""What a request may ask of the served model. Every refusal names the field, its value and what is legal."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.model.config import ModelConfig
from engine.sampling_params import SamplingParams, SamplingParamsError
from engine.tokenizer import Tokenizer, TokenizerError
from meta_server.errors import Failure, FailureKind, RequestFailed, invalid, shown
from meta_server.request import GenerationRequest

MAX_STOPS = 64
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_INLINE_CHARS = 8192  # longer texts are tokenized off the event loop


@dataclass(frozen=True)
class Capacity:
    """Longest prompt of a prefill group, longest prompt + output of a decode group, in tokens; None = unknown."""

    prompt_tokens: int | None = None
    total_tokens: int | None = None


@dataclass(frozen=True)
class SamplingFields:
    """Sampling as the client wrote it, unchecked. `max_tokens` None = `default_max_tokens` or what fits, if less.

    `length_param` is what the client calls `max_tokens`.
    """

    max_tokens: int | None = None
    default_max_tokens: int | None = None
    length_param: str = "max_tokens"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)


class RequestValidator:
    """Turns what clients send into `GenerationRequest`s. Knows the model, not the workers."""

    def __init__(self, name: str, model: ModelConfig, max_model_len: int, tokenizer: Tokenizer | None) -> None:
        self.name = name
        self.model = model
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises RequestFailed (NOT_FOUND) unless `name` is empty or the served model's."""
        if name and name != self.name:
            raise RequestFailed(
                Failure(FailureKind.UNKNOWN_MODEL, f"model: {shown(name)} is not served; legal: {self.name!r}", "model")
            )

    async def encode(self, text: str, param: str = "prompt") -> list[int]:
        """Token ids of a text prompt; long texts are tokenized in a thread. Raises RequestFailed."""
        tokenizer = self._need_tokenizer(param)
        _check_text(text, param)
        if not text:
            raise invalid(param, "is empty; at least one token is needed")
        if len(text) <= _INLINE_CHARS:
            return tokenizer.encode(text)
        self._check_length(tokenizer.least_tokens(text), param, "at least ")
        return await asyncio.to_thread(tokenizer.encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat through the checkpoint's template. Raises RequestFailed."""
        tokenizer = self._need_tokenizer("messages")
        for message in messages:
            for value in message.values():
                _check_text(value, "messages")
        try:
            text = await asyncio.to_thread(tokenizer.render_chat, messages)
        except TokenizerError as error:
            raise invalid("messages", str(error)) from error
        self._check_length(tokenizer.least_tokens(text), "messages", "at least ")
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)

    def request(
        self,
        prompt: Sequence[int],
        fields: SamplingFields,
        capacity: Capacity,
        request_id: str = "",
        param: str = "prompt",
    ) -> GenerationRequest:
        """A legal request, or RequestFailed (INVALID_ARGUMENT).

        `request_id` has passed `check_request_id`; an empty one is replaced by a new one.
        """
        self._check_prompt(prompt, capacity, param)
        max_tokens = self._output_length(fields, len(prompt), capacity)
        sampling = self._sampling(fields, max_tokens)
        unique = secrets.token_hex(8)
        if not request_id:
            return GenerationRequest(unique, unique, tuple(prompt), sampling)
        return GenerationRequest(request_id, f"{request_id}-{unique}", tuple(prompt), sampling)

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise invalid(param, "the checkpoint has no tokenizer; send token ids as the prompt of /v1/completions")
        return self.tokenizer

    def _check_length(self, count: int, param: str, qualifier: str = "") -> None:
        if count >= self.max_model_len:
            raise invalid(
                param,
                f"has {qualifier}{count} tokens, but the model's maximum context length is "
                f"{self.max_model_len} tokens, of which at least one is for the output; legal: at most "
                f"{self.max_model_len - 1}",
            )

    def _check_prompt(self, prompt: Sequence[int], capacity: Capacity, param: str) -> None:
        if not prompt:
            raise invalid(param, "is empty; at least one token is needed")
        vocab = self.model.vocab_size
        for position, token in enumerate(prompt):
            if not 0 <= token < vocab:
                raise invalid(param, f"token id {shown(token)} at position {position}; legal: 0 to {vocab - 1}")
        count = len(prompt)
        self._check_length(count, param)
        if capacity.prompt_tokens is not None and count > capacity.prompt_tokens:
            raise invalid(param, f"has {count} tokens, but the prefill workers hold at most {capacity.prompt_tokens}")
        if capacity.total_tokens is not None and count >= capacity.total_tokens:
            raise invalid(
                param,
                f"has {count} tokens, but the decode workers hold at most {capacity.total_tokens} tokens of a request, "
                f"prompt and output together (decode.host_pool_bytes)",
            )

    def _output_length(self, fields: SamplingFields, prompt: int, capacity: Capacity) -> int:
        limit, what = self.max_model_len, "this model's maximum context length is"
        if capacity.total_tokens is not None and capacity.total_tokens < limit:
            limit, what = capacity.total_tokens, "the decode workers' longest request (decode.host_pool_bytes) is"
        room = limit - prompt
        wanted = fields.max_tokens
        if wanted is None:
            return room if fields.default_max_tokens is None else min(fields.default_max_tokens, room)
        if wanted > room:
            raise invalid(
                fields.length_param,
                f"{what} {limit} tokens, but {prompt + wanted} were requested ({prompt} in the prompt, {wanted} in the "
                f"completion); legal: at most {room}",
            )
        return wanted

    def _sampling(self, fields: SamplingFields, max_tokens: int) -> SamplingParams:
        if len(fields.stop) > MAX_STOPS:
            raise invalid("stop", f"has {len(fields.stop)} strings; legal: at most {MAX_STOPS}")
        if fields.stop and self.tokenizer is None:
            raise invalid("stop", "the checkpoint has no tokenizer to match stop strings; use stop_token_ids")
        for text in fields.stop:
            _check_text(text, "stop")
        for token in fields.stop_token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise invalid("stop_token_ids", f"{shown(token)}; legal: 0 to {self.model.vocab_size - 1}")
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                temperature=fields.temperature,
                top_p=fields.top_p,
                top_k=fields.top_k,
                seed=secrets.randbits(63) if fields.seed is None else fields.seed,
                stop=fields.stop,
                stop_token_ids=fields.stop_token_ids,
                min_tokens=fields.min_tokens,
                ignore_eos=fields.ignore_eos,
                logprobs=fields.logprobs,
            )
        except SamplingParamsError as error:
            name = fields.length_param if error.field == "max_tokens" else fields.names.get(error.field, error.field)
            raise invalid(name, f"is {shown(error.value)}; legal: {error.legal}") from error


def check_request_id(request_id: str) -> None:
    """Ids appear in logs, file names and pool keys, so they are short and plain. Raises RequestFailed."""
    if _ID.fullmatch(request_id) is None:
        raise invalid(
            "request_id",
            f"{shown(request_id)}; legal: 1 to 64 characters of A-Z a-z 0-9 . _ : - beginning with a letter or digit",
        )


def _check_text(value: object, param: str) -> None:
    """JSON can spell half a surrogate pair, which is no text and cannot be encoded."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid(param, "holds half a surrogate pair, which is not valid Unicode text") from None
