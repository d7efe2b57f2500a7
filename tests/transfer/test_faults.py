"""Whatever is lost, late, doubled, damaged or fails on the way, a request arrives whole or ends with an error."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import pytest
import torch
import zmq
from sluice.v1 import wire_pb2

from engine.config import FaultsSection
from engine.device import Device
from engine.faults import before_step, no_stall, open_device
from prefill_node.link import TransferRefused
from tests.kv_peers import eventually
from tests.transfer_cluster import NO_FAULTS, TransferCluster
from transfer.faults import FaultyOutlet, outlet
from transfer.hostcann.runtime import DeviceOutOfMemory
from transfer.outlet import Outlet
from transfer.wire import WireError, decode, encode

LEASE_S = 0.4
ACK = wire_pb2.ReadDone(sequence=7)
HELLO = wire_pb2.Hello(worker_id="p")


class Tape:
    """Stands for a socket: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        self.sent.append(frames)


def faulty(**faults: Any) -> tuple[FaultyOutlet, Tape, threading.Event]:
    woken = threading.Event()
    return FaultyOutlet(woken.set, FaultsSection(**faults), random.Random(1)), Tape(), woken


def test_nothing_stands_in_between_without_faults() -> None:
    assert outlet(NO_FAULTS, "w") is Outlet
    assert before_step(NO_FAULTS, "w") is no_stall
    assert type(open_device(0, NO_FAULTS)) is Device


def test_a_dropped_message_is_not_sent_and_a_lost_acknowledgement_is_one_only() -> None:
    out, tape, _ = faulty(message_drop=1)
    out.send(tape, HELLO)  # type: ignore[arg-type]
    assert tape.sent == []
    out, tape, _ = faulty(ack_loss=1)
    for body in (ACK, HELLO, wire_pb2.ReadFailed(sequence=7)):
        out.send(tape, body)  # type: ignore[arg-type]
    assert tape.sent == [[encode(HELLO)]]


def test_a_delayed_message_is_overtaken_and_the_sockets_thread_woken() -> None:
    out, tape, woken = faulty(message_delay=1, message_delay_s=0.05)
    out.send(tape, ACK, to=[b"peer"])  # type: ignore[arg-type]
    out.flush()
    assert tape.sent == []
    assert woken.wait(5)
    eventually(lambda: (out.flush(), tape.sent)[1] == [[b"peer", encode(ACK)]])


def test_a_damaged_message_is_refused_by_its_receiver() -> None:
    out, tape, _ = faulty(message_corrupt=1, message_duplicate=1)
    for _ in range(200):
        out.send(tape, wire_pb2.ReadReady(sequence=3, layer=2, slot=1, generation=99))  # type: ignore[arg-type]
    assert len(tape.sent) == 400
    for (payload,) in tape.sent:
        with pytest.raises(WireError):
            decode(payload)


def test_draws_repeat_with_the_seed() -> None:
    def messages(seed: int) -> list[list[bytes]]:
        tape, section = Tape(), FaultsSection(seed=seed, message_drop=0.5)
        out = outlet(section, "decode-0/dp0/tp0")(lambda: None)
        for sequence in range(50):
            out.send(tape, wire_pb2.ReadDone(sequence=sequence))  # type: ignore[arg-type]
        return tape.sent

    assert messages(1) == messages(1) != messages(2)


def test_a_stalled_step_sleeps() -> None:
    stall = before_step(FaultsSection(stall=1, stall_s=0.05), "w")
    started = time.monotonic()
    stall()
    assert time.monotonic() - started >= 0.05


def test_a_device_that_fails_says_what_was_asked_of_it() -> None:
    with pytest.raises(DeviceOutOfMemory, match="64 bytes"):
        open_device(3, FaultsSection(device_allocation_failure=1)).empty((4, 4), torch.float32)


@pytest.mark.parametrize(
    "faults",
    [
        {"message_drop": 0.05},
        {"message_delay": 0.2, "message_delay_s": 0.05},
        {"message_delay": 0.1, "message_delay_s": 1.5 * LEASE_S},
        {"message_duplicate": 0.5},
        {"message_duplicate": 0.5, "message_delay": 0.5, "message_delay_s": 0.05},
        {"message_corrupt": 0.05},
        {"ack_loss": 0.1},
        {"read_failure": 0.1},
        {"read_delay_s": 0.01},
        {
            "read_failure": 0.05,
            "message_drop": 0.02,
            "message_duplicate": 0.2,
            "message_corrupt": 0.02,
            "ack_loss": 0.05,
        },
    ],
    ids=lambda faults: "+".join(faults),
)
def test_no_fault_leaves_wrong_bytes_or_a_stuck_request(faults: dict[str, float]) -> None:
    cluster = TransferCluster(2, 1, lease_s=LEASE_S, faults=FaultsSection(seed=5, **faults))  # type: ignore[arg-type]
    whole = 0
    for number in range(6):
        request, (node,) = f"r{number}", cluster.decode[0]
        node.expect(request, lease_s=2 * LEASE_S)
        with contextlib.suppress(TransferRefused):  # a lost or damaged hand-shake is an error, too
            cluster.run(request, [(0, 2), (2, 5)])
        _, _, error = node.events.next_terminal()
        if error is None:
            cluster.assert_complete(request)
            whole += 1
        node.release(request)
        assert node.puller.pending() == 0
        cluster.assert_prefill_idle()
    assert whole > 0
    cluster.close()
