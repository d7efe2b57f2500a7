"""One TP rank of a prefill group: carries out commands, collects what it has to report."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.faults import no_stall
from engine.model.decoder import DsaDecoder
from engine.model.draft import DraftLayer
from prefill_node.backend import PrefillBackend
from prefill_node.batch import StepBatch, pack
from prefill_node.first_tokens import sample_first_tokens
from prefill_node.pool_saver import PoolSaver
from prefill_node.routes import Route, Routes
from prefill_node.steps import Chunk, OpenRoute, PrefixFound, Report, RequestErrors, RouteOpened, StepPlan


class RankFailed(RuntimeError):
    """A thread this rank cannot do without has ended."""


class Announcer(Protocol):
    """The part of `Publisher` used here."""

    @property
    def failure(self) -> str | None:
        """Why it can publish nothing any more."""

    def drop(self, request_id: str) -> None:
        """No more errors are reported for the request."""


@dataclass(frozen=True)
class StepResult:
    logits: Tensor  # [S, vocab] float32, a row for each chunk of `ending`
    ending: tuple[Chunk, ...]  # the chunks that end their prompt
    errors: Mapping[str, str]  # request id -> why it cannot go on
    pool_errors: Mapping[str, str]  # request id -> why its rows did not come back from the pool


class PrefillRank:
    """Runs on one thread (the engine thread), which alone calls its methods; its queues alone are shared.

    One failed request never takes the others of a step down: its error is in the step's result, theirs is not.
    """

    def __init__(
        self,
        decoder: DsaDecoder,
        backend: PrefillBackend,
        routes: Routes,
        publisher: Announcer,
        saver: PoolSaver,
        errors: queue.SimpleQueue[tuple[str, str]],
        block_size: int,
        draft: DraftLayer | None = None,
        before_step: Callable[[], None] = no_stall,
    ) -> None:
        """`errors` is where the publisher puts (request id, cause); `draft` is None without speculative decoding."""
        self._before_step = before_step
        self._draft = draft
        self._decoder, self._backend, self._routes = decoder, backend, routes
        self._publisher, self._saver, self._block_size = publisher, saver, block_size
        self._opened: queue.SimpleQueue[tuple[OpenRoute, Route | str]] = queue.SimpleQueue()
        self._errors = errors
        self._opening = 0
        self._found: queue.SimpleQueue[PrefixFound] = queue.SimpleQueue()

    @property
    def is_opening(self) -> bool:
        """Whether a route is being opened, so that a report will come soon."""
        return self._opening > 0

    def open_route(self, command: OpenRoute) -> None:
        """Answered by a RouteOpened in a later `poll`."""
        self._opening += 1
        self._routes.open(command, lambda opened, route: self._opened.put((opened, route)))

    def drop(self, request_ids: Sequence[str]) -> None:
        """Forgets requests, in any state. What was published stays readable until its readers are done."""
        for request_id in request_ids:
            self._routes.drop(request_id)
            self._publisher.drop(request_id)
            self._saver.release(request_id)

    def start_over(self, request_ids: Sequence[str]) -> None:
        """These requests go on without the pool; what they read from it is not trusted any more."""
        for request_id in request_ids:
            self._routes.begin_again(request_id)
            self._saver.release(request_id, distrust=True)

    def look_up(self, request_id: str, keys: Sequence[str], attempt: int) -> None:
        """Answered by a PrefixFound in a later `poll`."""
        self._saver.look_up(request_id, keys, lambda blocks: self._found.put(PrefixFound(request_id, attempt, blocks)))

    def finish(self, plan: StepPlan, failed: Collection[str]) -> None:
        """All ranks have run the step: its rows may be shared, except those of `failed` requests."""
        self._saver.end_step(plan.chunks, failed)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step. Raises when this process cannot go on (a stuck pool, a lost rank, a defect)."""
        self._before_step()
        batch = pack(plan, self._block_size)
        self._saver.meet(plan.number)
        self._backend.begin(batch)
        hidden = self._decoder.hidden(batch.packed_input_ids, batch.positions, self._backend)
        logits = self._decoder.logits(hidden.index_select(0, batch.last_rows))
        if self._draft is not None:
            self._cache_draft_rows(self._draft, batch, hidden, logits, plan)
        self._backend.end()
        backend = self._backend
        return StepResult(logits, batch.ending, {**self._take_errors(), **backend.errors}, backend.pool_errors)

    def _cache_draft_rows(
        self, draft: DraftLayer, batch: StepBatch, hidden: Tensor, logits: Tensor, plan: StepPlan
    ) -> None:
        """The draft layer's row of a position needs the token behind it: at a prompt's end, its first sampled one.

        Every rank samples that by itself, and all sample the same. A request that cannot be sampled is computed with
        some token, as all ranks must do the same work; it has failed.
        """
        first_tokens, _ = sample_first_tokens(batch.ending, logits, plan.sampling)
        behind = [
            chunk.next_token
            if chunk.next_token is not None
            else first_tokens[chunk.request_id].token
            if chunk.request_id in first_tokens
            else 0
            for chunk in batch.chunks
        ]
        next_tokens = torch.tensor(
            [token for chunk, last in zip(batch.chunks, behind, strict=True) for token in (*chunk.tokens[1:], last)]
        )
        self._backend.store(draft.layer, draft.kv_rows(hidden, next_tokens, batch.positions))

    def poll(self) -> list[Report]:
        """What has happened since the last call. Never blocks. Raises RankFailed when this process cannot go on."""
        if failure := self._publisher.failure or self._saver.failure:
            raise RankFailed(failure)
        reports: list[Report] = []
        while not self._opened.empty():
            command, route = self._opened.get()
            self._opening -= 1
            if not self._routes.is_wanted(command):
                continue
            if isinstance(route, Route):
                self._routes.adopt(command, route)
            error = "" if isinstance(route, Route) else route
            reports.append(RouteOpened(command.request_id, command.attempt, error))
        while not self._found.empty():
            reports.append(self._found.get())
        if errors := self._take_errors():
            reports.append(RequestErrors(errors))
        return reports

    def _take_errors(self) -> dict[str, str]:
        errors: dict[str, str] = {}
        while not self._errors.empty():
            request_id, text = self._errors.get()
            errors.setdefault(request_id, f"request {request_id!r}: {text}")
        return errors
