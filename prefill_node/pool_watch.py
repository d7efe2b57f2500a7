"""Looks at the pool from time to time, so that status is true also while no request asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from transfer.mem_pool import PoolError, PoolUsage

_STOP_S = 1.0


class Joining(Protocol):
    """The part of `JoiningPool` used here."""

    @property
    def missing(self) -> str:
        """Why it has not been joined; empty when it has."""

    def join(self) -> None:
        """One try, if it is time for one."""


class PoolWatch:
    """A thread which, every `period_s`, joins a pool that was not there so far and measures it.

    It asks the pool's HTTP service, never its client: a call of that which meets a restart of the service may not
    return. Requests never wait for this thread.
    """

    def __init__(self, joining: Joining, measure: Callable[[], PoolUsage] | None, *, period_s: float) -> None:
        """`measure` may raise PoolError; None: this rank leaves it to another one."""
        self._joining, self._measure, self._period_s = joining, measure, period_s
        self._usage: PoolUsage | None = None
        self._silent = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-watch", daemon=True)
        self._thread.start()

    @property
    def usage(self) -> PoolUsage | None:
        """What the pool holds, over all its members; None when it does not say."""
        return self._usage

    @property
    def missing(self) -> str:
        """Why the pool cannot be used, as far as this thread sees; empty if it can."""
        return self._joining.missing or self._silent

    def close(self) -> None:
        """Ends the thread; one that is busy with a pool that hangs is left behind."""
        self._stopping.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._joining.join()
            if self._measure is not None:
                self._look(self._measure)

    def _look(self, measure: Callable[[], PoolUsage]) -> None:
        try:
            self._usage, self._silent = measure(), ""
        except PoolError as error:
            self._usage, self._silent = None, str(error)
