"""Tells decode ranks which blocks they may read, and learns when they have read them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq
from sluice.v1 import wire_pb2, worker_pb2

from prefill_node.block_sums import Stamp, no_stamp
from prefill_node.generation import GenerationWords
from prefill_node.link import Endpoint, Link, SourceInfo, TransferRefused
from prefill_node.reuse_gate import Consumer, ReuseGate
from transfer.outlet import Outlet, OutletFactory
from transfer.topology import contributor_of, endpoint_of
from transfer.wire import Wakeup, WireError, decode

log = logging.getLogger(__name__)
_REMEMBERED = 4096  # ended sequences, to tell late and duplicate acknowledgements from unknown ones
_IDLE_POLL_S = 1.0
_MARGIN_S = 1.0  # by which connect() waits longer than the thread which answers it


@dataclass(frozen=True, slots=True)
class PublisherCounters:
    batches: int = 0
    acks: int = 0
    late_acks: int = 0  # of a batch whose reader had been given up
    duplicate_acks: int = 0
    unknown_acks: int = 0
    fenced: int = 0  # batches given up: lease over or endpoint lost
    failed_batches: int = 0  # answered with READ_FAILED
    bad_messages: int = 0


@dataclass(slots=True)
class _Batch:
    """One READ_READY which has not been answered."""

    endpoint: Endpoint
    layer: int
    slot: int
    deadline: float
    requests: list[str]  # still wanted here


@dataclass(slots=True)
class _Outbox:
    """What other threads ask of the publisher's thread."""

    connects: deque[tuple[Endpoint, Future[Endpoint]]] = field(default_factory=deque)
    batches: deque[tuple[Endpoint, wire_pb2.ReadReady]] = field(default_factory=deque)


class Publisher:
    """Publishes one prefill rank's layers; one thread owns all its sockets.

    Invariants:

    * Every batch published has a read consumer in the gate, from before it is sent until it is acknowledged, its lease
      ends, or its endpoint is lost; each of these happens to it exactly once.
    * Acknowledgements count by sequence number and only on the connection their batch was sent on; late, duplicate and
      unknown ones are counted and otherwise ignored.
    * A lost decode rank costs its own requests, at once; other endpoints and this process go on.

    ``on_request_error(request_id, text)`` is called on the publisher's thread or inside ``publish``; it must be short.
    """

    def __init__(
        self,
        source: SourceInfo,
        gate: ReuseGate,
        words: GenerationWords,
        *,
        lease_s: float,
        handshake_timeout_s: float,
        on_request_error: Callable[[str, str], None],
        stamp: Stamp = no_stamp,
        outlet: OutletFactory = Outlet,
    ) -> None:
        """``stamp`` adds checksums to what is going to be announced."""
        self._source = source
        self._stamp = stamp
        self._gate = gate
        self._words = words
        self._lease_s = lease_s
        self._handshake_timeout_s = handshake_timeout_s
        self._on_request_error = on_request_error
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._outbox = _Outbox()
        self._ready: set[Endpoint] = set()
        self._batches: dict[int, _Batch] = {}
        self._last_sequence = 0
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._wakeup = Wakeup()
        self._outlet = outlet(self._wakeup.set)
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._links: dict[Endpoint, tuple[Link, float]] = {}  # with the deadline of its hand-shake; thread's own
        self._ended: OrderedDict[int, Literal["done", "fenced"]] = OrderedDict()  # thread's own
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Fences what is outstanding (its requests get an error) and ends the thread. Idempotent."""
        self._stopping.set()
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    @property
    def failure(self) -> str | None:
        """Why the thread has died; None while all is well. A publisher with a failure refuses everything."""
        return self._failure

    def counters(self) -> PublisherCounters:
        with self._lock:
            return PublisherCounters(**self._counts)

    def outstanding(self) -> int:
        """Batches published and neither acknowledged nor given up."""
        with self._lock:
            return len(self._batches)

    def connect(self, destination: worker_pb2.Destination) -> Endpoint:
        """The decode rank this rank serves at ``destination``, after a hand-shake with it if it is a new peer.

        Blocks for the hand-shake's deadline at the longest. Raises TransferRefused naming the peer and the reason.
        """
        try:
            advertised = endpoint_of(destination, self._source.tp_rank, self._source.tp_size)
            part = contributor_of(self._source.tp_rank, self._source.tp_size, destination.tp_size)
        except ValueError as error:
            raise TransferRefused(str(error)) from None
        endpoint = Endpoint(advertised.address, advertised.epoch, destination.group, *part)
        opened: Future[Endpoint] = Future()
        with self._lock:
            if self._stopping.is_set() or self._failure is not None:
                raise TransferRefused(f"{endpoint}: {self._failure or f'{self._source.worker_id} is stopping'}")
            if endpoint in self._ready:
                return endpoint
            self._outbox.connects.append((endpoint, opened))
        self._wakeup.set()
        try:
            return opened.result(self._handshake_timeout_s + _MARGIN_S)
        except FutureTimeout:
            raise TransferRefused(f"{endpoint}: the publisher's thread does not answer") from None

    def publish(
        self,
        layer: int,
        slot: int,
        endpoint: Endpoint,
        entries: Sequence[wire_pb2.ReadEntry],
        finished: Sequence[str] = (),
    ) -> int | None:
        """Announces blocks of ``layer``, now complete in ``slot``, to one endpoint; does not block.

        ``finished``: requests of this batch for which nothing more will come. Returns the batch's sequence number; None
        when the endpoint is lost, after reporting the error for every request of the batch. Raises ValueError when a
        finished request has no entry (an entry may be without blocks).
        """
        requests = [entry.request_id for entry in entries]
        if missing := sorted(set(finished) - set(requests)):
            raise ValueError(f"layer {layer}: finished requests {missing} have no entry in the batch")
        self._stamp(layer, endpoint, entries)
        deadline = time.monotonic() + self._lease_s
        with self._lock:
            lost = endpoint not in self._ready
            if not lost:
                self._last_sequence += 1
                sequence = self._last_sequence
                self._gate.add(slot, Consumer("read", sequence), deadline)
                self._batches[sequence] = _Batch(endpoint, layer, slot, deadline, requests)
                self._counts["batches"] += 1
                message = wire_pb2.ReadReady(
                    sequence=sequence,
                    layer=layer,
                    slot=slot,
                    generation=self._words[slot],
                    member=endpoint.member,
                    members=endpoint.members,
                    entries=entries,
                    finished=finished,
                )
                self._outbox.batches.append((endpoint, message))
        if lost:
            self._report(requests, f"connection to {endpoint} is lost")
            return None
        self._wakeup.set()
        return sequence

    def drop(self, request_id: str) -> None:
        """The request is over on this side: no error is reported for it any more. Its batches still end as usual."""
        with self._lock:
            for batch in self._batches.values():
                batch.requests = [other for other in batch.requests if other != request_id]

    # Below: the publisher's thread.

    def _run(self) -> None:
        reason = f"{self._source.worker_id} is stopping"
        try:
            while not self._stopping.is_set():
                self._poll()
                self._wakeup.clear()
                self._open_links()
                self._send_batches()
                self._outlet.flush()
                for link, _ in list(self._links.values()):
                    if link.endpoint in self._links:  # not lost meanwhile to a successor at its address
                        self._serve(link)
                self._expire()
        except Exception as error:
            log.exception("publisher's thread ends")
            reason = self._failure = f"publisher of {self._source.worker_id} failed: {error!r}"
        finally:
            self._shut_down(reason)

    def _poll(self) -> None:
        now = time.monotonic()
        wake = now + _IDLE_POLL_S
        with self._lock:
            if self._batches:
                wake = min(wake, min(batch.deadline for batch in self._batches.values()))
        wake = min([wake, *(deadline for link, deadline in self._links.values() if not link.is_open)])
        self._poller.poll(int(max(0.0, wake - now) * 1000) + 1)

    def _open_links(self) -> None:
        while self._outbox.connects:
            endpoint, opened = self._outbox.connects.popleft()
            if endpoint not in self._links:
                try:
                    link = Link(self._context, endpoint, self._source, self._outlet, self._handshake_timeout_s)
                except WireError as error:
                    opened.set_exception(TransferRefused(f"{endpoint}: {error}"))
                    continue
                self._links[endpoint] = link, time.monotonic() + self._handshake_timeout_s
                for polled in link.sockets:
                    self._poller.register(polled, zmq.POLLIN)
            link, _ = self._links[endpoint]
            if link.is_open:
                opened.set_result(endpoint)
            else:
                link.waiters.append(opened)

    def _send_batches(self) -> None:
        while self._outbox.batches:
            endpoint, message = self._outbox.batches.popleft()
            with self._lock:
                batch = self._batches.get(message.sequence)
            if batch is None:
                continue  # fenced while it waited here
            link, _ = self._links[endpoint]
            message.lease_ms = max(0, int((batch.deadline - time.monotonic()) * 1000))
            try:
                link.send(message)
            except WireError as error:
                self._end(message.sequence, "done")
                self._gate.done(batch.slot, Consumer("read", message.sequence), str(error))
                self._report(batch.requests, f"layer {batch.layer} cannot be published to {endpoint}: {error}")

    def _serve(self, link: Link) -> None:
        lost = link.lost()  # asked first: what arrived before the loss is still handled
        for payload in link.received():
            try:
                self._handle(link, payload)
            except WireError as error:
                self._count("bad_messages")
                log.warning("message of %s ignored: %s", link.endpoint, error)
                if not link.is_open:
                    self._lose(link, str(error))
            if link.endpoint not in self._links:
                return
        if lost:
            self._lose(link, "connection lost" if link.is_open else "connection refused")

    def _handle(self, link: Link, payload: bytes) -> None:
        body = decode(payload)
        if isinstance(body, wire_pb2.HelloReply) and not link.is_open:
            refusal = link.accept(body)
            if refusal is not None:
                self._lose(link, refusal)
                return
            for other, _ in list(self._links.values()):
                if other.endpoint.address == link.endpoint.address and other is not link and other.is_open:
                    self._lose(other, f"replaced by a new process with epoch {link.endpoint.epoch!r}")
            with self._lock:
                self._ready.add(link.endpoint)
            for opened in link.waiters:
                opened.set_result(link.endpoint)
        elif isinstance(body, wire_pb2.Ping):
            link.send(wire_pb2.Pong(number=body.number))
        elif isinstance(body, wire_pb2.ReadDone | wire_pb2.ReadFailed) and link.is_open:
            self._acknowledge(link.endpoint, body)
        else:
            raise WireError(f"{type(body).__name__} was not expected")

    def _acknowledge(self, endpoint: Endpoint, body: wire_pb2.ReadDone | wire_pb2.ReadFailed) -> None:
        with self._lock:
            batch = self._batches.get(body.sequence)
        if batch is None or batch.endpoint != endpoint:
            ended = self._ended.get(body.sequence) if batch is None else None
            self._count({"done": "duplicate_acks", "fenced": "late_acks", None: "unknown_acks"}[ended])
            return
        self._end(body.sequence, "done")
        self._gate.done(batch.slot, Consumer("read", body.sequence))
        self._count("acks")
        if isinstance(body, wire_pb2.ReadFailed):
            self._count("failed_batches")
            errors = {named.request_id: named.error for named in body.requests}
            failed = [request for request in batch.requests if not errors or request in errors]
            for request in failed:
                why = errors.get(request) or body.error or "no reason given"
                self._report([request], f"{endpoint} could not read layer {batch.layer}: {why}")

    def _expire(self) -> None:
        now = time.monotonic()
        for link, deadline in list(self._links.values()):
            if not link.is_open and now >= deadline:
                self._lose(link, f"no answer to the hand-shake within {self._handshake_timeout_s:g} s")
        with self._lock:
            overdue = {sequence for sequence, batch in self._batches.items() if now >= batch.deadline}
        self._fence(overdue, f"not acknowledged within the lease of {self._lease_s:g} s")

    def _lose(self, link: Link, reason: str) -> None:
        del self._links[link.endpoint]
        for polled in link.sockets:
            self._poller.unregister(polled)
        link.close()
        with self._lock:
            self._ready.discard(link.endpoint)
            outstanding = {sequence for sequence, batch in self._batches.items() if batch.endpoint == link.endpoint}
        if link.is_open:
            log.warning("%s: %s; %d batches given up", link.endpoint, reason, len(outstanding))
        else:
            for opened in link.waiters:
                opened.set_exception(TransferRefused(f"{link.endpoint}: {reason}"))
        self._fence(outstanding, reason)

    def _fence(self, sequences: set[int], reason: str) -> None:
        if not sequences:
            return
        self._gate.fence(lambda consumer: consumer.ident in sequences, reason)
        failed: dict[str, str] = {}
        for sequence in sorted(sequences):
            batch = self._end(sequence, "fenced")
            self._count("fenced")
            for request in batch.requests:
                failed.setdefault(request, f"layer {batch.layer} to {batch.endpoint}: {reason}")
        for request, text in failed.items():
            self._report([request], text)

    def _end(self, sequence: int, how: Literal["done", "fenced"]) -> _Batch:
        self._ended[sequence] = how
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        with self._lock:
            return self._batches.pop(sequence)

    def _report(self, requests: Iterable[str], text: str) -> None:
        for request in dict.fromkeys(requests):
            try:
                self._on_request_error(request, text)
            except Exception:
                log.exception("request %s: its error %r could not be reported", request, text)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _shut_down(self, reason: str) -> None:
        with self._lock:
            self._stopping.set()
            self._ready.clear()
        for link, _ in list(self._links.values()):
            self._lose(link, reason)
        while self._outbox.connects:
            endpoint, opened = self._outbox.connects.popleft()
            opened.set_exception(TransferRefused(f"{endpoint}: {reason}"))
        self._wakeup.close()
        self._context.term()
