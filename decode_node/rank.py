"""One TP rank: takes requests in, lets them go, and computes its part of every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode_node.backend import DecodeBackend
from decode_node.commands import PullEnded, Quiescent, Report, StepRow, Turn
from decode_node.drafter import Drafter
from decode_node.memory import RowTables
from decode_node.verify import Verdict, verify
from engine.faults import no_stall
from engine.model.decoder import DsaDecoder


class KvSource(Protocol):
    """What a rank needs of its puller (decode_node.puller.Puller)."""

    def expect(
        self,
        request_id: str,
        generation: int,
        main_blocks: Sequence[int],
        indexer_blocks: Sequence[int],
        contributors: int,
        *,
        wanted: range,
        lease_s: float,
    ) -> None: ...

    def release(self, request_id: str) -> None: ...

    @property
    def failure(self) -> str | None: ...


@dataclass(frozen=True)
class PullTerms:
    """How long to wait for whom: `contributors` prefill ranks send to this rank, none silent for `lease_s`."""

    contributors: int
    lease_s: float


@dataclass
class StepCounters:
    """Monotonic; written by the engine thread only."""

    steps: int = 0
    tokens: int = 0  # the steps yielded, over all requests
    draft_tokens: int = 0  # guessed and verified
    accepted_tokens: int = 0  # guessed right
    step_seconds: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """One entry per request of the step, in order; empty on a rank that neither leads nor drafts."""

    verdicts: Sequence[Verdict] = ()
    drafts: Sequence[tuple[int, ...]] = ()  # what the next step shall verify


class Rank:
    """Carries out `Turn`s. Used by the engine thread, except `pull_ended` and `quiescent`, which pullers' threads call.

    `report` takes what the leader must know; it is called from any thread.
    """

    def __init__(
        self,
        decoder: DsaDecoder,
        backend: DecodeBackend,
        tables: RowTables,
        block_size: int,
        terms: PullTerms,
        report: Callable[[Report], None],
        *,
        leads: bool,
        drafter: Drafter | None = None,
        before_step: Callable[[], None] = no_stall,
    ) -> None:
        """`leads`: whether this rank's loop uses the tokens; `drafter`: None without speculative decoding."""
        self._before_step = before_step
        self._leads = leads
        self._drafter = drafter
        self._decoder = decoder
        self._backend = backend
        self._tables = tables
        self._block_size = block_size
        self._terms = terms
        self._report = report
        self._source: KvSource | None = None
        self._generations: dict[str, int] = {}
        self.counters = StepCounters()

    def attach(self, source: KvSource) -> None:
        """Must be called once, before the first turn; `source` calls `pull_ended` and `quiescent` back."""
        self._source = source

    @property
    def source(self) -> KvSource:
        if self._source is None:
            raise RuntimeError("the rank has no puller yet: call attach() first")
        return self._source

    def pull_ended(self, request_id: str, generation: int, error: str | None) -> None:
        """The puller's `on_terminal`."""
        self._report(PullEnded(request_id, generation, error))

    def quiescent(self, request_id: str) -> None:
        """The puller's `on_quiescent`."""
        self._report(Quiescent(request_id, self._generations.pop(request_id, 0)))

    def take_in_and_let_go(self, turn: Turn) -> None:
        """Opens the reservations of `turn` for pulls, notes the blocks that requests got since, and stops the pulls of
        its releases. Does not block."""
        for request in turn.reserved:
            rid = request.request_id
            self._tables.bind(request.row, request.main_blocks, request.indexer_blocks)
            self._generations[rid] = request.generation
            try:
                self.source.expect(
                    rid,
                    request.generation,
                    request.main_blocks,
                    request.indexer_blocks,
                    self._terms.contributors,
                    wanted=range(-(-request.prompt_tokens // self._block_size)),
                    lease_s=self._terms.lease_s,
                )
            except ValueError as error:
                self._report(PullEnded(rid, request.generation, str(error)))
        for grown in turn.grown:
            self._tables.extend(grown.row, grown.start, grown.main_blocks, grown.indexer_blocks)
        for released in turn.released:
            self.source.release(released.request_id)

    def step(self, rows: Sequence[StepRow]) -> StepResult:
        """Computes and samples the next tokens of every request, and drafts some more. Equal on all ranks.

        After an exception the rows' requests must end: their caches may hold part of the step.
        """
        self._before_step()
        started = time.monotonic()
        positions = self._backend.begin(
            rows=torch.tensor([row.row for row in rows], dtype=torch.int64),
            generations=torch.tensor([row.generation for row in rows], dtype=torch.int64),
            starts=torch.tensor([row.position for row in rows], dtype=torch.int64),
            counts=torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64),
        )
        tokens = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64)
        hidden = self._decoder.hidden(tokens, positions, self._backend)
        if self._leads or self._drafter:
            result = self._result(rows, hidden)
        else:
            result = StepResult()
            self.counters.tokens += len(rows)  # without drafts each request gets one
        self.counters.steps += 1
        self.counters.step_seconds += time.monotonic() - started
        return result

    def _result(self, rows: Sequence[StepRow], hidden: Tensor) -> StepResult:
        verdicts = verify(rows, self._decoder.logits(hidden))
        self.counters.tokens += sum(len(verdict.tokens) for verdict in verdicts)
        self.counters.draft_tokens += sum(len(row.tokens) - 1 for row in rows)
        self.counters.accepted_tokens += sum(verdict.confirmed for verdict in verdicts)
        drafts = self._drafter.draft(rows, hidden, verdicts) if self._drafter else [()] * len(rows)
        return StepResult(verdicts, drafts)
