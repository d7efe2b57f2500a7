"""When is a request finished? One rule for every token, whichever node sampled it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.sampling_params import SamplingParams


class FinishReason(enum.Enum):
    """Why a request ended without a failure."""

    STOP = "stop"  # end-of-sequence id or one of the request's stop token ids
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORTED = "aborted"  # its session was closed
    PREEMPTED = "preempted"  # its memory is needed, or the worker stops; what is left may be asked for again at once


@dataclass(frozen=True)
class FinishRules:
    """What ends one request."""

    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    max_context: int  # longest prompt + output in tokens

    def reason(self, token: int, generated: int, prompt_tokens: int) -> FinishReason | None:
        """Whether the request ends with `token`, its `generated`-th one (counted from 1).

        A stop token wins over a length that is reached by the same token.
        """
        if self.sampling.stops_at(token, generated, self.eos_token_ids):
            return FinishReason.STOP
        if generated >= self.sampling.max_tokens or prompt_tokens + generated >= self.max_context:
            return FinishReason.LENGTH
        return None
