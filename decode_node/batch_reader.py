"""Carries out one batch: validate, copy, check the generation, account. No sockets here."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from sluice.v1 import wire_pb2

from decode_node.batch_queue import Announced, BatchQueue
from decode_node.pull_counters import Counts
from decode_node.pull_plan import WORD_BYTES, Descriptors, PullPlanner, PullRefused, SourceMap
from decode_node.pull_requests import PullRequest, PullRequests
from decode_node.read_engine import ReadEngine, ReadStats
from transfer.memfabric import Copies, Meanwhile

log = logging.getLogger(__name__)
_ALIVE_S = 5.0  # longest wait for a sign of life before a link is opened
TOGETHER = 8  # batches of a source at most that are handed over at once
_TOGETHER_BYTES = 32 << 20  # a read that has so many gets no further batch: its first one has waited long enough
SOURCE_SCRATCH_BYTES = TOGETHER * WORD_BYTES
_FIRST_PAUSE_S = 0.05  # before a failed read is tried again; each further pause is twice as long


Reply: TypeAlias = wire_pb2.ReadDone | wire_pb2.ReadFailed


@dataclass(eq=False, slots=True)
class Source:
    """A prefill rank on one connection."""

    map: SourceMap
    scratch: int  # address of SOURCE_SCRATCH_BYTES that only reads from this source write
    alive: Callable[[float], bool]  # whether its process answers within so many seconds
    suspect: bool = True  # the engine's link to it may be unusable: it is a new peer, or its last read failed
    lost: str | None = None  # why nothing more is to be read from it


@dataclass(eq=False, slots=True)
class _Work:
    """A batch on its way."""

    batch: wire_pb2.ReadReady
    lease_end: float  # monotonic seconds
    claims: list[tuple[wire_pb2.ReadEntry, PullRequest]] = field(default_factory=list)
    copies: Descriptors = field(default_factory=Descriptors)  # of all claims
    nbytes: int = 0  # that they move
    refusal: str | None = None  # of the batch as a whole
    tried: bool = False  # whether any read of it has begun
    problem: str | None = None  # of all claims
    errors: dict[str, str] = field(default_factory=dict)  # by request
    answered: bool = False


class BatchReader:
    """Reads batches; ``read`` may run for several sources at once, but not twice for a source.

    Invariants:

    * Validate first: no byte moves for an entry before all of its numbers have been checked.
    * No silent corruption: a batch counts as read only if the slot's generation, read after the copy, is the announced
      one and every checksum it came with is right; otherwise every request of the batch fails.
    * A read given up while it may still write keeps its requests in quarantine until ``settle`` finds the engine idle,
      and is not tried again: its late bytes could replace those of a later, checked attempt.
    """

    def __init__(
        self,
        engine: ReadEngine,
        planner: PullPlanner,
        requests: PullRequests,
        counts: Counts,
        *,
        read_timeout_s: float,
        read_retries: int,
        registration_wait_s: float,
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._requests = requests
        self._counts = counts
        self._read_timeout_s = read_timeout_s
        self._pauses = [0.0, *(_FIRST_PAUSE_S * 2**attempt for attempt in range(read_retries))]
        self._registration_wait_s = registration_wait_s
        self._lock = threading.Lock()
        self._abandoned: list[tuple[str, PullRequest]] = []

    def open(self, source: Source, timeout_s: float) -> str | None:
        """First contact: reads the generation words' head, which opens the link. Returns why that fails, if it does."""
        try:
            self._read(source, self._words(source, [0]), timeout_s)
        except Exception as error:
            return f"{self._planner.name} cannot read memory of {source.map.name} ({source.map.session_id}): {error}"
        return None

    def read(self, source: Source, first: Announced, queue: BatchQueue, answer: Callable[[Reply], None]) -> None:
        """Reads ``first`` and what waits in the queue, in order; ``answer`` is called once for each, when it is over.

        Those that can be read in one go are (of these, the ones to be read again are answered after the others), and
        while bytes move the next ones are checked. Never raises for what the peer sent or the engine did.
        """
        held = [first]

        def gather(works: list[_Work], before: Sequence[_Work], end: float) -> None:
            """Begins what is there, or comes until `end` or a nudge, and may be read together."""
            while len(works) < TOGETHER:
                if not held and (announced := queue.poll(end - time.monotonic())) is not None:
                    held.append(announced)
                if not held or not self._may_join(before, works, held[0]):
                    break
                works.append(_Work(*held.pop()))
                self._begin(source, works[-1])

        group: list[_Work] = []
        while True:
            following: list[_Work] = []
            try:
                gather(group, (), 0)
                if not group:
                    return
                queue.arm()
                meanwhile = Meanwhile(partial(gather, following, group), queue.nudge)
                self._carry_out(source, group, answer, meanwhile)
            except Exception as failure:  # a defect must not leave prefill waiting
                log.exception("batches of %s", source.map.name)
                lost = [*group, *following, *(_Work(*announced) for announced in held)]
                for work in lost:
                    self._release(source, work)
                    if not work.answered:
                        answer(wire_pb2.ReadFailed(sequence=work.batch.sequence, error=repr(failure)))
                following = []
                held.clear()
            group = following

    def settle(self) -> None:
        """Ends the quarantine of abandoned reads that are over by now."""
        with self._lock:
            over = [each for each in self._abandoned if self._engine.idle(each[0])]
            self._abandoned = [each for each in self._abandoned if each not in over]
        for _, request in over:
            self._requests.ended(request)

    def quarantined(self) -> int:
        """Reads given up which may still write."""
        with self._lock:
            return len(self._abandoned)

    def _may_join(self, before: Sequence[_Work], works: Sequence[_Work], announced: Announced) -> bool:
        """Whether a batch may be begun while those before it are being read, and be read together with ``works``.

        False when it has to be known how one of them ended before this one can be judged, and when a lease has less
        time left than a read may take: it would cut the others' time short.
        """
        batch = announced.batch
        if not before and not works:
            return True
        return (
            not any(_bears_upon(work.batch, batch) for work in (*before, *works))
            and all(self._requests.goes_on(entry, batch.member) for entry in batch.entries)
            and (not works or self._has_time_for(works, announced))
        )

    def _has_time_for(self, works: Sequence[_Work], announced: Announced) -> bool:
        soonest = min(announced.lease_end, *(work.lease_end for work in works))
        return (
            soonest - time.monotonic() >= self._read_timeout_s and sum(work.nbytes for work in works) < _TOGETHER_BYTES
        )

    def _begin(self, source: Source, work: _Work) -> None:
        """Checks a batch and claims its requests' blocks. Does not raise: a defect is the batch's refusal."""
        try:
            self._claim(source, work)
        except Exception as defect:
            log.exception("layer %d from %s", work.batch.layer, source.map.name)
            work.refusal = repr(defect)
            work.copies = Descriptors()
            for _, request in work.claims:
                self._requests.fail(request, work.refusal)
            self._release(source, work)
        work.nbytes = work.copies.nbytes()

    def _claim(self, source: Source, work: _Work) -> None:
        batch = work.batch
        try:
            self._planner.check_batch(source.map, batch)
        except PullRefused as refusal:
            work.refusal = str(refusal)
            for entry in batch.entries:
                self._requests.refuse(entry, source.map.part.member, source, work.refusal)
            return
        wait_until = min(work.lease_end, time.monotonic() + self._registration_wait_s)
        for entry in batch.entries:
            try:
                request = self._requests.claim(entry, batch.member, batch.members, source, wait_until)
            except PullRefused as error:
                work.errors[entry.request_id] = str(error)
                continue
            work.claims.append((entry, request))
            try:
                self._requests.check_order(request, entry, batch.member, batch.layer)
                planned = self._planner.entry(
                    source.map, batch.layer, entry, request.main_blocks, request.indexer_blocks
                )
            except PullRefused as error:
                work.errors[entry.request_id] = str(error)
                self._requests.fail(request, str(error))
                work.claims.pop()
                self._requests.ended(request)
                continue
            work.copies.extend(planned)

    def _carry_out(
        self,
        source: Source,
        works: Sequence[_Work],
        answer: Callable[[Reply], None],
        meanwhile: Meanwhile,
    ) -> None:
        """Those still to be read alone come last, and with them the batch that ends a request of theirs."""
        alone = self._copy_together(source, [work for work in works if work.nbytes], meanwhile)
        unread = {entry.request_id for work in alone for entry, _ in work.claims}
        for work in sorted(works, key=lambda work: work in alone or not unread.isdisjoint(work.batch.finished)):
            if work in alone:
                self._copy(source, work, meanwhile)
            for entry, request in work.claims:
                error = work.problem or self._account(work.batch, entry, request)
                if error is not None:
                    self._requests.fail(request, error)
                    work.errors[entry.request_id] = error
            self._release(source, work)
            reply, work.answered = self._reply(source, work), True
            answer(reply)

    def _reply(self, source: Source, work: _Work) -> Reply:
        batch = work.batch
        if work.refusal is not None:
            self._counts.add(failures=1)
            return wire_pb2.ReadFailed(sequence=batch.sequence, error=work.refusal)
        if not work.errors:
            self._counts.add(batches=1)
            return wire_pb2.ReadDone(sequence=batch.sequence)
        self._counts.add(failures=1)
        for request_id, text in work.errors.items():
            log.warning("request %s: layer %d from %s: %s", request_id, batch.layer, source.map.name, text)
        named = [wire_pb2.RequestError(request_id=name, error=text) for name, text in work.errors.items()]
        return wire_pb2.ReadFailed(sequence=batch.sequence, requests=named)

    def _account(self, batch: wire_pb2.ReadReady, entry: wire_pb2.ReadEntry, request: PullRequest) -> str | None:
        """The entry was read. Returns what is missing if the contributor says that this was all."""
        self._requests.arrived(request, entry, batch.member, batch.layer)
        return self._requests.finish(request, batch.member) if entry.request_id in batch.finished else None

    def _copy_together(self, source: Source, works: Sequence[_Work], meanwhile: Meanwhile) -> list[_Work]:
        """Reads several in one go. Returns what that does not settle, to be read alone: each fails for itself only."""
        left = min((work.lease_end for work in works), default=0.0) - time.monotonic()
        if len(works) < 2 or left < self._read_timeout_s or source.lost is not None:
            return [*works]
        return self._attempt(source, works, left, meanwhile)

    def _copy(self, source: Source, work: _Work, meanwhile: Meanwhile) -> None:
        """Tries until it is settled, at least once; sets the work's problem: why its requests must not use what was
        copied, or None."""
        work.problem = work.problem or "the lease ended before the read could begin"
        for pause in (self._pauses[1:] or self._pauses) if work.tried else self._pauses:
            left = work.lease_end - time.monotonic() - pause
            if source.lost is not None or left <= 0:
                break
            if pause:  # a sleep of 0 s takes 60 us
                time.sleep(pause)
            self._counts.add(read_retries=int(work.tried))
            if not self._attempt(source, [work], left, meanwhile):
                break
        if work.problem is not None:
            work.problem = source.lost or work.problem

    def _attempt(self, source: Source, works: Sequence[_Work], left_s: float, meanwhile: Meanwhile) -> list[_Work]:
        """Reads all of these, then their generations; sets their problems. Returns those worth another attempt."""
        copies = Descriptors()
        for work in works:
            work.tried = True
            copies.extend(work.copies)
        try:
            words = self._words(source, [work.batch.slot for work in works])
            timeout_s = min(self._read_timeout_s * len(works), left_s)
            stats = self._read(source, copies.copies(), timeout_s, words, meanwhile)
        except Exception as error:  # whatever the engine raises costs these batches, not the thread
            for work in works:
                work.problem = f"{_what(source, work)} failed: {error}"
            return [*works] if self._engine.idle(source.map.session_id) else []
        self._counts.add(bytes_pulled=stats.bytes, descriptors=stats.descriptors_before, reads=stats.descriptors_after)
        again = []
        for work, generation in zip(works, (ctypes.c_uint64 * len(works)).from_address(source.scratch), strict=True):
            work.problem = self._stale(work.batch, generation, _what(source, work))
            if work.problem is None and (damaged := work.copies.damaged()):
                self._counts.add(wrong_checksums=damaged)
                work.problem = f"{_what(source, work)}: {damaged} of {len(work.copies.sums)} checksums are wrong"
                again.append(work)
        return again

    def _stale(self, batch: wire_pb2.ReadReady, generation: int, what: str) -> str | None:
        """Judges a copy by the slot's generation after it: returns why it must be thrown away, or None."""
        if generation == batch.generation:
            return None
        self._counts.add(stale_generation=1)
        return (
            f"{what}: prefill had given up waiting and reused slot {batch.slot} "
            f"(generation {generation}, announced {batch.generation})"
        )

    @staticmethod
    def _words(source: Source, slots: Sequence[int]) -> Copies:
        """The generations of these slots, to the source's scratch memory."""
        local = [source.scratch + WORD_BYTES * place for place in range(len(slots))]
        return Copies(local, [source.map.generation_word(slot) for slot in slots], [WORD_BYTES] * len(slots))

    def _read(
        self,
        source: Source,
        copies: Copies,
        timeout_s: float,
        then: Copies | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> ReadStats:
        session = source.map.session_id
        if source.suspect:
            if not source.alive(min(timeout_s, _ALIVE_S)):
                raise ConnectionError(f"{source.map.name} gives no sign of life")
            if self._engine.idle(session):
                self._engine.forget(session)
        source.suspect = True
        stats = self._engine.read(session, copies, deadline_s=timeout_s, then=then, meanwhile=meanwhile)
        source.suspect = False
        return stats

    def _release(self, source: Source, work: _Work) -> None:
        """The batch's reads are over, or wait in quarantine for the engine. Idempotent."""
        if not work.claims:
            return
        requests = [request for _, request in work.claims]
        work.claims = []
        if self._engine.idle(source.map.session_id):
            for request in requests:
                self._requests.ended(request)
        else:
            with self._lock:
                self._abandoned += [(source.map.session_id, request) for request in requests]


def _bears_upon(batch: wire_pb2.ReadReady, later: wire_pb2.ReadReady) -> bool:
    """Whether the later one continues the batch's layer of a request, or comes after the end of one."""
    if batch.layer != later.layer and not batch.finished:
        return False
    common = {entry.request_id for entry in batch.entries} & {entry.request_id for entry in later.entries}
    return bool(common) and (batch.layer == later.layer or not common.isdisjoint(batch.finished))


def _what(source: Source, work: _Work) -> str:
    return f"reading {work.nbytes} bytes of layer {work.batch.layer} from {source.map.name}"
