"""From logits to tokens. Stateless: any node, in any batch, draws the same token for the same request and position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams


class SampleRow(NamedTuple):
    """Whose logits a row are. `position` is the index in the sequence (prompt included) the new token will have."""

    request_id: str
    params: SamplingParams
    position: int


class Sampled(NamedTuple):
    """A token; with `params.logprobs` set also its log-probability and the best alternatives, best first.

    Log-probabilities are natural logarithms of the model's own distribution, before temperature, top-k and top-p.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class SamplingError(RuntimeError):
    """Some requests cannot be sampled. `request_ids` names them; the other rows may be sampled by calling again."""

    def __init__(self, request_ids: tuple[str, ...], reason: str) -> None:
        self.request_ids = request_ids
        self.reason = reason
        super().__init__(f"request {', '.join(request_ids)}: {reason}")


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose one token per row of `logits` [S, vocab] float32.

    Invariant: the token depends only on the row's logits, its parameters and (seed, position), so that prefill's
    first token and decode's later ones form one stream, whatever else is in the batch. Equal logits rank by token id.

    Raises:
        SamplingError: logits that are no numbers (the model or a cache row is damaged), or no seed for a temperature.
    """
    _check(logits, rows)
    greedy = logits.argmax(dim=-1).tolist()
    sampled = []
    for row_logits, row, best in zip(logits, rows, greedy, strict=True):
        token = best if row.params.temperature == 0 else _draw(row_logits, row)
        sampled.append(Sampled(token) if row.params.logprobs is None else _with_logprobs(token, row_logits, row.params))
    return sampled


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, fixed by its arguments on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / float(1 << 53)


def _check(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    best = logits.amax(dim=-1)  # NaN if any logit is
    damaged = (~best.isfinite()).tolist()
    bad = tuple(row.request_id for row, is_bad in zip(rows, damaged, strict=True) if is_bad)
    if bad:
        raise SamplingError(bad, "the model's logits are not finite numbers")
    unseeded = tuple(row.request_id for row in rows if row.params.temperature > 0 and row.params.seed is None)
    if unseeded:
        raise SamplingError(unseeded, "seed is None; legal with a temperature above 0: an integer of at least 0")


def _draw(logits: Tensor, row: SampleRow) -> int:
    """Inverse transform sampling over the tokens that top-k and top-p leave, best first."""
    params = row.params
    ranked, tokens = logits.to(torch.float64).sort(descending=True, stable=True)
    if params.top_k:
        ranked = ranked[: params.top_k]
    cumulative = ((ranked - ranked[0]) / params.temperature).softmax(-1).cumsum(-1)
    kept = int((cumulative < params.top_p).sum()) + 1 if params.top_p < 1 else len(cumulative)
    cumulative = cumulative[:kept]
    target = uniform(params.seed or 0, row.position) * cumulative[-1]
    rank = int(torch.searchsorted(cumulative, target, right=True))
    return int(tokens[min(rank, len(cumulative) - 1)])


def _with_logprobs(token: int, logits: Tensor, params: SamplingParams) -> Sampled:
    logprobs = logits.log_softmax(-1)
    values, tokens = logprobs.topk(min(params.logprobs or 0, len(logprobs)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)
