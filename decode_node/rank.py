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
from decode_node.memory import RowTables
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
    tokens: int = 0
    step_seconds: float = 0.0


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
    ) -> None:
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

    def step(self, rows: Sequence[StepRow]) -> Tensor:
        """Computes the next token's logits of every request. [len(rows), vocab] float32, equal on all ranks.

        After an exception the rows' requests must end: their caches may hold part of the step.
        """
        started = time.monotonic()
        positions = torch.tensor([row.position for row in rows], dtype=torch.int64)
        self._backend.begin(
            rows=torch.tensor([row.row for row in rows], dtype=torch.int64),
            generations=torch.tensor([row.generation for row in rows], dtype=torch.int64),
            positions=positions,
        )
        tokens = torch.tensor([row.token for row in rows], dtype=torch.int64)
        logits = self._decoder.forward(tokens, positions, self._backend)
        self.counters.steps += 1
        self.counters.tokens += len(rows)
        self.counters.step_seconds += time.monotonic() - started
        return logits
