"""What a validated request is, and the events of its answer."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.v1 import client_pb2, common_pb2

from engine.sampling_params import SamplingParams
from meta_server.errors import Failure


@dataclass(frozen=True)
class GenerationRequest:
    """A request that is legal for the served model.

    `request_id` is what the client sees and is unique among running requests. `wire_id` names it on the workers; it is
    unique for ever, so that an id can be used again while workers still clean up after its last use. `resumed` marks
    what is left of a request whose earlier run was interrupted.
    """

    request_id: str
    wire_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    resumed: bool = False

    @property
    def total_tokens(self) -> int:
        """Prompt plus longest output, in tokens: what decode reserves."""
        return len(self.prompt) + self.sampling.max_tokens

    def sampling_message(self) -> common_pb2.SamplingParams:
        """The sampling parameters as workers get them; the seed is always set."""
        params = self.sampling
        return common_pb2.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.seed,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
        )


@dataclass(frozen=True)
class RunTerms:
    """What bounds the life of every request; fields of `runtime` in the configuration."""

    deadline_s: float
    max_reruns: int = 3
    rerun_wait_s: float = 60.0


@dataclass(frozen=True)
class TokenChunk:
    """Tokens in the order they were made, and the text that became final with them (empty without a tokenizer)."""

    tokens: tuple[common_pb2.Token, ...]
    text: str


@dataclass(frozen=True)
class Done:
    """The last event of a request that was served. `text` was held back until now; `stop_reason` is the stop string or
    stop token id that ended the answer, None for an end-of-sequence id or the length."""

    reason: common_pb2.FinishReason.ValueType
    usage: client_pb2.Usage
    text: str = ""
    stop_reason: str | int | None = None


Final = Done | Failure
Event = TokenChunk | Final
