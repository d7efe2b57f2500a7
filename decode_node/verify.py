"""Which drafted tokens the model confirms. Pure: the same on every rank that has the same logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from decode_node.commands import StepRow
from engine.sampling import Sampled, SampleRow, SamplingError, sample


class Verdict(NamedTuple):
    """What one request's part of a step yields: its next tokens, and the error that ended them, if one did."""

    tokens: tuple[Sampled, ...]
    error: str = ""

    @property
    def confirmed(self) -> int:
        """Drafted tokens that were right."""
        return max(len(self.tokens) - (not self.error), 0)


def verify(rows: Sequence[StepRow], logits: Tensor) -> list[Verdict]:
    """Samples behind the tokens of the step, with the request's own parameters, as long as they are right.

    A request's first token is known to be right; each further one is if it is what was sampled behind the one before.
    So the tokens kept are those that single-token steps would have sampled, whatever the drafts were
    (test_output_does_not_depend_on_the_drafts).

    Args:
        rows: the requests' parts, [B].
        logits: [T, vocab] float32, T the tokens of all parts, in order.
    """
    starts = list(itertools.accumulate((len(row.tokens) for row in rows), initial=0))
    kept: list[list[Sampled]] = [[] for _ in rows]
    errors: dict[str, str] = {}
    going = list(range(len(rows)))
    while going:
        asked = [SampleRow(rows[i].request_id, rows[i].sampling, rows[i].position + 1 + len(kept[i])) for i in going]
        sampled = _sample(logits[[starts[i] + len(kept[i]) for i in going]], asked, errors)
        going = [i for i in going if rows[i].request_id in sampled]
        for i in going:
            kept[i].append(sampled[rows[i].request_id])
        going = [i for i in going if rows[i].tokens[len(kept[i]) :][:1] == (kept[i][-1].token,)]
    return [Verdict(tuple(tokens), errors.get(row.request_id, "")) for row, tokens in zip(rows, kept, strict=True)]


def _sample(logits: Tensor, asked: Sequence[SampleRow], errors: dict[str, str]) -> dict[str, Sampled]:
    """By request id; why a request cannot be sampled is put into `errors`."""
    while good := [index for index, row in enumerate(asked) if row.request_id not in errors]:
        rows = [asked[index] for index in good]
        try:
            return {row.request_id: token for row, token in zip(rows, sample(logits[good], rows), strict=True)}
        except SamplingError as error:
            errors.update((rid, f"request {rid}: {error.reason}") for rid in error.request_ids)
    return {}
