"""SIGTERM, SIGHUP and Ctrl-C for the launcher: an exception at a place where it is expected, not anywhere."""

from __future__ import annotations

import signal
import time
from types import FrameType

_POLL_S = 0.1


class Stopped(Exception):
    """A signal asked the launcher to end."""


class Signals:
    """The first signal asks for a clean end at the next `sleep` or `check`; a further one does not wait for it."""

    def __init__(self) -> None:
        self._count = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup, which is to outlive its terminal
            signal.signal(signal.SIGHUP, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises Stopped once a signal has come."""
        if self._count:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Waits. Raises Stopped once a signal has come."""
        deadline = time.monotonic() + seconds
        while not self._count and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
        self.check()
