"""Messages survive the wire; what is too large, malformed or of another version is refused; layouts are compared."""

import threading

import pytest
import zmq
from sluice.v1 import wire_pb2

from transfer.layout import LayoutMismatch, block_bytes, kinds_of, kv_layout, layout_hash, require_same_layout
from transfer.wire import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Wakeup,
    WireError,
    WireVersionError,
    dealer,
    decode,
    encode,
    monitor_events,
    router,
)

LAYOUT = {
    "fingerprint": "f",
    "dtype": "bfloat16",
    "block_size": 16,
    "num_layers": 4,
    "kv_lora_rank": 64,
    "rope_dim": 8,
    "index_dim": 32,
    "indexer_layers": [0, 2],
    "protocol": "sdma",
}


def test_every_body_survives_the_wire() -> None:
    for body in (
        wire_pb2.Hello(worker_id="prefill-0/tp0", tp_size=1),
        wire_pb2.HelloReply(error="no", epoch="e"),
        wire_pb2.ReadReady(sequence=1 << 40, entries=[wire_pb2.ReadEntry(request_id="r", main_blocks=[7, 9])]),
        wire_pb2.ReadDone(sequence=3),
        wire_pb2.ReadFailed(sequence=3, requests=[wire_pb2.RequestError(request_id="r", error="why")]),
    ):
        assert decode(encode(body)) == body


@pytest.mark.parametrize("payload", [b"", b"\xff\xff\xff", b"hello", b"\x12\x7f"])
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


def test_another_version_is_refused_naming_both() -> None:
    other = wire_pb2.WireMessage(version=WIRE_VERSION + 6, read_done=wire_pb2.ReadDone(sequence=1))
    with pytest.raises(WireVersionError, match=f"{WIRE_VERSION + 6}.*{WIRE_VERSION}"):
        decode(other.SerializeToString())


def test_a_message_above_the_limit_is_refused_on_both_sides() -> None:
    large = wire_pb2.HelloReply(error="x" * MAX_MESSAGE_BYTES)
    with pytest.raises(WireError, match="HelloReply"):
        encode(large)
    with pytest.raises(WireError, match=str(MAX_MESSAGE_BYTES)):
        decode(b"x" * (MAX_MESSAGE_BYTES + 1))


def test_sockets_tell_a_refused_and_a_lost_connection() -> None:
    with zmq.Context() as context:
        listening = router(context, "tcp://127.0.0.1:*", 0)
        address = listening.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        connected = dealer(context, address, 5.0, events)
        connected.socket.send(encode(wire_pb2.ReadDone(sequence=1)))
        assert decode(listening.socket.recv_multipart()[1]) == wire_pb2.ReadDone(sequence=1)
        assert monitor_events(connected.monitor) == []
        listening.close()
        assert connected.monitor.poll(5000)
        assert [event.event for event in monitor_events(connected.monitor)] == [zmq.EVENT_DISCONNECTED]
        connected.close()

        refused = dealer(context, address, 5.0, events)
        assert refused.monitor.poll(5000)
        assert [event.event for event in monitor_events(refused.monitor)] == [zmq.EVENT_CLOSED]
        refused.close()


def test_a_dropped_connection_gets_in_nobodys_way() -> None:
    """Its descriptor is given out again before ZMQ has forgotten it."""
    with zmq.Context() as context:
        for _ in range(1000):
            dealer(context, "tcp://127.0.0.1:1", 5.0, zmq.EVENT_DISCONNECTED)


def test_unusable_addresses_are_named() -> None:
    with zmq.Context() as context:
        with pytest.raises(WireError, match="not an address"):
            dealer(context, "nonsense", 1.0, 0)
        with pytest.raises(OSError, match=r"tcp://256\.1\.1\.1:1"):
            router(context, "tcp://256.1.1.1:1", 0)


def test_wakeup_ends_a_poll_and_survives_use_after_close() -> None:
    wakeup = Wakeup()
    poller = zmq.Poller()
    poller.register(wakeup.fileno(), zmq.POLLIN)
    assert not poller.poll(0)
    threading.Thread(target=wakeup.set).start()
    assert poller.poll(5000)
    wakeup.clear()
    assert not poller.poll(0)
    wakeup.close()
    wakeup.set()


def test_layouts_differ_naming_both_values() -> None:
    ours, theirs = kv_layout(**LAYOUT), kv_layout(**LAYOUT | {"block_size": 32, "indexer_layers": [0]})
    require_same_layout(ours, kv_layout(**LAYOUT), "decode-0", "prefill-0")
    with pytest.raises(LayoutMismatch) as error:
        require_same_layout(ours, theirs, "decode-0", "prefill-0")
    assert "block_size: 16 (decode-0) != 32 (prefill-0)" in str(error.value)
    assert "indexer_layers: [0, 2] (decode-0) != [0] (prefill-0)" in str(error.value)
    assert layout_hash(ours) == layout_hash(kv_layout(**LAYOUT)) != layout_hash(theirs)


def test_block_bytes_follow_from_the_layout() -> None:
    kinds = wire_pb2.TENSOR_KIND_CKV, wire_pb2.TENSOR_KIND_K_ROPE
    key, scale = wire_pb2.TENSOR_KIND_INDEXER_KEY, wire_pb2.TENSOR_KIND_INDEXER_SCALE
    plain, quantized = kv_layout(**LAYOUT), kv_layout(**LAYOUT, indexer_dtype="int8")
    assert [block_bytes(plain, kind) for kind in (*kinds, key)] == [16 * 128, 16 * 16, 16 * 64]
    assert [block_bytes(quantized, kind) for kind in (key, scale)] == [16 * 32, 16 * 2]
    assert kinds_of(plain, 0) == (*kinds, key)
    assert kinds_of(quantized, 2) == (*kinds, key, scale)
    assert kinds_of(quantized, 1) == kinds


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"),
        ("block_size", 0),
        ("indexer_layers", [4]),
        ("indexer_layers", [1, 1]),
        ("indexer_dtype", "fp8"),
    ],
)
def test_an_impossible_layout_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        kv_layout(**LAYOUT | {field: value})
