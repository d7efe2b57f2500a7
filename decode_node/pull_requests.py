"""The requests a decode rank is receiving: what has arrived, which reads are in flight, when each one is over."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sluice.v1 import wire_pb2

from decode_node.pull_plan import PullRefused

_REMEMBERED = 8192  # released requests, whose late batches are refused without waiting


@dataclass(eq=False, slots=True)
class PullRequest:
    """One reservation. Owned by PullRequests; readers use its block lists only."""

    request_id: str
    generation: int
    main_blocks: Sequence[int]
    indexer_blocks: Sequence[int]
    contributors: int
    wanted: range
    lease_s: float
    silent_until: float
    sources: dict[int, object] = field(default_factory=dict)  # by member: the only source accepted for it
    arrived: dict[tuple[int, int], int] = field(default_factory=dict)  # (member, layer) -> end of what was read
    finished: set[int] = field(default_factory=set)  # members
    begun_again: dict[int, int] = field(default_factory=dict)  # by member: how often, as far as was heard
    in_flight: int = 0
    terminal: bool = False
    error: str | None = None
    released: bool = False


class PullRequests:
    """Keeps every request expected on this rank until its blocks are free of readers.

    Invariants:

    * Terminal once: ``on_terminal`` is called exactly once per expected request, unless it is released before (a call
      under way at that moment may still arrive; its generation tells what it is about). Without an error only when
      every contributor has finished and every wanted block of every layer it owes has been read.
    * Begun again: rows read before prefill began a request again never count as read, and a request is complete only
      when all contributors have begun it equally often (test_what_was_read_before_a_new_beginning_does_not_count).
    * Quarantine: ``on_quiescent`` is called exactly once per release, and only when no read into the request's blocks
      is in flight any more, so that its blocks can be given to another request.
    * No read begins for a request which is released, failed, of another generation, or unknown.

    Thread safe. Callbacks run on the thread that caused them, without a lock held.
    """

    def __init__(
        self,
        layers_owed_by: Callable[[int], Iterable[int]],
        on_terminal: Callable[[str, int, str | None], None],
        on_quiescent: Callable[[str], None],
    ) -> None:
        self._layers_owed_by = layers_owed_by
        self._on_terminal = on_terminal
        self._on_quiescent = on_quiescent
        self._changed = threading.Condition()
        self._requests: dict[str, PullRequest] = {}
        self._released: OrderedDict[str, int] = OrderedDict()  # newest released generation

    def __len__(self) -> int:
        with self._changed:
            return len(self._requests)

    def expect(self, request: PullRequest) -> None:
        """Raises ValueError when the id is expected already or still in quarantine."""
        with self._changed:
            if request.request_id in self._requests:
                raise ValueError(f"request {request.request_id} is still expected or has reads in flight")
            self._requests[request.request_id] = request
            self._changed.notify_all()

    def release(self, request_id: str) -> None:
        """Forgets a request as soon as no read into its blocks is in flight; ``on_quiescent`` tells when."""
        with self._changed:
            request = self._requests.get(request_id)
            if request is not None:
                if request.released:
                    return
                request.released = True
                self._released[request_id] = request.generation
                self._released.move_to_end(request_id)
                while len(self._released) > _REMEMBERED:
                    self._released.popitem(last=False)
                self._changed.notify_all()
        if request is None:
            self._on_quiescent(request_id)
        else:
            self._settle_release(request)

    def claim(
        self, entry: wire_pb2.ReadEntry, member: int, members: int, source: object, wait_until: float
    ) -> PullRequest:
        """Begins a read for this entry; it must be followed by ``ended``.

        A request not expected yet is waited for until ``wait_until`` (monotonic seconds). Raises PullRefused.
        """
        with self._changed:
            request = self._await(entry, wait_until)
            if request.error is not None:
                raise PullRefused(f"the request has failed already: {request.error}")
            if members != request.contributors:
                raise PullRefused(f"{members} contributors, but decode expects {request.contributors}")
            if request.sources.setdefault(member, source) is not source:
                raise PullRefused(f"contributor {member} is already another prefill process")
            self._begin_again(request, member, entry.begun_again)
            if member in request.finished:
                raise PullRefused(f"contributor {member} has declared this request finished")
            request.in_flight += 1
            request.silent_until = time.monotonic() + request.lease_s
            return request

    def goes_on(self, entry: wire_pb2.ReadEntry, member: int) -> bool:
        """Whether the entry is of a request expected now, and of the beginning its member is at: one of a batch whose
        ``claim`` neither waits nor discards what other batches have brought."""
        with self._changed:
            request = self._requests.get(entry.request_id)
            return (
                request is not None
                and request.generation == entry.destination_generation
                and request.begun_again.get(member, entry.begun_again) == entry.begun_again
            )

    def check_order(self, request: PullRequest, entry: wire_pb2.ReadEntry, member: int, layer: int) -> None:
        """Raises PullRefused when a member left out blocks of a layer. (It may send some twice.)"""
        with self._changed:
            end = request.arrived.get((member, layer), request.wanted.start)
        if entry.main_blocks and entry.main_start > end:
            raise PullRefused(f"blocks {end}..{entry.main_start - 1} of layer {layer} were never announced")

    def ended(self, request: PullRequest) -> None:
        """No byte of the read begun by ``claim`` moves any more."""
        with self._changed:
            request.in_flight -= 1
        self._settle_release(request)

    def arrived(self, request: PullRequest, entry: wire_pb2.ReadEntry, member: int, layer: int) -> None:
        """The entry was read well. Called between ``claim`` and ``ended``."""
        with self._changed:
            if entry.main_blocks:
                end = entry.main_start + len(entry.main_blocks)
                key = member, layer
                request.arrived[key] = max(end, request.arrived.get(key, request.wanted.start))
            request.silent_until = time.monotonic() + request.lease_s

    def finish(self, request: PullRequest, member: int) -> str | None:
        """This member will send nothing more, and all it sent was read.

        Returns what is missing, and then changes nothing: the caller fails the request.
        """
        with self._changed:
            error = self._missing(request, member)
            if error is None:
                request.finished.add(member)
            complete = error is None and len(request.finished) == request.contributors
            together = len({request.begun_again.get(each, 0) for each in request.finished}) == 1
            over = complete and together and self._end(request)
        if over:
            self._on_terminal(request.request_id, request.generation, None)
        return error

    def fail(self, request: PullRequest, error: str) -> None:
        """The request is over with this error, unless it is over already."""
        with self._changed:
            over = self._end(request, error)
        if over:
            self._on_terminal(request.request_id, request.generation, error)

    def fail_source(self, source: object, member: int, error: str) -> None:
        """A source is gone: fails the requests that still need something of it."""
        with self._changed:
            waiting = [
                request
                for request in self._requests.values()
                if request.sources.get(member) is source and member not in request.finished
            ]
        for request in waiting:
            self.fail(request, error)

    def refuse(self, entry: wire_pb2.ReadEntry, member: int, source: object, error: str) -> None:
        """The batch with this entry will not be read: the request fails, unless it is none of this source's."""
        with self._changed:
            request = self._requests.get(entry.request_id)
            concerned = (
                request is not None
                and request.generation == entry.destination_generation
                and request.sources.get(member, source) is source
            )
        if request is not None and concerned:
            self.fail(request, error)

    def expire(self, now: float) -> None:
        """Fails the requests of which nothing was heard for their lease."""
        with self._changed:
            silent = [
                request
                for request in self._requests.values()
                if now >= request.silent_until and not request.terminal and not request.in_flight
            ]
        for request in silent:
            members = set(range(request.contributors)) - request.finished
            self.fail(
                request, f"prefill sent nothing for {request.lease_s:g} s; missing contributors: {sorted(members)}"
            )

    def next_expiry(self) -> float | None:
        """Earliest end of a lease, in monotonic seconds."""
        with self._changed:
            waiting = [each for each in self._requests.values() if not each.terminal and not each.in_flight]
            return min((each.silent_until for each in waiting), default=None)

    def _await(self, entry: wire_pb2.ReadEntry, wait_until: float) -> PullRequest:
        name, generation = entry.request_id, entry.destination_generation
        while True:
            request = self._requests.get(name)
            if request is not None and request.generation == generation and not request.released:
                return request
            newest = request.generation if request is not None else self._released.get(name, -1)
            if generation <= newest:
                raise PullRefused(f"destination generation {generation} is over (newest: {newest})")
            left = wait_until - time.monotonic()
            if left <= 0:
                raise PullRefused(f"unknown request: no destination with generation {generation} is reserved")
            self._changed.wait(left)

    @staticmethod
    def _begin_again(request: PullRequest, member: int, times: int) -> None:
        """A member's entry of its beginning number `times`. Raises PullRefused when there was a later one."""
        known = request.begun_again.setdefault(member, times)
        if times < known:
            raise PullRefused(f"contributor {member} has begun this request again since (beginning {times} of {known})")
        if times > known:
            request.begun_again[member] = times
            request.finished.discard(member)
            request.arrived = {key: end for key, end in request.arrived.items() if key[0] != member}

    def _missing(self, request: PullRequest, member: int) -> str | None:
        for layer in self._layers_owed_by(member):
            end = request.arrived.get((member, layer), request.wanted.start)
            if end < request.wanted.stop:
                blocks = f"blocks {end}..{request.wanted.stop - 1} of layer {layer}"
                return f"contributor {member} finished, but {blocks} are missing"
        return None

    def _end(self, request: PullRequest, error: str | None = None) -> bool:
        """True when this ends the request and somebody wants to know."""
        if request.terminal:
            return False
        request.terminal = True
        request.error = error
        return not request.released

    def _settle_release(self, request: PullRequest) -> None:
        with self._changed:
            quiescent = request.released and not request.in_flight and self._requests.get(request.request_id) is request
            if quiescent:
                del self._requests[request.request_id]
        if quiescent:
            self._on_quiescent(request.request_id)
