"""Node-to-node messages on ZMQ, each a ``WireMessage`` and its CRC-32; DEALER at prefill, ROUTER at decode.

Order on a connection: Hello -> HelloReply, then any number of ReadReady, each answered by one ReadDone or ReadFailed
with the same sequence number. Ping and Pong may come at any time. A connection is never silently replaced: a DEALER
does not reconnect by itself, because the peer behind the same address may be another process; its owner notices the
loss and shakes hands again.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import zlib
from typing import Any, NamedTuple

import zmq
from google.protobuf.message import DecodeError
from sluice.v1 import wire_pb2
from zmq.utils.monitor import recv_monitor_message

WIRE_VERSION = 2
_CRC_BYTES = 4  # little-endian, behind the serialized message
MAX_MESSAGE_BYTES = 8 << 20  # larger ones are refused with a reason
_DROP_BYTES = 8 * MAX_MESSAGE_BYTES  # larger ones are not even received: ZMQ ends the connection
_POLLIN = int(zmq.POLLIN)
_monitors = itertools.count()
_HEARTBEAT_MS = 5_000  # a host that vanished without closing its connections is noticed after three of these

Body = (
    wire_pb2.Hello
    | wire_pb2.HelloReply
    | wire_pb2.ReadReady
    | wire_pb2.ReadDone
    | wire_pb2.ReadFailed
    | wire_pb2.Ping
    | wire_pb2.Pong
)
_FIELD_OF = {
    wire_pb2.Hello: "hello",
    wire_pb2.HelloReply: "hello_reply",
    wire_pb2.ReadReady: "read_ready",
    wire_pb2.ReadDone: "read_done",
    wire_pb2.ReadFailed: "read_failed",
    wire_pb2.Ping: "ping",
    wire_pb2.Pong: "pong",
}


class WireError(ValueError):
    """A message that cannot be sent or understood: too large, damaged, no WireMessage, empty, or of another version."""


class WireVersionError(WireError):
    """A well-formed message of another protocol version."""


class SocketEvent(NamedTuple):
    """What a socket monitor saw: a ``zmq.Event`` and its value (a file descriptor or an errno)."""

    event: int
    value: int


def encode(body: Body) -> bytes:
    """Raises WireError when the message is larger than MAX_MESSAGE_BYTES."""
    message = wire_pb2.WireMessage(version=WIRE_VERSION)
    getattr(message, _FIELD_OF[type(body)]).CopyFrom(body)
    serialized: bytes = message.SerializeToString()
    payload = serialized + _crc(serialized)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(body).__name__} of {len(payload)} bytes is above the {MAX_MESSAGE_BYTES} accepted")
    return payload


def decode(payload: bytes) -> Body:
    """The message's body. Raises WireError (WireVersionError for another version)."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(payload)} bytes is above the {MAX_MESSAGE_BYTES} accepted")
    serialized, crc = payload[:-_CRC_BYTES], payload[-_CRC_BYTES:]
    intact = crc == _crc(serialized)
    # Other versions may have another checksum, or none, as the first one had.
    message = _parse(serialized if intact else payload)
    if message.version not in (0, WIRE_VERSION):
        raise WireVersionError(f"peer speaks wire protocol version {message.version}, this process {WIRE_VERSION}")
    if not intact:
        raise WireError(f"{len(payload)} bytes whose checksum is wrong")
    if not message.version:
        raise WireError(f"{len(payload)} bytes which are not a WireMessage")
    name = message.WhichOneof("body")
    if name is None:
        raise WireError("WireMessage without a body")
    body: Body = getattr(message, name)
    return body


def _crc(serialized: bytes) -> bytes:
    return zlib.crc32(serialized).to_bytes(_CRC_BYTES, "little")


def _parse(serialized: bytes) -> wire_pb2.WireMessage:
    """An empty one for what is none."""
    try:
        return wire_pb2.WireMessage.FromString(serialized)
    except DecodeError:
        return wire_pb2.WireMessage()


class Monitored(NamedTuple):
    """A socket and the one which tells what happens to its connections (``monitor_events``)."""

    socket: zmq.Socket[Any]
    monitor: zmq.Socket[Any]

    def close(self) -> None:
        """Closes both; what was not sent is dropped."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def dealer(context: zmq.Context[Any], address: str, connect_timeout_s: float, events: int) -> Monitored:
    """Prefill's socket to one decode endpoint. Connects in the background, once: a lost connection stays lost.

    Raises WireError when ``address`` is not one.
    """
    created = _socket(context, zmq.DEALER, events)
    created.socket.setsockopt(zmq.RECONNECT_IVL, -1)
    created.socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, int(connect_timeout_s * 1000)))
    try:
        created.socket.connect(address)
    except zmq.ZMQError as error:
        created.close()
        raise WireError(f"{address!r} is not an address to connect to: {error}") from None
    return created


def router(context: zmq.Context[Any], bind: str, events: int) -> Monitored:
    """Decode's socket, bound to ``tcp://host:port`` (port ``*``: a free one). Raises OSError naming the address."""
    created = _socket(context, zmq.ROUTER, events)
    created.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        created.socket.bind(bind)
    except zmq.ZMQError as error:
        created.close()
        raise OSError(error.errno, f"cannot listen on {bind}: {error}") from None
    return created


def _socket(context: zmq.Context[Any], kind: int, events: int) -> Monitored:
    created: zmq.Socket[Any] = context.socket(kind)
    created.setsockopt(zmq.LINGER, 0)
    created.setsockopt(zmq.SNDHWM, 0)  # bounded by leases, not by dropping messages
    created.setsockopt(zmq.RCVHWM, 0)
    created.setsockopt(zmq.MAXMSGSIZE, _DROP_BYTES)
    created.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    created.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
    # Before the socket connects or binds, or the first events are missed. Its usual name is made of a descriptor, which
    # may be used again while a closed socket's name is still taken.
    return Monitored(created, created.get_monitor_socket(events, f"inproc://monitor-{next(_monitors)}"))


def has_input(socket: zmq.Socket[Any]) -> bool:
    """Whether a receive would not fail; asking is cheaper than one that does."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def monitor_events(monitor: zmq.Socket[Any]) -> list[SocketEvent]:
    """All events seen since the last call; does not block."""
    seen = []
    while has_input(monitor):
        message = recv_monitor_message(monitor, zmq.NOBLOCK)
        seen.append(SocketEvent(int(message["event"]), int(message["value"])))
    return seen


class Wakeup:
    """Ends another thread's ``zmq.Poller.poll``: register ``fileno()`` for POLLIN and call ``clear`` when it fires.

    Whoever calls ``set`` has put down first what the other thread is to look for after ``clear``. Setting it again
    before that costs no system call.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._lock = threading.Lock()
        self._is_set = False

    def fileno(self) -> int:
        return self._read.fileno()

    def set(self) -> None:
        with self._lock:
            if not self._is_set:
                self._is_set = True
                with contextlib.suppress(OSError):  # closed: nobody waits any more
                    self._write.send(b"\0")

    def clear(self) -> None:
        with self._lock:
            if self._is_set:
                self._is_set = False
                self._read.recv(1)

    def close(self) -> None:
        self._read.close()
        self._write.close()
