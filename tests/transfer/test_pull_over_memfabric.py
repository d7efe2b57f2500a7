"""Publisher and puller in two processes, over the real MemFabric wheel and the emulated driver."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.wheel_peer import CHUNKS
from transfer.hostcann import HostcannError, environment, sweep

ANSWER_S = 60.0


class Peer:
    """A child process which answers commands."""

    def __init__(self, role: str, device: int, driver: dict[str, str], pool_url: str, log: Path) -> None:
        self.log = log
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.transfer.wheel_peer", role, str(device), pool_url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | driver | {"OMP_NUM_THREADS": "1"},
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self) -> None:
        assert self._answer() == "ready"

    def ask(self, name: str, *arguments: object) -> object:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", "[", '"', "true", "false", "null")):  # the wheels print as well
                self._answers.put(line)

    def _answer(self) -> object:
        try:
            return json.loads(self._answers.get(timeout=ANSWER_S))
        except queue.Empty:
            pytest.fail(f"no answer; its log:\n{self.log.read_text()[-3000:]}")


class Peers:
    def __init__(self, tmp_path: Path) -> None:
        self.root = Path("/dev/shm") / f"sluice-test-{os.getpid()}-{tmp_path.name}"
        self.root.mkdir()
        self.tmp_path = tmp_path
        self.driver = environment(self.root, "Ascend910_9382", 3, 64 << 20)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.pool_url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.started: list[Peer] = []

    def start(self, role: str, device: int) -> Peer:
        log = self.tmp_path / f"{role}-{len(self.started)}.log"
        self.started.append(Peer(role, device, self.driver, self.pool_url, log))
        return self.started[-1]

    def close(self) -> None:
        for peer in self.started:
            peer.kill()
        sweep(self.root)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    try:
        peers = Peers(tmp_path)
    except HostcannError as error:
        pytest.fail(str(error))
    yield peers
    peers.close()
    assert not peers.root.exists()


def test_kv_arrives_over_the_real_wheel_and_peers_may_die_and_return(peers: Peers) -> None:
    decode, prefill = peers.start("decode", 1), peers.start("prefill", 0)
    decode.ready(), prefill.ready()
    address = decode.ask("address")

    # 1. A prompt in two chunks arrives where it belongs.
    assert prefill.ask("connect", address) == ""
    decode.ask("expect", "r", 1, 0)
    published = prefill.ask("publish", "r", 1, CHUNKS)
    assert isinstance(published, dict) and published["errors"] == [] and published["idle"]
    assert decode.ask("terminal") == ["r", 1, None]
    assert decode.ask("equal", 0) is True
    assert decode.ask("equal", 5) is False
    assert decode.ask("release", "r") == "r"

    # 2. The generation is read through the wheel as well: a slot that was given up is noticed.
    decode.ask("expect", "stale", 2, 5)
    prefill.ask("shift_generations", 1)
    published = prefill.ask("publish", "stale", 2, CHUNKS)
    assert isinstance(published, dict) and "reused slot" in published["errors"][0][1]
    prefill.ask("shift_generations", -1)
    terminal = decode.ask("terminal")
    assert isinstance(terminal, list) and terminal[0] == "stale" and "reused slot" in terminal[2]
    assert decode.ask("release", "stale") == "stale"

    # 3. Prefill dies in the middle of a request, which fails; another process takes its place.
    decode.ask("expect", "cut off", 3, 5)
    published = prefill.ask("publish", "cut off", 3, CHUNKS[:1])
    assert isinstance(published, dict) and published["errors"] == []
    successor = peers.start("prefill", 0)
    prefill.kill()
    terminal = decode.ask("terminal")
    assert isinstance(terminal, list) and terminal[0] == "cut off" and "prefill-0/tp0" in terminal[2]
    assert "disconnected" in terminal[2]
    successor.ready()
    assert successor.ask("connect", address) == ""
    assert decode.ask("release", "cut off") == "cut off"
    decode.ask("expect", "s", 4, 5)
    published = successor.ask("publish", "s", 4, CHUNKS)
    assert isinstance(published, dict) and published["errors"] == []
    counters = decode.ask("counters")
    assert isinstance(counters, dict)
    assert decode.ask("equal", 5) is True
    assert (counters["lost_sources"], counters["bad_messages"]) == (1, 0)

    # 4. Decode dies: prefill's gates open at once, and the request fails.
    decode.kill()
    published = successor.ask("publish", "late", 5, CHUNKS)
    assert isinstance(published, dict) and published["idle"] and published["seconds"] < 5
    assert "connection" in published["errors"][0][1]
