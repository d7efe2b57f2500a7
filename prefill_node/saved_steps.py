"""How TP rank 0 tells the others that earlier steps are in the pool, while all of them compute the next one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from engine.tp_channel import socket_address

SavedSteps = Callable[[int], None]
"""Called in every step, with its number, on the thread of a rank's pool calls: on rank 0 behind the saves of earlier
steps, which it tells; on the others before they look for what these steps wrote, which waits for rank 0."""


def no_other_ranks(step: int) -> None:
    """`SavedSteps` of a rank that is alone."""


def saved_steps(
    run_dir: str | Path, name: str, rank: int, size: int, timeout_s: float, stack: contextlib.ExitStack
) -> SavedSteps:
    """For one rank of the group `name`; `stack` closes it. Its sockets lie in the run's private folder."""
    if size == 1:
        return no_other_ranks
    context = zmq.Context()
    stack.callback(context.destroy, linger=0)
    addresses = [socket_address(run_dir, name, follower, "saves") for follower in range(1, size)]
    return Teller(context, addresses) if rank == 0 else Listener(context, addresses[rank - 1], timeout_s)


class Teller:
    """Rank 0's end; never blocks. One thread calls it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], addresses: list[str]) -> None:
        self._followers = []
        for address in addresses:
            self._followers.append(context.socket(zmq.PUSH))
            self._followers[-1].connect(address)  # what is sent before the other end is there waits for it

    def __call__(self, step: int) -> None:
        for follower in self._followers:
            with contextlib.suppress(zmq.Again):  # it takes nothing any more, and stops waiting by itself
                follower.send(str(step).encode(), zmq.NOBLOCK)


class Listener:
    """The end of rank 1 and up. One thread calls it.

    Invariant: it returns when rank 0 has told this step or a later one, and after `timeout_s` in any case
    (test_a_follower_waits_for_the_saves_of_earlier_steps_and_not_for_ever); then rows that are not there are missing,
    as if the pool had lost them.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._told = 0
        self._leader = context.socket(zmq.PULL)
        self._leader.bind(address)

    def __call__(self, step: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._told < step and self._leader.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            self._told = int(self._leader.recv())
