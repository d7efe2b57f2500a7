"""One connection of a prefill rank to one decode rank: hand-shake, messages, loss. Used by the publisher's thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import zmq
from sluice.v1 import registry_pb2, wire_pb2

from transfer.outlet import Outlet
from transfer.wire import Body, dealer, has_input, monitor_events

_LOSS_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_LOSS_EVENTS |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class TransferRefused(RuntimeError):
    """A decode rank cannot be published to; the text names it and, where two values differ, both."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A decode rank as one prefill rank sees it. Another ``epoch`` is another process, even at the same address."""

    address: str
    epoch: str
    group: str
    decode_rank: int
    member: int
    members: int

    def __str__(self) -> str:
        return f"{self.group} rank {self.decode_rank} at {self.address}"


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """Who this prefill rank is and where its layers lie: what it tells in its Hello."""

    worker_id: str
    epoch: str
    session_id: str  # of its MemFabric engine
    tp_rank: int
    tp_size: int
    layout: registry_pb2.KvLayout
    layers: Sequence[wire_pb2.LayerLayout]  # of every layer of the model
    generation_address: int

    def hello(self, expected_epoch: str) -> wire_pb2.Hello:
        return wire_pb2.Hello(
            worker_id=self.worker_id,
            epoch=self.epoch,
            expected_epoch=expected_epoch,
            session_id=self.session_id,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            layout=self.layout,
            layers=self.layers,
            generation_address=self.generation_address,
        )


class Link:
    """A DEALER socket and what its peer answered. Opening -> open -> closed; never opened again. Not thread safe."""

    def __init__(
        self, context: zmq.Context[Any], endpoint: Endpoint, source: SourceInfo, outlet: Outlet, timeout_s: float
    ) -> None:
        """Starts the hand-shake. Raises WireError when the address cannot be used."""
        self.endpoint = endpoint
        self.is_open = False
        self.waiters: list[Future[Endpoint]] = []
        self._outlet = outlet
        self._connection = dealer(context, endpoint.address, timeout_s, _LOSS_EVENTS)
        self.send(source.hello(endpoint.epoch))

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        """To be polled for input."""
        return self._connection.socket, self._connection.monitor

    def send(self, body: Body) -> None:
        """Queues a message; it is lost with the link. Raises WireError when it is too large."""
        with contextlib.suppress(zmq.Again):  # no connection any more, which lost() tells
            self._outlet.send(self._connection.socket, body)

    def received(self) -> Iterator[bytes]:
        """Payloads which have arrived. An empty delimiter frame before one is tolerated."""
        while has_input(self._connection.socket):
            yield b"".join(self._connection.socket.recv_multipart(zmq.NOBLOCK))

    def accept(self, reply: wire_pb2.HelloReply) -> str | None:
        """Handles the answer to our Hello: opens the link, or returns why it stays closed."""
        if reply.error:
            return reply.error
        if reply.epoch != self.endpoint.epoch:
            return (
                f"its process has epoch {reply.epoch!r}, but the destination was reserved by epoch "
                f"{self.endpoint.epoch!r}: it was restarted"
            )
        self.is_open = True
        return None

    def lost(self) -> bool:
        """True once the connection was refused or has ended. Messages that arrived before may still be received."""
        return bool(monitor_events(self._connection.monitor))

    def close(self) -> None:
        self._connection.close()
