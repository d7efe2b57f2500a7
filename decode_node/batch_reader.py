"""Carries out one batch: validate, copy, check the generation, account. No sockets here."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.v1 import wire_pb2

from decode_node.pull_plan import WORD_BYTES, Descriptors, PullPlanner, PullRefused, SourceMap
from decode_node.pull_requests import PullRequest, PullRequests

log = logging.getLogger(__name__)
_ALIVE_S = 5.0  # longest wait for a sign of life before a link is opened
_FIRST_PAUSE_S = 0.05  # before a failed read is tried again; each further pause is twice as long


class ReadStats(Protocol):
    """What one engine read did."""

    @property
    def bytes(self) -> int: ...
    @property
    def descriptors_before(self) -> int: ...
    @property
    def descriptors_after(self) -> int: ...


class ReadEngine(Protocol):
    """What the puller needs of MemFabricEngine."""

    def read(
        self, session_id: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], *, deadline_s: float
    ) -> ReadStats:
        """Raises when not all bytes have arrived within ``deadline_s`` seconds."""
        ...

    def idle(self, session_id: str) -> bool:
        """False while a read given up at its deadline may still write into local memory."""
        ...

    def forget(self, session_id: str) -> None:
        """The next read of this session opens a new link; one that missed a deadline refuses all reads until then."""
        ...


@dataclass(frozen=True, slots=True)
class PullCounters:
    bytes_pulled: int = 0
    descriptors: int = 0  # copies planned
    reads: int = 0  # copies made, after merging adjacent ones
    batches: int = 0  # read and acknowledged without any error
    failures: int = 0  # batches with an error for at least one request
    read_retries: int = 0  # attempts after the first one
    wrong_checksums: int = 0  # each is read again
    stale_generation: int = 0  # batches copied and thrown away
    duplicate_batches: int = 0  # ignored
    bad_messages: int = 0
    lost_sources: int = 0


class Counts:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._values.update(amounts)

    def snapshot(self) -> PullCounters:
        with self._lock:
            return PullCounters(**self._values)


@dataclass(eq=False, slots=True)
class Source:
    """A prefill rank on one connection."""

    map: SourceMap
    scratch: int  # address of a word that only reads from this source write
    alive: Callable[[float], bool]  # whether its process answers within so many seconds
    suspect: bool = True  # the engine's link to it may be unusable: it is a new peer, or its last read failed
    lost: str | None = None  # why nothing more is to be read from it


class BatchReader:
    """Reads batches; ``read`` may run for several sources at once, but for one batch of a source at a time.

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
            self._read_word(source, 0, timeout_s)
        except Exception as error:
            return f"{self._planner.name} cannot read memory of {source.map.name} ({source.map.session_id}): {error}"
        return None

    def read(
        self, source: Source, batch: wire_pb2.ReadReady, received_at: float
    ) -> wire_pb2.ReadDone | wire_pb2.ReadFailed:
        """``received_at``: monotonic seconds. Never raises for what the peer sent or the engine did."""
        try:
            self._planner.check_batch(source.map, batch)
        except PullRefused as refusal:
            self._counts.add(failures=1)
            for entry in batch.entries:
                self._requests.refuse(entry, source.map.part.member, source, str(refusal))
            return wire_pb2.ReadFailed(sequence=batch.sequence, error=str(refusal))
        lease_end = received_at + batch.lease_ms / 1000
        claims, errors, copies = self._claim(source, batch, lease_end)
        try:
            why = self._copy(source, batch, copies, lease_end) if copies.sizes else None
            for entry, request in claims:
                error = why or self._account(batch, entry, request)
                if error is not None:
                    self._requests.fail(request, error)
                    errors[entry.request_id] = error
        finally:
            self._release(source, [request for _, request in claims])
        if not errors:
            self._counts.add(batches=1)
            return wire_pb2.ReadDone(sequence=batch.sequence)
        self._counts.add(failures=1)
        for request_id, text in errors.items():
            log.warning("request %s: layer %d from %s: %s", request_id, batch.layer, source.map.name, text)
        named = [wire_pb2.RequestError(request_id=name, error=text) for name, text in errors.items()]
        return wire_pb2.ReadFailed(sequence=batch.sequence, requests=named)

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

    def _claim(
        self, source: Source, batch: wire_pb2.ReadReady, lease_end: float
    ) -> tuple[list[tuple[wire_pb2.ReadEntry, PullRequest]], dict[str, str], Descriptors]:
        claims: list[tuple[wire_pb2.ReadEntry, PullRequest]] = []
        errors: dict[str, str] = {}
        copies = Descriptors()
        wait_until = min(lease_end, time.monotonic() + self._registration_wait_s)
        for entry in batch.entries:
            try:
                request = self._requests.claim(entry, batch.member, batch.members, source, wait_until)
            except PullRefused as error:
                errors[entry.request_id] = str(error)
                continue
            try:
                self._requests.check_order(request, entry, batch.member, batch.layer)
                planned = self._planner.entry(
                    source.map, batch.layer, entry, request.main_blocks, request.indexer_blocks
                )
            except PullRefused as error:
                errors[entry.request_id] = str(error)
                self._requests.fail(request, str(error))
                self._requests.ended(request)
                continue
            copies.extend(planned)
            claims.append((entry, request))
        return claims, errors, copies

    def _account(self, batch: wire_pb2.ReadReady, entry: wire_pb2.ReadEntry, request: PullRequest) -> str | None:
        """The entry was read. Returns what is missing if the contributor says that this was all."""
        self._requests.arrived(request, entry, batch.member, batch.layer)
        return self._requests.finish(request, batch.member) if entry.request_id in batch.finished else None

    def _copy(self, source: Source, batch: wire_pb2.ReadReady, copies: Descriptors, lease_end: float) -> str | None:
        """Returns why the batch's requests must not use what was copied, or None."""
        what = f"reading {sum(copies.sizes)} bytes of layer {batch.layer} from {source.map.name}"
        problem = "the lease ended before the read could begin"
        for attempt, pause in enumerate(self._pauses):
            left = lease_end - time.monotonic() - pause
            if source.lost is not None or left <= 0:
                break
            if pause:  # a sleep of 0 s takes 60 us
                time.sleep(pause)
            self._counts.add(read_retries=min(attempt, 1))
            try:
                stats = self._read(source, copies, min(self._read_timeout_s, left))
                generation = self._read_word(source, batch.slot, self._read_timeout_s)
            except Exception as error:  # whatever the engine raises costs this batch, not the thread
                problem = f"{what} failed: {error}"
                if self._engine.idle(source.map.session_id):
                    continue
                break
            self._counts.add(
                bytes_pulled=stats.bytes, descriptors=stats.descriptors_before, reads=stats.descriptors_after
            )
            if (stale := self._stale(batch, generation, what)) is not None:
                return stale
            damaged = copies.damaged()
            if not damaged:
                return None
            self._counts.add(wrong_checksums=damaged)
            problem = f"{what}: {damaged} of {len(copies.sums)} checksums are wrong"
        return source.lost or problem

    def _stale(self, batch: wire_pb2.ReadReady, generation: int, what: str) -> str | None:
        """Judges a copy by the slot's generation after it: returns why it must be thrown away, or None."""
        if generation == batch.generation:
            return None
        self._counts.add(stale_generation=1)
        return (
            f"{what}: prefill had given up waiting and reused slot {batch.slot} "
            f"(generation {generation}, announced {batch.generation})"
        )

    def _read_word(self, source: Source, slot: int, timeout_s: float) -> int:
        word = Descriptors([source.scratch], [source.map.generation_word(slot)], [WORD_BYTES])
        self._read(source, word, timeout_s)
        return ctypes.c_uint64.from_address(source.scratch).value

    def _read(self, source: Source, copies: Descriptors, timeout_s: float) -> ReadStats:
        session = source.map.session_id
        if source.suspect:
            if not source.alive(min(timeout_s, _ALIVE_S)):
                raise ConnectionError(f"{source.map.name} gives no sign of life")
            if self._engine.idle(session):
                self._engine.forget(session)
        source.suspect = True
        stats = self._engine.read(session, copies.local, copies.remote, copies.sizes, deadline_s=timeout_s)
        source.suspect = False
        return stats

    def _release(self, source: Source, requests: Sequence[PullRequest]) -> None:
        """The batch's reads are over, or wait in quarantine for the engine."""
        if self._engine.idle(source.map.session_id):
            for request in requests:
                self._requests.ended(request)
        else:
            with self._lock:
                self._abandoned += [(source.map.session_id, request) for request in requests]
