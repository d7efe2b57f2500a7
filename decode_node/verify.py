"""Which drafted tokens the model confirms. Pure: the same on every rank that has the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from decode_node.commands import StepRow
from engine.sampling import Sampled, SampleRow, SamplingError, sample


class Verdict(NamedTuple):
    """What one request's part of a step yields: its next tokens, at least one, or the reason why there is none."""

    tokens: tuple[Sampled, ...]
    error: str = ""

    @property
    def confirmed(self) -> int:
        """Drafted tokens that were right."""
        return max(len(self.tokens) - 1, 0)


def verify(rows: Sequence[StepRow], logits: Tensor) -> list[Verdict]:
    """Samples behind every token of the step, with the request's own parameters, and keeps what follows right tokens.

    A request's first token is known to be right; each further one is if it is what was sampled behind the one before.
    So the tokens kept are those that single-token steps would have sampled, whatever the drafts were
    (test_output_does_not_depend_on_the_drafts).

    Args:
        rows: the requests' parts, [B].
        logits: [T, vocab] float32, T the tokens of all parts, in order.
    """
    asked = [
        SampleRow(row.request_id, row.sampling, row.position + 1 + index)
        for row in rows
        for index in range(len(row.tokens))
    ]
    sampled, errors = _sample(logits, asked)
    verdicts, end = [], 0
    for row in rows:
        start, end = end, end + len(row.tokens)
        if row.request_id in errors:
            verdicts.append(Verdict((), errors[row.request_id]))
            continue
        kept = [sampled[start]]
        for index, draft in enumerate(row.tokens[1:], start + 1):
            if kept[-1].token != draft:
                break
            kept.append(sampled[index])
        verdicts.append(Verdict(tuple(kept)))
    return verdicts


def _sample(logits: Tensor, asked: Sequence[SampleRow]) -> tuple[dict[int, Sampled], dict[str, str]]:
    """By index, the tokens of the requests that can be sampled; by request id, why the others cannot."""
    errors: dict[str, str] = {}
    while good := [index for index, row in enumerate(asked) if row.request_id not in errors]:
        chosen = logits if len(good) == len(asked) else logits[good]
        try:
            return dict(zip(good, sample(chosen, [asked[index] for index in good]), strict=True)), errors
        except SamplingError as error:
            errors.update((rid, f"request {rid}: {error.reason}") for rid in error.request_ids)
    return {}, errors
