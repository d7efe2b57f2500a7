"""A decode rank's end of the transfers: listens for READ_READY, pulls, answers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq
from sluice.v1 import registry_pb2, wire_pb2

from decode_node.batch_queue import Announced, BatchQueue
from decode_node.batch_reader import (
    SOURCE_SCRATCH_BYTES,
    BatchReader,
    Source,
)
from decode_node.liveness import Liveness
from decode_node.pull_counters import Counts, PullCounters
from decode_node.pull_plan import LayerMemory, PullPlanner, PullRefused
from decode_node.pull_requests import PullRequest, PullRequests
from decode_node.read_engine import ReadEngine
from decode_node.sequences import Sequences
from transfer.outlet import Outlet, OutletFactory
from transfer.wire import Body, Wakeup, WireError, WireVersionError, decode, has_input, monitor_events, router

log = logging.getLogger(__name__)
MAX_SOURCES = 64
_IDLE_POLL_S = 1.0
_QUARANTINE_POLL_S = 0.05
_JOIN_S = 5.0
_OPEN_SHARE = 0.8  # of the hand-shake's deadline, so that prefill hears why it failed before it gives up


@dataclass(eq=False, slots=True)
class _Peer:
    """A connection whose Hello was in order, with the thread that reads its batches in order."""

    identity: bytes
    descriptor: int  # of its TCP connection
    source: Source
    liveness: Liveness
    sequences: Sequences = field(default_factory=Sequences)
    batches: BatchQueue = field(default_factory=BatchQueue)
    thread: threading.Thread | None = None


class Puller:
    """Pulls the KV of expected requests into this rank's memory; see PullRequests for when a request is over.

    One thread owns the ROUTER socket; every source has a thread of its own, so that sources are read side by side, the
    batches of one source in order, and a source that hangs holds up nobody else. A malformed message, an unknown
    request or a dead prefill process costs the requests concerned and no thread.
    """

    def __init__(
        self,
        *,
        bind: str,
        worker_id: str,
        epoch: str,
        layout: registry_pb2.KvLayout,
        tp_rank: int,
        tp_size: int,
        memory: Sequence[LayerMemory],
        engine: ReadEngine,
        scratch_address: int,
        read_timeout_s: float,
        read_retries: int,
        handshake_timeout_s: float,
        on_terminal: Callable[[str, int, str | None], None],
        on_quiescent: Callable[[str], None],
        max_sources: int = MAX_SOURCES,
        registration_wait_s: float = 2.0,
        outlet: OutletFactory = Outlet,
    ) -> None:
        """Binds ``bind`` (``tcp://host:port``, port ``*`` for a free one); OSError when that fails.

        ``scratch_address``: ``SOURCE_SCRATCH_BYTES * max_sources`` bytes of host memory, this rank's alone, that the
        engine may write to.
        The callbacks run on the puller's threads (``on_quiescent`` also inside ``release``) and must be short.
        """
        self._worker_id = worker_id
        self._epoch = epoch
        self._handshake_timeout_s = handshake_timeout_s
        self._max_sources = max_sources
        self._planner = PullPlanner(layout, memory, name=worker_id, tp_rank=tp_rank, tp_size=tp_size)
        self._requests = PullRequests(self._planner.layers_owed_by, on_terminal, on_quiescent)
        self._counts = Counts()
        self._reader = BatchReader(
            engine,
            self._planner,
            self._requests,
            self._counts,
            read_timeout_s=read_timeout_s,
            read_retries=read_retries,
            registration_wait_s=registration_wait_s,
        )
        self._engine = engine
        self._scratch = [scratch_address + SOURCE_SCRATCH_BYTES * index for index in range(max_sources)]
        self._peers: dict[bytes, _Peer] = {}
        self._leaving: list[_Peer] = []  # lost, but their thread may still be in a read
        self._replies: deque[tuple[bytes, Body]] = deque()
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._wakeup = Wakeup()
        self._outlet = outlet(self._wakeup.set)
        self._context: zmq.Context[Any] = zmq.Context()
        self._bound = router(self._context, bind, zmq.EVENT_DISCONNECTED)
        self._address: str = self._bound.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        for polled in (*self._bound, self._wakeup.fileno()):
            self._poller.register(polled, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="puller", daemon=True)

    @property
    def address(self) -> str:
        """Where prefill reaches this rank: ``tcp://host:port``."""
        return self._address

    @property
    def failure(self) -> str | None:
        """Why the socket's thread has died; None while all is well."""
        return self._failure

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops listening and waits a few seconds for reads to end; no callback is made for what is left."""
        self._stopping.set()
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def counters(self) -> PullCounters:
        return self._counts.snapshot()

    def pending(self) -> int:
        """Requests expected, received but not released, or in quarantine."""
        return len(self._requests)

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
    ) -> None:
        """Lets prefill fill these blocks; ``on_terminal`` tells when that is over.

        ``main_blocks``, ``indexer_blocks``: the request's blocks in order, in host pool and indexer cache.
        ``contributors``: prefill TP / decode TP. ``wanted``: which of the blocks must arrive. ``lease_s``: longest time
        without any sign of prefill. Raises ValueError for a block that does not exist, or an id still in use.
        """
        self._planner.check_blocks(request_id, main_blocks, indexer_blocks)
        if contributors < 1 or not 0 <= wanted.start <= wanted.stop <= len(main_blocks) or wanted.step != 1:
            raise ValueError(
                f"request {request_id}: {contributors} contributors, {wanted} of {len(main_blocks)} blocks do not fit"
            )
        self._requests.expect(
            PullRequest(
                request_id,
                generation,
                tuple(main_blocks),
                tuple(indexer_blocks),
                contributors,
                wanted,
                lease_s,
                time.monotonic() + lease_s,
            )
        )
        self._wakeup.set()

    def release(self, request_id: str) -> None:
        """Forgets a request, over or not. ``on_quiescent`` says, perhaps within this call, that its blocks are free."""
        self._requests.release(request_id)

    # Below: the socket's thread.

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._poll()
                self._wakeup.clear()
                self._receive()
                self._drop_lost()
                self._send_replies()
                self._outlet.flush()
                self._requests.expire(time.monotonic())
                self._reader.settle()
                self._reap()
        except Exception as error:
            log.exception("puller's thread ends")
            self._failure = f"puller of {self._worker_id} failed: {error!r}"
        finally:
            self._shut_down()

    def _poll(self) -> None:
        now = time.monotonic()
        wait = _QUARANTINE_POLL_S if self._leaving or self._reader.quarantined() else _IDLE_POLL_S
        expiry = self._requests.next_expiry()
        if expiry is not None:
            wait = min(wait, max(0.0, expiry - now))
        self._poller.poll(int(wait * 1000) + 1)

    def _receive(self) -> None:
        while has_input(self._bound.socket):
            frames = self._bound.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            # Connections that ended before this message was read are dropped first: their descriptor may be this one's.
            self._drop_lost()
            identity = frames[0].bytes
            try:
                body = decode(b"".join(frame.bytes for frame in frames[1:]))
            except WireError as error:
                self._counts.add(bad_messages=1)
                log.warning("message of %s ignored: %s", self._name(identity), error)
                if isinstance(error, WireVersionError) and identity not in self._peers:
                    self._refuse(identity, str(error))
                continue
            self._handle(identity, frames[-1].get(zmq.SRCFD), body)

    def _handle(self, identity: bytes, descriptor: int, body: Body) -> None:
        peer = self._peers.get(identity)
        if isinstance(body, wire_pb2.Hello) and peer is None:
            self._welcome(identity, descriptor, body)
        elif isinstance(body, wire_pb2.Pong) and peer is not None:
            peer.liveness.heard(body.number)
        elif isinstance(body, wire_pb2.ReadReady):
            if peer is None:
                error = f"no hand-shake was made with {self._worker_id} on this connection"
                self._replies.append((identity, wire_pb2.ReadFailed(sequence=body.sequence, error=error)))
            elif peer.sequences.is_new(body.sequence):
                peer.batches.put(Announced(body, time.monotonic() + body.lease_ms / 1000))
            else:
                self._counts.add(duplicate_batches=1)
        else:
            self._counts.add(bad_messages=1)
            log.warning("%s of %s ignored: not expected", type(body).__name__, self._name(identity))

    def _welcome(self, identity: bytes, descriptor: int, hello: wire_pb2.Hello) -> None:
        if hello.expected_epoch != self._epoch:
            self._refuse(
                identity, f"epoch {hello.expected_epoch!r} is expected here, but {self._worker_id} is {self._epoch!r}"
            )
            return
        try:
            source_map = self._planner.source(hello)
        except PullRefused as error:
            self._refuse(identity, str(error))
            return
        if not self._scratch:
            self._refuse(identity, f"{self._worker_id} serves {self._max_sources} prefill ranks already, its limit")
            return
        liveness = Liveness(lambda number: self._post(identity, wire_pb2.Ping(number=number)))
        source = Source(source_map, self._scratch.pop(), liveness.confirmed)
        peer = _Peer(identity, descriptor, source, liveness)
        self._peers[identity] = peer
        peer.thread = threading.Thread(target=self._pull, args=(peer,), name=f"pull-{source_map.name}", daemon=True)
        peer.thread.start()

    def _refuse(self, identity: bytes, error: str) -> None:
        log.warning("hand-shake refused: %s", error)
        self._replies.append((identity, wire_pb2.HelloReply(error=error, epoch=self._epoch)))

    def _send_replies(self) -> None:
        while self._replies:
            identity, body = self._replies.popleft()
            with contextlib.suppress(zmq.ZMQError):  # the peer has gone, and then nobody waits for the answer
                self._outlet.send(self._bound.socket, body, to=[identity])

    def _drop_lost(self) -> None:
        for event in monitor_events(self._bound.monitor):
            for peer in [peer for peer in self._peers.values() if peer.descriptor == event.value]:
                self._drop(peer, f"{peer.source.map.name} (epoch {peer.source.map.epoch}) disconnected")
                self._counts.add(lost_sources=1)

    def _drop(self, peer: _Peer, reason: str) -> None:
        log.warning("source lost: %s", reason)
        del self._peers[peer.identity]
        peer.source.lost = reason
        peer.batches.close()
        self._leaving.append(peer)
        self._requests.fail_source(peer.source, peer.source.map.part.member, reason)

    def _reap(self) -> None:
        """Takes back the scratch memory of lost sources that write into them no more."""
        for peer in list(self._leaving):
            gone = peer.thread is None or not peer.thread.is_alive()
            if gone and self._engine.idle(peer.source.map.session_id):
                self._leaving.remove(peer)
                self._scratch.append(peer.source.scratch)

    def _name(self, identity: bytes) -> str:
        peer = self._peers.get(identity)
        return peer.source.map.name if peer is not None else f"an unknown peer {identity.hex()}"

    def _shut_down(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer, f"{self._worker_id} is stopping")
        self._send_replies()
        end = time.monotonic() + _JOIN_S / 2
        for peer in self._leaving:
            if peer.thread is not None:
                peer.thread.join(max(0.0, end - time.monotonic()))
        self._bound.close()
        self._wakeup.close()
        self._context.term()

    # Below: a source's thread.

    def _pull(self, peer: _Peer) -> None:
        error = self._reader.open(peer.source, _OPEN_SHARE * self._handshake_timeout_s)
        self._post(peer.identity, wire_pb2.HelloReply(error=error or "", epoch=self._epoch))
        while (first := peer.batches.take()) is not None:
            self._reader.read(peer.source, first, peer.batches, partial(self._post, peer.identity))

    def _post(self, identity: bytes, body: Body) -> None:
        self._replies.append((identity, body))
        self._wakeup.set()
