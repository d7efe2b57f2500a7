"""Ports to listen on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from decode_node.joining import free_url
from engine import ports


def test_no_outgoing_connection_can_take_a_chosen_port() -> None:
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        assert ports.LOW <= ports.free_port("127.0.0.1") < min(ports.HIGH, lowest_outgoing)
        assert ports.LOW <= int(free_url("127.0.0.1").rpartition(":")[2]) < min(ports.HIGH, lowest_outgoing)


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports.free_port("127.0.0.1")))
        listener.listen()
        used = listener.getsockname()[1]
        monkeypatch.setattr(ports, "LOW", used)
        monkeypatch.setattr(ports, "HIGH", used + 1)
        with pytest.raises(ports.NoFreePort, match=rf"no free port on 127\.0\.0\.1 between {used}"):
            ports.free_port("127.0.0.1")
