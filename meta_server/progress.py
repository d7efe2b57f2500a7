"""How far a request has come, and what is left of it when the run that served it is interrupted."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from sluice.v1 import common_pb2

from meta_server.request import GenerationRequest


class Progress:
    """The tokens delivered so far.

    A token depends only on the sequence before it, the sampling parameters, the seed and its position. So running the
    prompt together with the delivered tokens, for the tokens that are left, continues the very same answer.

    Invariant: over all runs of a request each token is delivered once (test_each_token_is_delivered_once).
    """

    def __init__(self, request: GenerationRequest, eos_token_ids: Collection[int]) -> None:
        self._request = request
        self._eos = eos_token_ids
        self._tokens: list[int] = []
        self._runs = 0

    def deliver(self, tokens: Iterable[common_pb2.Token]) -> None:
        """These tokens, which follow the earlier ones, reach the client."""
        self._tokens.extend(token.id for token in tokens)

    def end(self) -> common_pb2.FinishReason.ValueType | None:
        """Why the delivered tokens are the whole answer; None if some are left. Decode's rules."""
        sampling, count = self._request.sampling, len(self._tokens)
        if count and sampling.stops_at(self._tokens[-1], count, self._eos):
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if count >= sampling.max_tokens else None

    def next_run(self) -> GenerationRequest:
        """What the next run has to do; to be asked for once per run, and not after the end.

        Each run has a wire id of its own: workers may still clean up after the earlier one.
        """
        request, done = self._request, len(self._tokens)
        self._runs += 1
        if self._runs == 1:
            return request
        sampling = dataclasses.replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - done,
            min_tokens=max(0, request.sampling.min_tokens - done),
        )
        return dataclasses.replace(
            request,
            wire_id=f"{request.wire_id}.{self._runs}",
            prompt=(*request.prompt, *self._tokens),
            sampling=sampling,
            resumed=True,
        )
