"""The publisher against a scripted decode rank on a real socket: acknowledgements, leases, lost and restarted peers."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq
from sluice.v1 import wire_pb2, worker_pb2

from prefill_node.generation import GenerationWords
from prefill_node.link import Endpoint, SourceInfo, TransferRefused
from prefill_node.publisher import Publisher
from prefill_node.reuse_gate import Consumer, ReuseGate
from tests.kv_peers import EPOCH, LAYOUT, NUM_SLOTS, Memory, entry, eventually
from transfer.wire import Body, decode, encode, router

SLOT = 1
HANDSHAKE_S = 1.0


class Decode:
    """One decode rank, as obedient as a test wants it."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*", epoch: str = EPOCH) -> None:
        self.context: zmq.Context = zmq.Context()
        self.epoch = epoch
        self.bound = router(self.context, bind, 0)
        self.address = self.bound.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.identity = b""

    def destination(self, request: str = "r") -> worker_pb2.Destination:
        endpoint = worker_pb2.ReadEndpoint(address=self.address, epoch=self.epoch)
        return worker_pb2.Destination(request_id=request, group="decode-0", tp_size=1, endpoints=[endpoint])

    def next(self) -> Body:
        assert self.bound.socket.poll(5_000), "nothing came"
        self.identity, payload = self.bound.socket.recv_multipart()
        return decode(payload)

    def batch(self) -> wire_pb2.ReadReady:
        body = self.next()
        assert isinstance(body, wire_pb2.ReadReady)
        return body

    def send(self, body: Body) -> None:
        self.bound.socket.send_multipart([self.identity, encode(body)])

    def done(self, sequence: int) -> None:
        self.send(wire_pb2.ReadDone(sequence=sequence))

    def die(self) -> None:
        self.bound.close()
        self.context.term()


class Node:
    """One prefill rank's gate and publisher."""

    def __init__(self, lease_s: float = 30.0) -> None:
        self.memory = Memory(8, seed=1)
        self.words = GenerationWords(torch.zeros(NUM_SLOTS, dtype=torch.int64))
        self.gate = ReuseGate(NUM_SLOTS, self.words, save_grace_s=0.1)
        self.errors: queue.Queue[tuple[str, str]] = queue.Queue()
        self.pool = ThreadPoolExecutor(4)
        source = SourceInfo(
            worker_id="prefill-0/tp0",
            epoch="prefill-epoch",
            session_id="127.0.0.1:1",
            tp_rank=0,
            tp_size=1,
            layout=LAYOUT,
            layers=self.memory.layer_layouts(),
            generation_address=self.words.address,
        )
        self.publisher = Publisher(
            source,
            self.gate,
            self.words,
            lease_s=lease_s,
            handshake_timeout_s=HANDSHAKE_S,
            on_request_error=lambda request, text: self.errors.put((request, text)),
        )
        self.publisher.start()

    def connect(self, decode: Decode, reply: wire_pb2.HelloReply | None = None) -> Endpoint:
        opened = self.pool.submit(self.publisher.connect, decode.destination())
        hello = decode.next()
        assert isinstance(hello, wire_pb2.Hello)
        assert hello.expected_epoch == decode.epoch
        decode.send(reply or wire_pb2.HelloReply(epoch=decode.epoch))
        return opened.result(10)

    def publish(self, endpoint: Endpoint, *requests: str, finished: tuple[str, ...] = ()) -> int | None:
        return self.publisher.publish(1, SLOT, endpoint, [entry(request, [0]) for request in requests], finished)

    def error(self) -> tuple[str, str]:
        return self.errors.get(timeout=10)

    def close(self) -> None:
        self.publisher.close()
        self.pool.shutdown()


@pytest.fixture
def decode_rank() -> Iterator[Decode]:
    decode_rank = Decode()
    yield decode_rank
    decode_rank.die()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    assert node.publisher.failure is None
    node.close()
    assert node.publisher.outstanding() == 0
    assert node.gate.idle()


def test_the_gate_opens_when_the_batch_is_acknowledged(node: Node, decode_rank: Decode) -> None:
    endpoint = node.connect(decode_rank)
    sequence = node.publish(endpoint, "r", "s", finished=("s",))
    batch = decode_rank.batch()
    assert (batch.sequence, batch.layer, batch.slot) == (sequence, 1, SLOT)
    assert (batch.generation, batch.member, batch.members) == (node.words[SLOT], 0, 1)
    assert [sent.request_id for sent in batch.entries] == ["r", "s"] and batch.finished == ["s"]
    assert 29_000 < batch.lease_ms <= 30_000
    opened = node.pool.submit(node.gate.wait, SLOT)
    time.sleep(0.05)
    assert not opened.done()
    decode_rank.done(batch.sequence)
    assert opened.result(5) == []
    assert node.publisher.counters().acks == node.publisher.counters().batches == 1
    assert node.errors.empty()


def test_the_hello_says_where_the_layers_lie(node: Node, decode_rank: Decode) -> None:
    opened = node.pool.submit(node.publisher.connect, decode_rank.destination())
    hello = decode_rank.next()
    assert isinstance(hello, wire_pb2.Hello)
    assert (hello.worker_id, hello.tp_size, hello.layout) == ("prefill-0/tp0", 1, LAYOUT)
    assert list(hello.layers) == node.memory.layer_layouts()
    assert hello.generation_address == node.words.address
    decode_rank.send(wire_pb2.HelloReply(epoch=EPOCH))
    assert opened.result(5) == node.publisher.connect(decode_rank.destination("another"))  # no second hand-shake
    assert decode_rank.bound.socket.poll(50) == 0


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (wire_pb2.HelloReply(error="KV layouts differ: block_size: 16 != 32", epoch=EPOCH), "block_size: 16 != 32"),
        (wire_pb2.HelloReply(epoch="newer"), "epoch 'newer', but .* 'decode-epoch'"),
        (wire_pb2.ReadDone(sequence=1), "ReadDone was not expected"),
    ],
)
def test_a_refused_hand_shake_names_peer_and_reason(node: Node, decode_rank: Decode, reply: Body, text: str) -> None:
    with pytest.raises(TransferRefused, match=f"decode-0 rank 0 at {decode_rank.address}: .*{text}"):
        node.connect(decode_rank, reply)  # type: ignore[arg-type]
    node.connect(decode_rank)  # and a later one may succeed


def test_a_silent_peer_is_given_up_at_the_deadline(node: Node, decode_rank: Decode) -> None:
    started = time.monotonic()
    with pytest.raises(TransferRefused, match="no answer to the hand-shake within 1 s"):
        node.publisher.connect(decode_rank.destination())
    assert HANDSHAKE_S <= time.monotonic() - started < HANDSHAKE_S + 0.5


def test_a_peer_of_another_version_is_refused(node: Node, decode_rank: Decode) -> None:
    opened = node.pool.submit(node.publisher.connect, decode_rank.destination())
    decode_rank.next()
    reply = wire_pb2.WireMessage(version=8, hello_reply=wire_pb2.HelloReply(epoch=EPOCH))
    decode_rank.bound.socket.send_multipart([decode_rank.identity, reply.SerializeToString()])
    with pytest.raises(TransferRefused, match="version 8, this process 2"):
        opened.result(5)


def test_impossible_destinations_are_refused_at_once(node: Node) -> None:
    gone = Decode()
    gone.die()
    with pytest.raises(TransferRefused, match="connection refused"):
        node.publisher.connect(gone.destination())
    unusable = gone.destination()
    unusable.endpoints[0].address = "nowhere"
    with pytest.raises(TransferRefused, match="'nowhere'"):
        node.publisher.connect(unusable)
    unusable.tp_size = 2
    with pytest.raises(TransferRefused, match="TP size 2"):
        node.publisher.connect(unusable)


def test_lost_acknowledgements_end_with_the_lease(decode_rank: Decode) -> None:
    node = Node(lease_s=0.2)
    endpoint = node.connect(decode_rank)
    generation = node.words[SLOT]
    sequence = node.publish(endpoint, "r")
    (failure,) = node.gate.wait(SLOT)
    assert failure.consumer == Consumer("read", sequence)
    assert node.words[SLOT] == generation + 1  # whoever still reads will see it
    request, text = node.error()
    assert request == "r" and "lease of 0.2 s" in text and "layer 1" in text
    decode_rank.batch()
    decode_rank.done(sequence)
    eventually(lambda: node.publisher.counters().late_acks == 1)
    assert node.publish(endpoint, "s") == sequence + 1  # the endpoint is alive, only late
    decode_rank.done(sequence + 1)
    assert node.gate.wait(SLOT) == []
    node.close()
    assert node.errors.empty()


def test_late_duplicate_and_unknown_acknowledgements_are_counted_and_ignored(node: Node, decode_rank: Decode) -> None:
    endpoint = node.connect(decode_rank)
    first, second = node.publish(endpoint, "r"), node.publish(endpoint, "r")
    for sequence in (first, first, 999):
        decode_rank.done(sequence)
    eventually(lambda: node.publisher.counters().unknown_acks == 1)
    assert node.publisher.counters().duplicate_acks == 1
    assert node.publisher.outstanding() == 1  # the second batch is still being read
    decode_rank.done(second)
    assert node.gate.wait(SLOT) == []


def test_an_acknowledgement_on_another_connection_does_not_count(node: Node, decode_rank: Decode) -> None:
    other = Decode()
    endpoint = node.connect(decode_rank)
    node.connect(other)
    sequence = node.publish(endpoint, "r")
    other.done(sequence)
    eventually(lambda: node.publisher.counters().unknown_acks == 1)
    assert node.publisher.outstanding() == 1
    decode_rank.done(sequence)
    assert node.gate.wait(SLOT) == []
    other.die()


def test_a_failed_read_fails_the_requests_it_names(node: Node, decode_rank: Decode) -> None:
    endpoint = node.connect(decode_rank)
    sequence = node.publish(endpoint, "r", "s")
    named = [wire_pb2.RequestError(request_id=name, error="bad block") for name in ("s", "a stranger")]
    decode_rank.send(wire_pb2.ReadFailed(sequence=sequence, requests=named))
    assert node.gate.wait(SLOT) == []
    request, text = node.error()
    assert request == "s" and text == f"{endpoint} could not read layer 1: bad block"
    assert node.errors.empty()
    sequence = node.publish(endpoint, "r", "s")
    decode_rank.send(wire_pb2.ReadFailed(sequence=sequence, error="no such layer"))
    assert {node.error()[0], node.error()[0]} == {"r", "s"}


def test_a_dropped_request_is_not_reported(node: Node, decode_rank: Decode) -> None:
    endpoint = node.connect(decode_rank)
    sequence = node.publish(endpoint, "r", "s")
    node.publisher.drop("r")
    decode_rank.send(wire_pb2.ReadFailed(sequence=sequence, error="no such layer"))
    assert node.error()[0] == "s"
    assert node.gate.wait(SLOT) == []
    assert node.errors.empty()


def test_a_dead_peer_is_fenced_at_once_and_costs_only_its_own_requests(node: Node) -> None:
    dying, healthy = Decode(), Decode()
    lost, alive = node.connect(dying), node.connect(healthy)
    node.publish(lost, "r")
    node.publish(lost, "r", "s")
    sequence = node.publish(alive, "t")
    generation = node.words[SLOT]
    dying.die()
    errors = dict([node.error(), node.error()])
    assert sorted(errors) == ["r", "s"]
    assert "connection lost" in errors["r"] and str(lost) in errors["r"]
    assert node.publisher.counters().fenced == 2
    opened = node.pool.submit(node.gate.wait, SLOT)
    time.sleep(0.05)
    assert not opened.done()  # the healthy peer still reads
    healthy.done(healthy.batch().sequence)
    assert len(opened.result(5)) == 2
    assert node.words[SLOT] == generation + 1
    assert sequence is not None
    assert node.publish(lost, "late") is None
    assert node.error() == ("late", f"connection to {lost} is lost")
    assert node.publish(alive, "t") is not None
    healthy.done(healthy.batch().sequence)
    assert node.gate.wait(SLOT) == []
    healthy.die()


def test_a_restarted_peer_at_the_same_address_is_a_new_one(node: Node) -> None:
    first = Decode()
    old = node.connect(first)
    node.publish(old, "r")
    first.die()
    assert node.error()[0] == "r"
    second = Decode(first.address, epoch="second")
    new = node.connect(second)
    assert new != old
    sequence = node.publish(new, "s")
    assert second.batch().sequence == sequence
    assert node.publish(old, "r") is None
    second.done(sequence or 0)
    eventually(lambda: node.publisher.outstanding() == 0)
    second.die()


def test_malformed_messages_are_counted_and_ignored(node: Node, decode_rank: Decode) -> None:
    endpoint = node.connect(decode_rank)
    for payload in (b"", b"\xff" * 9, encode(wire_pb2.HelloReply(epoch=EPOCH)), b"x" * (9 << 20)):
        decode_rank.bound.socket.send_multipart([decode_rank.identity, payload])
    eventually(lambda: node.publisher.counters().bad_messages == 4)
    sequence = node.publish(endpoint, "r")
    decode_rank.done(sequence or 0)
    assert node.gate.wait(SLOT) == []


def test_a_batch_too_large_for_the_wire_fails_its_requests_only(node: Node, decode_rank: Decode) -> None:
    endpoint = node.connect(decode_rank)
    node.publisher.publish(1, SLOT, endpoint, [entry("r", [1] * (9 << 20))])
    request, text = node.error()
    assert request == "r" and "ReadReady" in text
    assert len(node.gate.wait(SLOT)) == 1
    sequence = node.publish(endpoint, "s")
    assert decode_rank.batch().sequence == sequence
    decode_rank.done(sequence or 0)
    assert node.gate.wait(SLOT) == []


def test_finished_requests_need_an_entry(node: Node, decode_rank: Decode) -> None:
    endpoint = node.connect(decode_rank)
    with pytest.raises(ValueError, match=r"\['s'\] have no entry"):
        node.publish(endpoint, "r", finished=("s",))


def test_closing_fences_what_is_outstanding_and_refuses_what_comes(node: Node, decode_rank: Decode) -> None:
    endpoint = node.connect(decode_rank)
    node.publish(endpoint, "r")
    node.close()
    assert "stopping" in node.error()[1]
    assert node.publish(endpoint, "s") is None
    with pytest.raises(TransferRefused, match="stopping"):
        node.publisher.connect(decode_rank.destination())
