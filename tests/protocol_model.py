"""Every interleaving of one prefill rank, the network and one decode rank, over the real classes and a virtual clock.

One slot, into which prefill writes one layer after the other, and then something else. The real ReuseGate,
GenerationWords and Publisher stand on one side, the real Sequences, BatchReader and PullRequests on the other; only
sockets, threads and the clock are replaced. Where things could happen in several orders, a `Chooser` picks one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import permutations
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sluice.v1 import wire_pb2

from decode_node import batch_reader, pull_requests
from decode_node.batch_queue import Announced, BatchQueue
from decode_node.batch_reader import TOGETHER, BatchReader, Reply, Source
from decode_node.pull_counters import Counts
from decode_node.pull_plan import LayerMemory, PullPlanner, TensorMemory
from decode_node.pull_requests import PullRequest, PullRequests
from decode_node.sequences import Sequences
from prefill_node import publisher as publisher_module
from prefill_node import reuse_gate
from prefill_node.generation import GenerationWords
from prefill_node.link import Endpoint, SourceInfo
from prefill_node.publisher import Publisher
from prefill_node.reuse_gate import ReuseGate
from tests.kv_peers import CKV, K_ROPE, Stats, small_layout
from tests.model_parts import Anything, Blocked, Chooser, Clock, Condition, Seen
from transfer.memfabric import Copies, Meanwhile

CELL = 16  # bytes of a block of either tensor
LEASE_S, JUMP_S = 10.0, 11.0
ENDPOINT = Endpoint("tcp://decode", "epoch", "decode-0", 0, 0, 1)
OTHERS = 0x99  # content of decode's blocks once they belong to another request


class Violation(BaseException):
    """Something happened that must not. No Exception: the reader would survive that."""


class TimedOut(Exception):
    """A read missed its deadline and goes on in the background."""


@dataclass
class Mutation:
    """What a wrong protocol would leave out."""

    generation_check: bool = True
    generation_bump: bool = True
    read_once: bool = True
    quarantine: bool = True


@dataclass
class Budget:
    """How many layers a request has, and how often each misfortune may happen in one run."""

    layers: int = 2
    jumps: int = 0  # of the clock, past every lease
    duplicates: int = 0
    failures: int = 0  # reads that fail
    timeouts: int = 0  # reads given up that go on
    together: bool = False  # whether announcements may come so close that they are read in one go


class _Reader(BatchReader):
    mutation = Mutation()

    def _stale(self, batch: wire_pb2.ReadReady, generation: int, what: str) -> str | None:
        return super()._stale(batch, generation, what) if self.mutation.generation_check else None


class _Queue(BatchQueue):
    def __init__(self, next_one: Callable[[], Announced | None]) -> None:
        super().__init__()
        self._next_one = next_one

    def poll(self, timeout_s: float) -> Announced | None:
        return self._next_one()


class _Words(GenerationWords):
    mutation = Mutation()

    def bump(self, slot: int) -> int:
        return super().bump(slot) if self.mutation.generation_bump else self[slot]


def _program(layers: int) -> list[tuple[str, int]]:
    """Prefill's steps: each with the layer it is about."""
    steps = [(what, layer) for layer in range(layers) for what in ("wait", "ckv", "rope", "tell")]
    return [*steps, ("wait", layers), ("ckv", layers), ("rope", layers)]


class World:
    """See the module. Also decode's engine: one descriptor is one step, and anything may happen between two."""

    def __init__(self, chooser: Chooser, clock: Clock, mutation: Mutation, budget: Budget) -> None:
        self._chooser, self._clock, self._mutation = chooser, clock, mutation
        self._left = Budget(**vars(budget))
        self._layers = layers = budget.layers
        self._program = _program(layers)
        layout = small_layout(num_layers=layers, indexer_layers=[], block_size=1, kv_lora_rank=4, rope_dim=4)
        self._step = 0
        self._jumps = 0
        self.buffer = (ctypes.c_ubyte * (2 * CELL))()
        self.words = _Words(torch.zeros(1, dtype=torch.int64))
        self.words.mutation = mutation
        self._first_word = self.words[0]
        self.gate = ReuseGate(1, self.words, save_grace_s=1.0)
        self.gate._changed = Condition()  # type: ignore[assignment]
        base = ctypes.addressof(self.buffer)
        tensors = [
            wire_pb2.TensorLayout(kind=kind, address=base + place * CELL, block_bytes=CELL, num_blocks=1)
            for place, kind in enumerate((CKV, K_ROPE))
        ]
        places = [wire_pb2.LayerLayout(layer=layer, slot=0, tensors=tensors) for layer in range(layers)]
        source = SourceInfo("prefill-0/tp0", "e", "session", 0, 1, layout, places, self.words.address)
        self.publisher = Publisher(
            source, self.gate, self.words, lease_s=LEASE_S, handshake_timeout_s=1.0, on_request_error=lambda *_: None
        )
        self.publisher._ready.add(ENDPOINT)
        self.received = (ctypes.c_ubyte * (2 * layers * CELL))()
        self._scratch = (ctypes.c_uint64 * TOGETHER)()
        at = ctypes.addressof(self.received)
        memory = [
            LayerMemory(
                TensorMemory(at + 2 * layer * CELL, CELL, 1), TensorMemory(at + (2 * layer + 1) * CELL, CELL, 1)
            )
            for layer in range(layers)
        ]
        planner = PullPlanner(layout, memory, name="decode-0/dp0/tp0", tp_rank=0, tp_size=1)
        self.requests = PullRequests(planner.layers_owed_by, self._terminal, self._quiescent)
        self.reader = _Reader(
            self, planner, self.requests, Counts(), read_timeout_s=5.0, read_retries=1, registration_wait_s=0.0
        )
        self.reader.mutation = mutation
        self._source = Source(planner.source(source.hello("epoch")), ctypes.addressof(self._scratch), lambda _: True)
        self._sequences = Sequences()
        self._request = PullRequest("r", 1, (0,), (), 1, range(1), 1e6, clock.now + 1e6)
        self.requests.expect(self._request)
        self._announced: list[wire_pb2.ReadReady] = []
        self._deliveries: list[int] = []
        self._replies: list[Reply] = []
        self._acknowledged: list[int] = []
        self._late: list[tuple[int, int]] = []  # copies of a read given up, which are still to come
        self._busy = False
        self._freed = False
        self._reading: tuple[Any, ...] = ()  # where in a read decode is
        self._waiting: list[Announced] = []  # delivered, and not seen by the reader yet

    def run(self) -> None:
        """Until nothing can happen any more; then time passes, and prefill must come to its end."""
        while events := [*self._environment(), *self._arrivals()]:
            events[self._choose(len(events))]()
        self._clock.now += 10 * JUMP_S
        self.publisher._expire()
        while self._step < len(self._program):
            try:
                self._prefill()
            except Blocked:
                raise Violation("prefill waits for ever") from None

    # What can happen at any moment.

    def _environment(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        if self._step < len(self._program) and self._may_go_on():
            events.append(self._prefill)
        if self._left.jumps:
            events.append(self._jump)
        if any(batch.deadline <= self._clock.now for batch in self.publisher._batches.values()):
            events.append(self.publisher._expire)
        for number, times in enumerate(self._acknowledged):
            if times == 0 or (times == 1 and self._left.duplicates):
                events.append(lambda number=number: self._acknowledge(number))  # type: ignore[misc]
        if self._late:
            events.append(self._land)
        return events

    def _arrivals(self) -> list[Callable[[], None]]:
        coming = [
            (number,)
            for number, times in enumerate(self._deliveries)
            if times == 0 or (times == 1 and self._left.duplicates)
        ]
        if self._left.together:
            coming += permutations([number for number, times in enumerate(self._deliveries) if times == 0], 2)
        return [lambda numbers=numbers: self._arrive(*numbers) for numbers in coming]  # type: ignore[misc]

    def _may_go_on(self) -> bool:
        if self._program[self._step][0] != "wait":
            return True
        uses = self.gate._uses[0].values()
        return all(use.fenced or use.deadline <= self._clock.now for use in uses)

    def _prefill(self) -> None:
        what, layer = self._program[self._step]
        if what == "wait":
            self.gate.wait(0)
        elif what == "tell":
            entry = wire_pb2.ReadEntry(request_id="r", destination_generation=1, main_blocks=[0])
            last = ["r"] if layer == self._layers - 1 else []
            self.publisher.publish(layer, 0, ENDPOINT, [entry], last)
            _, message = self.publisher._outbox.batches.popleft()
            message.lease_ms = int(LEASE_S * 1000)
            self._announced.append(message)
            self._deliveries.append(0)
        else:
            ctypes.memset(ctypes.addressof(self.buffer) + (what == "rope") * CELL, layer + 1, CELL)
        self._step += 1

    def _jump(self) -> None:
        self._left.jumps -= 1
        self._jumps += 1
        self._clock.now += JUMP_S

    def _acknowledge(self, number: int) -> None:
        self._left.duplicates -= self._acknowledged[number]
        self._acknowledged[number] += 1
        self.publisher._acknowledge(ENDPOINT, self._replies[number])

    def _land(self) -> None:
        """What a read given up had still to copy arrives, all but unnoticed."""
        for local, remote in self._late:
            if self._freed:
                raise Violation("a late copy wrote into the blocks of another request")
            ctypes.memmove(local, remote, CELL)
        self._late = []
        self._busy = False
        self.reader.settle()

    def _arrive(self, *numbers: int) -> None:
        announced = []
        for number in numbers:
            self._left.duplicates -= self._deliveries[number]
            self._deliveries[number] += 1
            batch = self._announced[number]
            if self._sequences.is_new(batch.sequence) or not self._mutation.read_once:
                # Its lease counts from now: decode may believe that it has more time than prefill gives it.
                announced.append(Announced(batch, self._clock.now + batch.lease_ms / 1000))
        unanswered = {batch.sequence: batch.layer for batch, _ in announced}
        self._waiting = announced
        queue = _Queue(lambda: self._take(numbers) if self._waiting and self._choose(2) else None)

        def answer(reply: Reply) -> None:
            layer = unanswered.pop(reply.sequence)
            if isinstance(reply, wire_pb2.ReadDone):
                self._check(layer)
            self._replies.append(reply)
            self._acknowledged.append(0)

        while self._waiting:
            self.reader.read(self._source, self._take(numbers), queue, answer)
        self._reading = ()
        if unanswered:
            raise Violation("a batch is never answered")

    def _take(self, numbers: tuple[int, ...]) -> Announced:
        """The first of those that wait; the others may be seen at once, while it is being read, or later."""
        announced = self._waiting.pop(0)
        self._reading = (numbers, self._jumps, len(self._waiting))
        return announced

    # What decode does, and what its memory must hold.

    def _terminal(self, request: str, generation: int, error: str | None) -> None:
        if error is None:
            for layer in range(self._layers):
                self._check(layer)
        else:
            self.requests.release(request)

    def _quiescent(self, request: str) -> None:
        self._freed = True
        ctypes.memset(self.received, OTHERS, len(self.received))

    def _check(self, layer: int) -> None:
        got = bytes(self.received)[2 * layer * CELL : 2 * (layer + 1) * CELL]
        if not self._freed and got != bytes([layer + 1]) * (2 * CELL):
            raise Violation(f"a wrong read of layer {layer} was accepted: {got.hex()}")

    # decode_node.read_engine.ReadEngine

    def read(
        self,
        session_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        then: Copies | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Stats:
        is_word = copies.remote[0] == self.words.address
        busy_with = meanwhile.work if meanwhile is not None else None
        for place, (to, there, size) in enumerate(zip(*copies, strict=True)):
            target = to - ctypes.addressof(self._scratch if is_word else self.received)
            if busy_with is not None and (not self._waiting or self._choose(2)):
                busy_with(self._clock.now)
                busy_with = None
            self._between((*self._reading, self._left.failures, is_word, target, len(copies.local) - place))
            if not is_word:
                self._maybe_fail(list(zip(copies.local, copies.remote, strict=True))[place:])
            if self._freed and not is_word:
                raise Violation("a read wrote into the blocks of another request")
            ctypes.memmove(to, there, size)
        if busy_with is not None:
            busy_with(self._clock.now)
        if then is not None:
            self.read(session_id, then, deadline_s=deadline_s)
        return Stats(sum(copies.sizes), len(copies.sizes), len(copies.sizes))

    def idle(self, session_id: str) -> bool:
        return not self._busy or not self._mutation.quarantine

    def forget(self, session_id: str) -> None:
        """Links cost nothing here."""

    def _between(self, where: tuple[Any, ...]) -> None:
        outer, self._reading = self._reading, where
        while chosen := self._choose(1 + len(events := self._environment())):
            events[chosen - 1]()
        self._reading = outer

    def _maybe_fail(self, rest: list[tuple[int, int]]) -> None:
        if self._left.failures and self._choose(2):
            self._left.failures -= 1
            raise OSError("the read failed")
        if self._left.timeouts and self._choose(2):
            self._left.timeouts -= 1
            self._late, self._busy = rest, True
            raise TimedOut("the read missed its deadline")

    def _choose(self, options: int) -> int:
        return self._chooser.choose(options, self._state(options))

    def _state(self, options: int) -> Hashable:
        request, publisher = self._request, self.publisher
        return (
            options,
            self._step,
            self._jumps,
            tuple(vars(self._left).values()),
            bytes(self.buffer)[::CELL],
            bytes(self.received)[::CELL],
            self.words[0] - self._first_word,
            tuple(max(0, word - self._first_word + 1) for word in self._scratch),
            tuple((use.ident, state.fenced) for use, state in self.gate._uses[0].items()),
            tuple((sequence, batch.deadline) for sequence, batch in publisher._batches.items()),
            tuple(publisher._ended.items()),
            tuple(self._deliveries),
            tuple((reply.sequence, isinstance(reply, wire_pb2.ReadDone)) for reply in self._replies),
            tuple(self._acknowledged),
            (request.in_flight, request.terminal, request.error is None, request.released),
            tuple(request.arrived.items()),
            tuple(request.finished),
            tuple(local - ctypes.addressof(self.received) for local, _ in self._late),
            (self._busy, self._freed, self._source.suspect),
            tuple(message.generation - self._first_word for message in self._announced),
            self._reading,
        )


def explore(mutation: Mutation, budget: Budget) -> int:
    """Runs every interleaving; returns how many states there were. Raises Violation with the way to it."""
    seen: set[Hashable] = set()
    prefixes: list[list[int]] = [[]]
    while prefixes:
        chooser = Chooser(prefix := prefixes.pop(), seen)
        clock = Clock()
        patches = [
            patch.object(module, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
            for module in (batch_reader, pull_requests, publisher_module, reuse_gate)
        ]
        patches += [patch.object(publisher_module, name, Anything()) for name in ("zmq", "Wakeup")]
        for each in patches:
            each.start()
        try:
            World(chooser, clock, mutation, budget).run()
        except Seen:
            pass
        except Violation as violation:
            raise Violation(f"{violation} (choices {[choice for choice, _ in chooser.taken]})") from None
        finally:
            for each in patches:
                each.stop()
        choices = [choice for choice, _ in chooser.taken]
        for at in range(len(prefix), len(chooser.taken)):
            for other in range(1, chooser.taken[at][1]):
                prefixes.append([*choices[:at], other])
    return len(seen)
