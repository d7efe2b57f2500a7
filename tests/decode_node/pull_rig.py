"""A decode rank's puller and scripted prefill ranks on real sockets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import zmq
from sluice.v1 import wire_pb2

from decode_node.batch_reader import SOURCE_SCRATCH_BYTES
from tests.kv_peers import (
    EPOCH,
    LAYOUT,
    NUM_SLOTS,
    SLOT_OF_LAYER,
    Events,
    LocalEngine,
    Memory,
    entry,
)
from tests.started_puller import started_puller
from transfer.wire import Body, Monitored, dealer, decode, encode

GENERATION = 41


class Prefill:
    """One prefill rank, as obedient as a test wants it."""

    def __init__(self, context: zmq.Context, address: str, *, rank: int = 0, tp: int = 1, seed: int = 1) -> None:
        self.memory = Memory(8, seed)
        self.words = (ctypes.c_uint64 * NUM_SLOTS)(*[GENERATION] * NUM_SLOTS)
        self.rank, self.tp = rank, tp
        self.connection: Monitored = dealer(context, address, 5.0, 0)
        self.sequence = 0

    def hello(self, **changes: object) -> wire_pb2.Hello:
        fields: dict[str, object] = {
            "worker_id": f"prefill-0/tp{self.rank}",
            "epoch": "prefill-epoch",
            "expected_epoch": EPOCH,
            "session_id": f"session-{self.rank}",
            "tp_rank": self.rank,
            "tp_size": self.tp,
            "layout": LAYOUT,
            "layers": self.memory.layer_layouts(),
            "generation_address": ctypes.addressof(self.words),
        }
        return wire_pb2.Hello(**fields | changes)  # type: ignore[arg-type]

    def send(self, body: Body) -> None:
        self.connection.socket.send(encode(body))

    def answer(self) -> Body:
        """The next message; signs of life are given meanwhile."""
        while True:
            assert self.connection.socket.poll(10_000), "no answer"
            body = decode(self.connection.socket.recv())
            if not isinstance(body, wire_pb2.Ping):
                return body
            self.send(wire_pb2.Pong(number=body.number))

    def greet(self, **changes: object) -> str:
        """Why the hand-shake was refused; empty when it was not."""
        self.send(self.hello(**changes))
        reply = self.answer()
        assert isinstance(reply, wire_pb2.HelloReply)
        return reply.error

    def offer(
        self, layer: int, entries: Sequence[wire_pb2.ReadEntry], finished: Sequence[str] = (), /, **changes: object
    ) -> None:
        self.sequence += 1
        fields: dict[str, object] = {
            "sequence": self.sequence,
            "layer": layer,
            "slot": SLOT_OF_LAYER[layer],
            "generation": GENERATION,
            "member": self.rank,
            "members": self.tp,
            "lease_ms": 10_000,
            "entries": entries,
            "finished": finished,
        }
        self.send(wire_pb2.ReadReady(**fields | changes))  # type: ignore[arg-type]

    def publish(
        self, layer: int, entries: Sequence[wire_pb2.ReadEntry], finished: Sequence[str] = (), /, **changes: object
    ) -> dict[str, str]:
        """Offers and returns the errors by request; a batch error under ""."""
        self.offer(layer, entries, finished, **changes)
        return self.errors()

    def errors(self) -> dict[str, str]:
        reply = self.answer()
        assert isinstance(reply, wire_pb2.ReadDone | wire_pb2.ReadFailed)
        if isinstance(reply, wire_pb2.ReadDone):
            return {}
        return {"": reply.error} if reply.error else {named.request_id: named.error for named in reply.requests}

    def publish_all(self, request: str, blocks: Sequence[int], generation: int = 1) -> dict[str, str]:
        """A whole prompt in one chunk, all layers."""
        errors: dict[str, str] = {}
        for layer in range(LAYOUT.num_layers):
            indexer = [7 - block for block in blocks] if layer in LAYOUT.indexer_layers else []
            last = layer == LAYOUT.num_layers - 1
            errors |= self.publish(
                layer, [entry(request, blocks, indexer=indexer, generation=generation)], [request] if last else []
            )
        return errors


class Node:
    def __init__(self) -> None:
        self.context: zmq.Context = zmq.Context()
        self.engine = LocalEngine()
        self.events = Events()
        self.memory = Memory(10)
        self.scratch = (ctypes.c_ubyte * (4 * SOURCE_SCRATCH_BYTES))()
        self.puller = started_puller(
            epoch=EPOCH,
            layout=LAYOUT,
            memory=self.memory.layer_memory(),
            engine=self.engine,
            scratch_address=ctypes.addressof(self.scratch),
            on_terminal=self.events.on_terminal,
            on_quiescent=self.events.quiescent.put,
            max_sources=4,
            registration_wait_s=0.3,
        )

    def prefill(self, *, rank: int = 0, tp: int = 1, greet: bool = True) -> Prefill:
        prefill = Prefill(self.context, self.puller.address, rank=rank, tp=tp)
        if greet:
            assert prefill.greet() == ""
        return prefill

    def expect(
        self, request: str, main: Sequence[int], indexer: Sequence[int], *, contributors: int = 1, lease_s: float = 30.0
    ) -> None:
        """All blocks are wanted."""
        self.puller.expect(request, 1, main, indexer, contributors, wanted=range(len(main)), lease_s=lease_s)

    def copied(self) -> list[tuple[str, list[int]]]:
        """Engine reads other than those of generation words."""
        return [read for read in self.engine.reads if set(read[1]) != {8}]
