"""The engine loop of TP ranks other than 0: does what the leader says, reports what the puller says."""

from __future__ import annotations

import queue
import threading

from decode_node.commands import Report, Turn
from decode_node.rank import Rank
from engine.tp_channel import TpFollower

POLL_S = 0.002  # longest a report waits while the leader is silent


class FollowerLoop:
    """Runs on one thread. An exception ends the loop: the rank is then out of step, and its process must end."""

    def __init__(self, rank: Rank, channel: TpFollower, reports: queue.SimpleQueue[Report]) -> None:
        """`reports`: what the rank and its puller put in, from any thread, this loop sends to the leader."""
        self._rank = rank
        self._channel = channel
        self._reports = reports
        self._stopping = threading.Event()

    def stop(self) -> None:
        """The loop ends after its current turn. Callable from any thread."""
        self._stopping.set()

    def run(self) -> None:
        """Returns after `stop`. Raises what a step raised, or RuntimeError when the puller died."""
        while not self._stopping.is_set():
            command = self._channel.next_command(POLL_S)
            if isinstance(command, Turn):
                self._rank.take_in_and_let_go(command)
                self._send_reports()
                if command.step:
                    self._rank.step(command.step)
            self._send_reports()
            if self._rank.source.failure is not None:
                raise RuntimeError(f"the puller died: {self._rank.source.failure}")

    def _send_reports(self) -> None:
        while not self._reports.empty():
            self._channel.report(self._reports.get_nowait())
