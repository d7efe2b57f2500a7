"""Between the protocol buffers of `sluice.v1` and the plain values that workers compute with. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.v1 import common_pb2

from engine.sampling_params import SamplingParams


def sampling_params(message: common_pb2.SamplingParams) -> SamplingParams:
    """How a request wants its tokens chosen. Raises SamplingParamsError naming an illegal field."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def token_message(token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> common_pb2.Token:
    """One generated token; `top` are (token id, log-probability) pairs, best first."""
    alternatives = [common_pb2.TokenLogprob(token_id=ident, logprob=value) for ident, value in top]
    return common_pb2.Token(id=token, logprob=logprob, top=alternatives)
