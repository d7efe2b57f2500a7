"""Commands from TP rank 0 of a group to the other ranks, and their reports back.

Tensors never travel here (torch.distributed carries those); only small dataclasses do, pickled, over ZMQ sockets in the
run's private folder. Rank 0 decides, the others follow: each follower sees every command once and in order. The end of
rank 0's process is noticed by the others, and theirs by rank 0, however idle they are.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import zmq

_GONE_GRACE_S = 1.0  # in a clean stop of the group the ranks end one after the other
_LOOK_S = 0.5  # how often a rank that waits looks whether the other one is still there


class ChannelError(RuntimeError):
    """A rank of the group did not appear, or does not answer any more."""


def socket_address(run_dir: str | Path, name: str, rank: int, kind: str) -> str:
    """Of one rank's socket in the run's private folder. Raises ChannelError when that lies too deep."""
    path = Path(run_dir) / f"{name}-{rank}.{kind}"
    if len(str(path)) > 100:  # the kernel's limit for socket paths is 107 bytes
        raise ChannelError(f"runtime.run_dir = {str(run_dir)!r} is too long for a socket path; use a shorter folder")
    return f"ipc://{path}"


class _Peer:
    """Whether the process at the other end of a socket that has been connected is still there. One thread uses it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._gone_since: float | None = None

    @property
    def gone(self) -> bool:
        """True from a moment after its end on."""
        if self._gone_since is None and self._events.poll(0):
            self._gone_since = time.monotonic()
        return self._gone_since is not None and time.monotonic() >= self._gone_since + _GONE_GRACE_S


class TpLeader:
    """Rank 0's end. Not thread-safe: one thread uses it. With size 1 it has no peers and does nothing.

    Invariant (test_a_rank_that_is_gone_is_noticed_by_an_idle_group): `reports` tells of a dead follower within seconds.
    """

    def __init__(self, run_dir: str | Path, name: str, size: int) -> None:
        self._name = name
        self._context = zmq.Context()
        self._commands: list[zmq.Socket[bytes]] = []
        self._followers: list[_Peer] = []
        self._reports: zmq.Socket[bytes] | None = None
        if size > 1:
            self._reports = self._context.socket(zmq.PULL)
            self._reports.bind(socket_address(run_dir, name, 0, "reports"))
        for rank in range(1, size):
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            self._followers.append(_Peer(socket))
            socket.bind(socket_address(run_dir, name, rank, "commands"))
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
        """(rank, report) of everything that has arrived. Never blocks. ChannelError if a follower is gone."""
        found = []
        while (report := self._receive(0.0)) is not None:
            found.append(report)
        if gone := [rank for rank, follower in enumerate(self._followers, start=1) if follower.gone]:
            raise ChannelError(f"{self._name}: the processes of TP ranks {gone} are gone")
        return found

    def _receive(self, timeout_s: float) -> tuple[int, Any] | None:
        if self._reports is None or not self._reports.poll(int(timeout_s * 1000)):
            return None
        rank, report = pickle.loads(self._reports.recv())
        return int(rank), report

    def close(self) -> None:
        self._context.destroy(linger=0)


class TpFollower:
    """The end of rank 1, 2, ... `report` and `next_command` may be called from one thread each.

    Invariant (test_a_rank_that_is_gone_is_noticed_by_an_idle_group): `next_command` tells of a dead leader within
    seconds.
    """

    def __init__(self, run_dir: str | Path, name: str, rank: int) -> None:
        self._rank = rank
        self._name = name
        self._context = zmq.Context()
        self._commands: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._leader = _Peer(self._commands)
        self._commands.connect(socket_address(run_dir, name, rank, "commands"))
        self._reports: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._reports.setsockopt(zmq.LINGER, 0)
        self._reports.connect(socket_address(run_dir, name, 0, "reports"))

    def ready(self) -> None:
        """Tells the leader that this rank can take commands."""
        self.report("ready")

    def next_command(self, timeout_s: float) -> Any | None:
        """The next command, or None when none arrives in time. ChannelError if the leader is gone."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            if self._commands.poll(int(min(left, _LOOK_S) * 1000)):
                return pickle.loads(self._commands.recv())
            if self._leader.gone:
                raise ChannelError(f"{self._name}: the process of TP rank 0 is gone")
            if left <= _LOOK_S:
                return None

    def report(self, report: object) -> None:
        """Sends a report to the leader; never blocks."""
        self._reports.send(pickle.dumps((self._rank, report)), zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)
