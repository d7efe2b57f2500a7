"""How a request wants its tokens chosen and when it ends. Imports no torch: the front end builds these."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for per token."""


class SamplingParamsError(ValueError):
    """A sampling parameter has an illegal value; names the field, the value and what is legal."""

    def __init__(self, field: str, value: object, legal: str) -> None:
        self.field = field
        self.value = value
        self.legal = legal
        super().__init__(f"{field} is {value!r}; legal: {legal}")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; legal by construction (SamplingParamsError otherwise).

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep the whole vocabulary. `seed` must be set before a request
    with a temperature is sampled. `stop` strings are looked for in the decoded text (StopStringMatcher),
    `stop_token_ids` are added to the model's end-of-sequence ids, which `ignore_eos` disregards. No stop of any kind
    counts before `min_tokens` tokens. `logprobs` is the number of alternatives to report with each token, None for
    no log-probabilities at all.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        if not _is_number(self.temperature) or not 0 <= _single(self.temperature) < float("inf"):
            raise SamplingParamsError("temperature", self.temperature, "a finite number of at least 0")
        if not _is_number(self.top_p) or not 0 < _single(self.top_p) <= 1:
            raise SamplingParamsError("top_p", self.top_p, "a number above 0, at most 1")
        _integer("top_k", self.top_k, 0, 2**32 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise SamplingParamsError("stop", list(self.stop), "strings that are not empty")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def stops_at(self, token: int, generated: int, eos_token_ids: Collection[int]) -> bool:
        """Whether `token`, the `generated`-th of the answer (from 1), ends it as an end-of-sequence or stop token."""
        if generated < self.min_tokens:
            return False
        return token in self.stop_token_ids or (not self.ignore_eos and token in eos_token_ids)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _single(value: float) -> float:
    """`value` in single precision, in which the processes send it to each other; infinite beyond its range."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _integer(field: str, value: object, lowest: int, highest: int | None = None) -> None:
    legal = f"an integer of at least {lowest}" if highest is None else f"an integer from {lowest} to {highest}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingParamsError(field, value, legal)
    if value < lowest or (highest is not None and value > highest):
        raise SamplingParamsError(field, value, legal)
