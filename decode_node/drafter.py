"""Drafts the tokens that the next step verifies, by the checkpoint's multi-token-prediction layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_node.backend import DecodeBackend
from decode_node.commands import StepRow
from decode_node.verify import Verdict
from engine.model.draft import DraftLayer


class Drafter:
    """Runs after a step was verified, on every rank alike.

    First the draft layer computes its rows of the positions the step has confirmed, as prefill did for the prompt; the
    last one gives the first draft. Each further draft comes from one more row, which combines the layer's own output
    with the draft before. These rows, of positions that may prove wrong, lie at or behind the stable prefix: the next
    step writes them anew before anything counts them as sealed. Where the checkpoint says so, they attend to the top-k
    of the first draft's row and to each other, without an indexer
    (test_drafts_that_share_a_top_k_run_one_indexer_for_all).
    """

    def __init__(self, layer: DraftLayer, backend: DecodeBackend, tokens: int) -> None:
        """`tokens`: drafts per request and step."""
        self._layer = layer
        self._backend = backend
        self._tokens = tokens

    def draft(self, rows: Sequence[StepRow], hidden: Tensor, verdicts: Sequence[Verdict]) -> list[tuple[int, ...]]:
        """For each request the guesses behind its newest token; none for one that failed or is about to end.

        hidden: [T, H] of the step's tokens, in order.
        """
        lengths = [self._length(row, verdict) for row, verdict in zip(rows, verdicts, strict=True)]
        drafts: list[list[int]] = [[] for _ in rows]
        going = [index for index, length in enumerate(lengths) if length > 0]
        if not going:
            return [() for _ in rows]
        state, picks = self._confirmed(rows, hidden, verdicts, going)
        tokens = self._layer.guess(state)
        _append(drafts, going, tokens)
        for depth in range(1, self._tokens):
            kept = [place for place, index in enumerate(going) if lengths[index] > depth]
            if not kept:
                break
            going = [going[place] for place in kept]
            state, tokens = state[kept], tokens[kept]
            stable = torch.tensor([rows[i].position + len(verdicts[i].tokens) for i in going])
            shared = picks[kept] if self._layer.shares_topk else None
            picks = torch.arange(len(kept))
            positions = self._begin(rows, going, stable + depth - 1, stable=stable, picks_of=shared)
            selects = not self._layer.shares_topk
            state = self._layer.hidden(state, tokens, positions, self._backend, selects=selects)
            tokens = self._layer.guess(state)
            _append(drafts, going, tokens)
        return [tuple(draft) for draft in drafts]

    def _length(self, row: StepRow, verdict: Verdict) -> int:
        newest = row.position + len(verdict.tokens)
        return 0 if verdict.error else min(self._tokens, row.last_position - newest)

    def _confirmed(
        self, rows: Sequence[StepRow], hidden: Tensor, verdicts: Sequence[Verdict], going: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """[len(going), H]: the draft layer's output at each request's last confirmed position, and [len(going)], which
        of the pass's rows these are."""
        counts = torch.tensor([len(verdicts[index].tokens) for index in going])
        firsts = torch.tensor([0, *(len(row.tokens) for row in rows[:-1])]).cumsum(0)[list(going)]
        ends = counts.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
        starts = torch.tensor([rows[index].position for index in going])
        positions = self._begin(rows, going, starts, counts)
        next_tokens = torch.tensor([token.token for index in going for token in verdicts[index].tokens])
        chosen = hidden[firsts.repeat_interleave(counts) + within]
        return self._layer.hidden(chosen, next_tokens, positions, self._backend)[ends - 1], ends - 1

    def _begin(
        self,
        rows: Sequence[StepRow],
        going: Sequence[int],
        starts: Tensor,
        counts: Tensor | None = None,
        stable: Tensor | None = None,
        picks_of: Tensor | None = None,
    ) -> Tensor:
        return self._backend.begin(
            rows=torch.tensor([rows[index].row for index in going]),
            generations=torch.tensor([rows[index].generation for index in going]),
            starts=starts,
            counts=counts,
            stable_prefix=stable,
            picks_of=picks_of,
        )


def _append(drafts: Sequence[list[int]], going: Sequence[int], tokens: Tensor) -> None:
    for index, token in zip(going, tokens.tolist(), strict=True):
        drafts[index].append(token)
