"""Does a prefill process still run? Asked over its connection before a wheel waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_REPEAT_S = 1.0  # a question or its answer may be lost


class Liveness:
    """Asks one peer for a sign of life. ``ask`` sends a Ping with that number; ``heard`` is told of each Pong.

    A process that is stopped (SIGSTOP, a debugger, a frozen container) still accepts connections, and the wheel opens
    links one by one: opening one to such a peer would keep every other peer's from being opened until it goes on.
    What is left is a peer which is stopped between its answer and the few milliseconds of opening.
    """

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._changed = threading.Condition()
        self._asked = 0
        self._heard = 0

    def confirmed(self, timeout_s: float) -> bool:
        """Whether the peer answers a question asked from now on, within that time."""
        end = time.monotonic() + timeout_s
        first = self._asked + 1
        while (left := end - time.monotonic()) > 0:
            self._asked += 1
            self._ask(self._asked)
            with self._changed:
                if self._changed.wait_for(lambda: self._heard >= first, min(left, _REPEAT_S)):
                    return True
        return False

    def heard(self, number: int) -> None:
        """An answer came; numbers never asked are ignored. Called by the socket's thread."""
        with self._changed:
            if self._heard < number <= self._asked:
                self._heard = number
                self._changed.notify_all()
