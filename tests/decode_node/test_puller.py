"""The puller against a scripted prefill rank on a real socket: what is read, refused, and when a request is over."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import zmq
from sluice.v1 import wire_pb2

from decode_node.puller import Puller
from decode_node.sequences import Sequences
from tests.kv_peers import (
    CKV,
    EPOCH,
    INDEXER_KEY,
    K_ROPE,
    LAYOUT,
    NUM_SLOTS,
    SLOT_OF_LAYER,
    Events,
    LocalEngine,
    Memory,
    entry,
    eventually,
    small_layout,
)
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
        self.scratch = (ctypes.c_uint64 * 4)()
        self.puller = Puller(
            bind="tcp://127.0.0.1:*",
            worker_id="decode-0/dp0/tp0",
            epoch=EPOCH,
            layout=LAYOUT,
            tp_rank=0,
            tp_size=1,
            memory=self.memory.layer_memory(),
            engine=self.engine,
            scratch_address=ctypes.addressof(self.scratch),
            read_timeout_s=5.0,
            read_retries=2,
            handshake_timeout_s=5.0,
            on_terminal=self.events.on_terminal,
            on_quiescent=self.events.quiescent.put,
            max_sources=4,
            registration_wait_s=0.3,
        )
        self.puller.start()

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
        return [read for read in self.engine.reads if read[1] != [8]]


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    assert node.puller.failure is None
    node.puller.close()
    node.context.destroy(0)


def test_a_request_is_pulled_into_its_own_blocks_and_ends_once(node: Node) -> None:
    node.expect("r", [9, 2, 4], [1, 0, 5])
    prefill = node.prefill()
    assert prefill.publish_all("r", [3, 6, 0]) == {}
    assert node.events.next_terminal() == ("r", 1, None)
    for layer in range(LAYOUT.num_layers):
        for remote, local in ((3, 9), (6, 2), (0, 4)):
            for kind in (CKV, K_ROPE):
                assert node.memory.block(layer, kind, local) == prefill.memory.block(layer, kind, remote)
    for layer in LAYOUT.indexer_layers:
        for remote, local in ((4, 1), (1, 0), (7, 5)):
            assert node.memory.block(layer, INDEXER_KEY, local) == prefill.memory.block(layer, INDEXER_KEY, remote)
    untouched = Memory(10)
    for block in {0, 1, 3, 5, 6, 7, 8}:
        assert node.memory.block(1, CKV, block) == untouched.block(1, CKV, block)
    counters = node.puller.counters()
    assert (counters.batches, counters.failures) == (3, 0)
    assert counters.bytes_pulled == sum(sum(sizes) for _, sizes in node.copied())
    node.puller.release("r")
    assert node.events.quiescent.get(timeout=5) == "r"
    assert node.puller.pending() == 0
    assert node.events.terminal.empty()


def test_chunks_continue_where_the_last_one_ended_and_a_gap_is_an_error(node: Node) -> None:
    node.expect("r", range(4), range(4))
    prefill = node.prefill()
    assert prefill.publish(1, [entry("r", [0, 1])]) == {}
    assert prefill.publish(1, [entry("r", [2], start=2)]) == {}
    errors = prefill.publish(0, [entry("r", [1, 2], start=1, indexer=[1, 2])])
    assert "blocks 0..0 of layer 0 were never announced" in errors["r"]
    assert node.copied()[2:] == []
    assert node.events.next_terminal() == ("r", 1, errors["r"])


def test_finishing_with_missing_blocks_fails_the_request(node: Node) -> None:
    node.expect("r", [0, 1], [0, 1])
    prefill = node.prefill()
    assert prefill.publish(0, [entry("r", [0, 1], indexer=[0, 1])]) == {}
    assert "blocks 0..1 of layer 1 are missing" in prefill.publish(2, [entry("r", [])], ["r"])["r"]
    assert "layer 1" in (node.events.next_terminal()[2] or "")


def test_a_batch_that_outruns_the_reservation_is_waited_for(node: Node) -> None:
    prefill = node.prefill()
    prefill.offer(1, [entry("late", [0])])
    time.sleep(0.1)
    node.expect("late", [0], [0])
    assert prefill.errors() == {}


@pytest.mark.parametrize("generation", [0, 2])
def test_unknown_requests_and_generations_fail_alone(node: Node, generation: int) -> None:
    node.expect("good", [0], [0])
    node.expect("other", [1], [1])
    prefill = node.prefill()
    errors = prefill.publish(1, [entry("ghost", [1]), entry("good", [2]), entry("other", [3], generation=generation)])
    assert sorted(errors) == ["ghost", "other"]
    assert "generation" in errors["ghost"] and "generation" in errors["other"]
    assert node.memory.block(1, CKV, 0) == prefill.memory.block(1, CKV, 2)
    assert node.memory.block(1, CKV, 1) == Memory(10).block(1, CKV, 1)
    assert node.events.terminal.empty()  # a stranger's message does not end a good reservation


def test_a_released_request_is_refused_at_once(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    node.puller.release("r")
    assert node.events.quiescent.get(timeout=5) == "r"
    started = time.monotonic()
    assert "is over" in prefill.publish(1, [entry("r", [0])])["r"]
    assert time.monotonic() - started < 0.25  # the registration wait is 0.3 s
    assert node.copied() == []


@pytest.mark.parametrize(
    ("layer", "sent", "text"),
    [
        (1, entry("r", [0xFFFFFFFF]), "prefill block 4294967295 of ckv is not in 0..7"),  # -1 in 32 bits
        (1, entry("r", [0, 8]), "prefill block 8 of ckv is not in 0..7"),
        (1, entry("r", [0, 1, 2]), "main destination range is incomplete: blocks 0..2, but 2 are reserved"),
        (0, entry("r", [0, 1]), "indexer presence mismatch: 0 indexer blocks from 0, but 2 main blocks"),
        (0, entry("r", [0], indexer=[9]), "prefill block 9 of indexer_key is not in 0..7"),
        (1, entry("r", [0], indexer=[0]), "layer 1 has no indexer"),
    ],
)
def test_wrong_numbers_fail_the_request_before_any_byte_moves(
    node: Node, layer: int, sent: wire_pb2.ReadEntry, text: str
) -> None:
    node.expect("r", [0, 1], [0, 1])
    node.expect("good", [2], [2])
    prefill = node.prefill()
    good = entry("good", [5], indexer=[5] if layer == 0 else [])
    errors = prefill.publish(layer, [sent, good])
    assert list(errors) == ["r"]
    assert text in errors["r"]
    assert text in (node.events.next_terminal()[2] or "")
    assert len(node.copied()) == 1  # the good request's
    assert node.memory.block(layer, CKV, 2) == prefill.memory.block(layer, CKV, 5)
    assert "failed already" in prefill.publish(1, [entry("r", [0])])["r"]
    assert node.events.terminal.empty()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer": 3}, "layer 3 is not in 0..2"),
        ({"slot": 0}, "layer 1 in slot 0, not 1"),
        ({"member": 1}, "contributor 1 of 1"),
        ({"members": 2}, "contributor 0 of 2"),
        ({"finished": ["stranger"]}, "'stranger'"),
        ({"entries": [entry("r", [0]), entry("r", [1])]}, "more than one entry"),
    ],
)
def test_a_wrong_batch_is_refused_as_a_whole(node: Node, changes: dict[str, object], text: str) -> None:
    node.expect("r", [0, 1], [0, 1])
    prefill = node.prefill()
    node.expect("other", [2], [2])
    assert text in prefill.publish(1, [entry("r", [0])], **changes)[""]
    assert node.copied() == []
    request, _, error = node.events.next_terminal()
    assert request == "r" and text in (error or ""), "decode hears of it at once"
    assert prefill.publish(1, [entry("other", [0])]) == {}


def test_hand_shakes_that_do_not_fit_are_refused_naming_both_values(node: Node) -> None:
    def refusal(tp: int = 1, **changes: object) -> str:
        prefill = node.prefill(greet=False, tp=tp)
        prefill.tp = tp
        return prefill.greet(**changes)

    assert "'old'" in (text := refusal(expected_epoch="old")) and f"'{EPOCH}'" in text
    assert "block_size: 2 (decode-0/dp0/tp0) != 4 (prefill-0/tp0)" in refusal(layout=small_layout(block_size=4))
    assert "protocol: sdma" in refusal(layout=small_layout(protocol="device_rdma"))
    assert "prefill rank 3" in refusal(tp_rank=3)
    assert "layers [0, 1]" in refusal(layers=Memory(8, 1).layer_layouts()[:2])
    wrong = Memory(8, 1).layer_layouts()
    wrong[1].tensors[0].block_bytes += 1
    assert "layer 1: ckv has blocks of 33 bytes; decode-0/dp0/tp0 expects 32" in refusal(layers=wrong)
    wrong = Memory(8, 1).layer_layouts()
    del wrong[2].tensors[2]
    assert "layer 2 consists of ckv, k_rope; it must be ckv, k_rope, indexer_key" in refusal(layers=wrong)
    wrong = Memory(8, 1).layer_layouts()
    wrong[0].tensors[0].address = (1 << 64) - 8
    assert "at address 0xfffffffffffffff8" in refusal(layers=wrong)
    wrong[0].tensors[0].kind = 77  # type: ignore[assignment]
    assert "unknown tensor kind 77" in refusal(layers=wrong)
    assert "generation_address" in refusal(generation_address=3)
    assert "without worker_id" in refusal(session_id="")
    node.prefill()  # a good one is welcome after all of them


def test_more_sources_than_the_limit_are_refused_and_a_lost_one_makes_room(node: Node) -> None:
    prefills = [node.prefill() for _ in range(4)]
    assert "4 prefill ranks already" in node.prefill(greet=False).greet()
    prefills[0].connection.close()
    eventually(lambda: node.prefill(greet=False).greet() == "")
    assert node.puller.counters().lost_sources == 1


def test_memory_that_cannot_be_read_refuses_the_hand_shake(node: Node) -> None:
    def unreachable(session: str, sizes: Sequence[int]) -> None:
        raise RuntimeError("link is down")

    node.engine.before_read = unreachable
    assert "cannot read memory of prefill-0/tp0 (session-0): link is down" in node.prefill(greet=False).greet()


def test_malformed_messages_cost_no_thread(node: Node) -> None:
    prefill = node.prefill(greet=False)
    for payload in (b"", b"\xff" * 40, b"x" * (9 << 20)):
        prefill.connection.socket.send(payload)
    prefill.send(wire_pb2.ReadDone(sequence=1))
    prefill.offer(1, [entry("r", [0])])
    assert "no hand-shake" in prefill.errors()[""]
    other = wire_pb2.WireMessage(version=9, hello=prefill.hello())
    prefill.connection.socket.send(other.SerializeToString())
    reply = prefill.answer()
    assert isinstance(reply, wire_pb2.HelloReply) and "version 9" in reply.error
    assert node.puller.counters().bad_messages == 5
    assert prefill.greet() == ""
    node.expect("r", [0], [0])
    assert prefill.publish_all("r", [0]) == {}


def test_a_copy_that_prefill_overwrote_meanwhile_is_discarded(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def overwrite(session: str, sizes: Sequence[int]) -> None:
        prefill.words[SLOT_OF_LAYER[1]] += 1

    node.engine.before_read = overwrite
    error = prefill.publish(1, [entry("r", [0])])["r"]
    assert "reused slot 1" in error and f"announced {GENERATION}" in error
    assert node.events.next_terminal()[2] == error
    assert node.puller.counters().stale_generation == 1


def test_a_batch_past_its_lease_is_not_read(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    assert "lease ended" in prefill.publish(1, [entry("r", [0])], lease_ms=0)["r"]
    assert node.copied() == []


def test_no_batch_is_read_twice(node: Node) -> None:
    """Prefill may reuse the buffer of an acknowledged batch without a new generation."""
    node.expect("r", [1], [1])
    prefill = node.prefill()
    assert prefill.publish(1, [entry("r", [0])], sequence=9) == {}
    for kind in (CKV, K_ROPE):  # as prefill does when nobody is left to wait for
        ctypes.memset(prefill.memory.buffers[1, kind], 0xEE, len(prefill.memory.buffers[1, kind]))
    copied = node.copied()
    prefill.offer(1, [entry("r", [0])], sequence=9)
    eventually(lambda: node.puller.counters().duplicate_batches == 1)
    assert prefill.publish(2, [entry("r", [0], indexer=[0])], sequence=8) == {}  # late, but not seen before
    assert node.copied()[: len(copied)] == copied and len(node.copied()) == len(copied) + 1


def test_numbers_of_batches_are_remembered_in_bounded_memory() -> None:
    known = Sequences()
    assert all(known.is_new(number) for number in range(10_000, 0, -1) if number > 6_000)
    assert not known.is_new(10_000)
    assert all(known.is_new(number) for number in range(10_001, 30_000))
    assert not any(known.is_new(number) for number in range(1, 30_000))


def test_an_engine_failure_fails_the_batch_and_names_it(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def fail(session: str, sizes: Sequence[int]) -> None:
        raise RuntimeError("code -3101")

    node.engine.before_read = fail
    error = prefill.publish(1, [entry("r", [0])])["r"]
    assert error == "reading 48 bytes of layer 1 from prefill-0/tp0 failed: code -3101"
    assert node.events.next_terminal() == ("r", 1, error)


def test_blocks_stay_in_quarantine_while_a_read_is_in_flight(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    started, go_on = threading.Event(), threading.Event()

    def hold(session: str, sizes: Sequence[int]) -> None:
        started.set()
        assert go_on.wait(10)

    node.engine.before_read = hold
    prefill.offer(1, [entry("r", [0])])
    assert started.wait(5)
    node.puller.release("r")
    node.puller.release("r")
    with pytest.raises(ValueError, match="in flight"):
        node.expect("r", [0], [0])
    with pytest.raises(queue.Empty):
        node.events.quiescent.get(timeout=0.1)
    go_on.set()
    assert node.events.quiescent.get(timeout=5) == "r"
    prefill.errors()
    assert node.events.quiescent.empty()
    assert node.events.terminal.empty()  # nobody wants to know after the release
    node.expect("r", [0], [0])


def test_a_read_given_up_by_the_engine_keeps_its_quarantine_until_it_is_over(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def time_out(session: str, sizes: Sequence[int]) -> None:
        node.engine.busy.add(session)
        raise TimeoutError("5 s are over")

    node.engine.before_read = time_out
    assert "5 s are over" in prefill.publish(1, [entry("r", [0])])["r"]
    node.puller.release("r")
    with pytest.raises(queue.Empty):
        node.events.quiescent.get(timeout=0.2)
    node.expect("s", [1], [1])
    node.engine.before_read = lambda session, sizes: None
    node.engine.forgotten.clear()
    assert prefill.publish(1, [entry("s", [1])]) == {}
    assert node.engine.forgotten == []  # while the old read hangs, the link is not opened again
    node.engine.busy.clear()
    assert node.events.quiescent.get(timeout=5) == "r"


def test_the_link_is_opened_again_after_a_failed_read(node: Node) -> None:
    node.expect("r", [0], [0])
    node.expect("s", [1], [1])
    prefill = node.prefill()
    assert node.engine.forgotten == ["session-0"]  # a new peer may have an address an old one had

    def fail(session: str, sizes: Sequence[int]) -> None:
        raise RuntimeError("an earlier read missed its deadline")

    node.engine.before_read = fail
    assert prefill.publish(1, [entry("r", [0])])["r"]
    node.engine.before_read = lambda session, sizes: None
    assert prefill.publish(1, [entry("s", [1])]) == {}
    assert prefill.publish(0, [entry("s", [1], indexer=[1])]) == {}
    assert node.engine.forgotten == ["session-0"] * 4  # at the hand-shake, for the retries, and for the next batch


def test_a_transient_read_failure_is_tried_again(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()
    failures = iter([RuntimeError("code -1"), RuntimeError("code -2")])

    def fail_twice(session: str, sizes: Sequence[int]) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure

    node.engine.before_read = fail_twice
    assert prefill.publish_all("r", [0]) == {}
    assert node.events.next_terminal() == ("r", 1, None)
    assert node.puller.counters().read_retries == 2
    assert node.memory.block(1, CKV, 0) == prefill.memory.block(1, CKV, 0)


def test_retries_stay_inside_the_lease(node: Node) -> None:
    node.expect("r", [0], [0])
    prefill = node.prefill()

    def fail(session: str, sizes: Sequence[int]) -> None:
        raise RuntimeError("code -1")

    node.engine.before_read = fail
    assert "code -1" in prefill.publish(1, [entry("r", [0])], lease_ms=100)["r"]
    assert node.puller.counters().read_retries == 1  # after 50 ms; the next one would begin after 150


def test_a_stopped_process_does_not_keep_links_to_others_from_being_opened(node: Node) -> None:
    stopped = node.prefill(greet=False)
    stopped.send(stopped.hello())
    assert stopped.connection.socket.poll(5_000)  # it is asked for a sign of life, and gives none
    other = node.prefill(rank=0)
    assert node.engine.reads == [("session-0", [8])], "the link to the stopped one was not even tried"
    node.expect("r", [1], [1])
    assert other.publish_all("r", [0]) == {}
    bodies = []
    while not bodies or isinstance(bodies[-1], wire_pb2.Ping):
        assert stopped.connection.socket.poll(5_000)
        bodies.append(decode(stopped.connection.socket.recv()))
    assert isinstance(bodies[-1], wire_pb2.HelloReply) and "no sign of life" in bodies[-1].error
    assert len(bodies) > 3, "a lost question is repeated"


def test_releasing_an_unknown_request_is_quiescent_at_once(node: Node) -> None:
    node.puller.release("never seen")
    assert node.events.quiescent.get_nowait() == "never seen"


def test_a_dead_source_fails_its_requests_at_once_and_others_go_on(node: Node) -> None:
    node.expect("r", [0, 1], [0, 1])
    node.expect("s", [2], [2])
    dying, healthy = node.prefill(), node.prefill()
    assert dying.publish(1, [entry("r", [0])]) == {}
    dying.connection.close()
    request, _, error = node.events.next_terminal()
    assert request == "r" and "prefill-0/tp0" in (error or "") and "disconnected" in (error or "")
    assert healthy.publish_all("s", [3]) == {}
    assert node.events.next_terminal() == ("s", 1, None)


def test_silence_beyond_the_lease_fails_the_request(node: Node) -> None:
    node.expect("r", [0], [0], lease_s=0.2)
    assert "sent nothing for 0.2 s; missing contributors: [0]" in (node.events.next_terminal()[2] or "")


def test_another_process_cannot_take_over_a_contributors_part(node: Node) -> None:
    node.expect("r", [0], [0])
    first, second = node.prefill(), node.prefill()
    assert first.publish(1, [entry("r", [0])]) == {}
    assert "another prefill process" in second.publish(0, [entry("r", [0], indexer=[0])])["r"]
    assert first.publish(0, [entry("r", [0], indexer=[0])]) == {}


def test_a_slow_source_does_not_hold_up_another(node: Node) -> None:
    for request in ("r", "s"):
        node.expect(request, [0], [0], contributors=2)
    slow, quick = node.prefill(rank=0, tp=2), node.prefill(rank=1, tp=2)
    go_on = threading.Event()

    def hold(session: str, sizes: Sequence[int]) -> None:
        if session == "session-0":
            assert go_on.wait(10)

    node.engine.before_read = hold
    slow.offer(1, [entry("r", [0])])
    assert quick.publish(0, [entry("s", [0], indexer=[0])]) == {}
    go_on.set()
    assert slow.errors() == {}


def test_every_contributor_must_finish_even_one_with_an_empty_share(node: Node) -> None:
    node.expect("r", [4], [4], contributors=2)
    ranks = [node.prefill(rank=rank, tp=2) for rank in range(2)]
    assert ranks[0].publish_all("r", [3]) == {}
    assert node.events.terminal.empty()
    before = len(node.copied())
    assert ranks[1].publish_all("r", [3]) == {}
    assert len(node.copied()) == before  # one indexer block goes to member 0, and main KV only comes from there
    assert node.events.next_terminal() == ("r", 1, None)
    assert "declared this request finished" in ranks[1].publish(0, [entry("r", [3], indexer=[3])])["r"]


def test_expectations_are_checked(node: Node) -> None:
    with pytest.raises(ValueError, match=r"main blocks \[10\] are not in 0..9"):
        node.expect("r", [10], [0])
    with pytest.raises(ValueError, match=r"indexer blocks \[-1\]"):
        node.expect("r", [0], [-1])
    with pytest.raises(ValueError, match="0 contributors"):
        node.expect("r", [0], [0], contributors=0)
    node.expect("r", [0], [0])
    with pytest.raises(ValueError, match="still expected"):
        node.expect("r", [0], [0])
