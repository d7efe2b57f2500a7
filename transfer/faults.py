"""Faults on demand (section `faults` of the configuration) of what both ends of a transfer send each other."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from sluice.v1 import wire_pb2

from engine.config import FaultsSection
from engine.faults import dice, injected
from transfer.outlet import Outlet, OutletFactory
from transfer.wire import Body, encode

_ACKNOWLEDGEMENTS = (wire_pb2.ReadDone, wire_pb2.ReadFailed)


def outlet(faults: FaultsSection, worker_id: str) -> OutletFactory:
    """Of a worker's messages: a plain one, unless a message fault is on."""
    chances = (
        faults.message_drop,
        faults.message_delay,
        faults.message_duplicate,
        faults.message_corrupt,
        faults.ack_loss,
    )
    if not any(chances):
        return Outlet
    return lambda wake: FaultyOutlet(wake, faults, dice(faults, worker_id, "messages"))


class FaultyOutlet(Outlet):
    """Drops, delays (later messages overtake), duplicates and corrupts messages with the configured probabilities."""

    def __init__(self, wake: Callable[[], None], faults: FaultsSection, draws: random.Random) -> None:
        super().__init__(wake)
        self._faults = faults
        self._draws = draws
        self._order = itertools.count()
        self._held: list[tuple[float, int, zmq.Socket[Any], list[bytes]]] = []  # a heap, by when they are due

    def send(self, socket: zmq.Socket[Any], body: Body, to: Sequence[bytes] = ()) -> None:
        payload = encode(body)
        if self._happens("message_drop", body):
            return
        if isinstance(body, _ACKNOWLEDGEMENTS) and self._happens("ack_loss", body):
            return
        if self._happens("message_corrupt", body):
            payload = self._damaged(payload)
        for _ in range(2 if self._happens("message_duplicate", body) else 1):
            if self._happens("message_delay", body):
                self._hold(socket, [*to, payload])
            else:
                socket.send_multipart([*to, payload], zmq.NOBLOCK)

    def flush(self) -> None:
        while self._held and self._held[0][0] <= time.monotonic():
            _, _, socket, frames = heapq.heappop(self._held)
            with contextlib.suppress(zmq.ZMQError):  # its connection may be gone by now
                socket.send_multipart(frames, zmq.NOBLOCK)

    def _happens(self, knob: str, body: Body) -> bool:
        chance: float = getattr(self._faults, knob)
        happens = self._draws.random() < chance
        if happens:
            injected(knob, f"{type(body).__name__} {getattr(body, 'sequence', '')}".rstrip())
        return happens

    def _hold(self, socket: zmq.Socket[Any], frames: list[bytes]) -> None:
        delay_s = self._faults.message_delay_s
        heapq.heappush(self._held, (time.monotonic() + delay_s, next(self._order), socket, frames))
        timer = threading.Timer(delay_s, self._wake)
        timer.daemon = True
        timer.start()

    def _damaged(self, payload: bytes) -> bytes:
        """With one byte changed."""
        damaged = bytearray(payload)
        damaged[self._draws.randrange(len(damaged))] ^= self._draws.randrange(1, 256)
        return bytes(damaged)
