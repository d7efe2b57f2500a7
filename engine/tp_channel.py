"""Commands from TP rank 0 of a group to the other ranks, and their reports back.

Tensors never travel here (torch.distributed carries those); only small dataclasses do, pickled, over ZMQ sockets in the
run's private folder. Rank 0 decides, the others follow: each follower sees every command once and in order.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import zmq


class ChannelError(RuntimeError):
    """A rank of the group did not appear, or does not answer any more."""


def _address(run_dir: str | Path, name: str, rank: int, kind: str) -> str:
    path = Path(run_dir) / f"{name}-{rank}.{kind}"
    if len(str(path)) > 100:  # the kernel's limit for socket paths is 107 bytes
        raise ChannelError(f"runtime.run_dir = {str(run_dir)!r} is too long for a socket path; use a shorter folder")
    return f"ipc://{path}"


class TpLeader:
    """Rank 0's end. Not thread-safe: one thread uses it. With size 1 it has no peers and does nothing."""

    def __init__(self, run_dir: str | Path, name: str, size: int) -> None:
        self._name = name
        self._context = zmq.Context()
        self._commands: list[zmq.Socket[bytes]] = []
        self._reports: zmq.Socket[bytes] | None = None
        if size > 1:
            self._reports = self._context.socket(zmq.PULL)
            self._reports.bind(_address(run_dir, name, 0, "reports"))
        for rank in range(1, size):
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(_address(run_dir, name, rank, "commands"))
            self._commands.append(socket)

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when every follower has reported in. ChannelError naming the missing ranks after `timeout_s`."""
        missing = set(range(1, len(self._commands) + 1))
        deadline = time.monotonic() + timeout_s
        while missing:
            report = self._receive(max(0.0, deadline - time.monotonic()))
            if report is None:
                raise ChannelError(f"{self._name}: ranks {sorted(missing)} did not start within {timeout_s:.0f} s")
            rank, hello = report
            if hello != "ready":
                raise ChannelError(f"{self._name}: rank {rank} reported {hello!r} before it was ready")
            missing.discard(rank)
        for rank, socket in enumerate(self._commands, start=1):  # a report may overtake the other socket's connection
            if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000)), zmq.POLLOUT):
                raise ChannelError(f"{self._name}: rank {rank} takes no commands within {timeout_s:.0f} s")

    def broadcast(self, command: object) -> None:
        """Sends `command` to every follower; never blocks. ChannelError if a follower's queue is full."""
        payload = pickle.dumps(command)
        for rank, socket in enumerate(self._commands, start=1):
            try:
                socket.send(payload, zmq.NOBLOCK)
            except zmq.Again:
                raise ChannelError(f"{self._name}: rank {rank} takes no commands any more") from None

    def reports(self) -> list[tuple[int, Any]]:
        """(rank, report) of everything that has arrived. Never blocks."""
        found = []
        while (report := self._receive(0.0)) is not None:
            found.append(report)
        return found

    def _receive(self, timeout_s: float) -> tuple[int, Any] | None:
        if self._reports is None or not self._reports.poll(int(timeout_s * 1000)):
            return None
        rank, report = pickle.loads(self._reports.recv())
        return int(rank), report

    def close(self) -> None:
        self._context.destroy(linger=0)


class TpFollower:
    """The end of rank 1, 2, ... `report` and `next_command` may be called from one thread each."""

    def __init__(self, run_dir: str | Path, name: str, rank: int) -> None:
        self._rank = rank
        self._context = zmq.Context()
        self._commands: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._commands.connect(_address(run_dir, name, rank, "commands"))
        self._reports: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._reports.setsockopt(zmq.LINGER, 0)
        self._reports.connect(_address(run_dir, name, 0, "reports"))

    def ready(self) -> None:
        """Tells the leader that this rank can take commands."""
        self.report("ready")

    def next_command(self, timeout_s: float) -> Any | None:
        """The next command, or None when none arrives in time."""
        if not self._commands.poll(int(timeout_s * 1000)):
            return None
        return pickle.loads(self._commands.recv())

    def report(self, report: object) -> None:
        """Sends a report to the leader; never blocks."""
        self._reports.send(pickle.dumps((self._rank, report)), zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)
