"""Looks at the pool from time to time, so that status is true also while no request asks for it."""

from __future__ import annotations

import threading
from typing import Protocol

from transfer.mem_pool import PoolError
from transfer.pool_monitor import PoolUsage

_STOP_S = 1.0


class Joining(Protocol):
    """The part of `JoiningPool` used here."""

    @property
    def missing(self) -> str:
        """Why it has not been joined; empty when it has."""

    def join(self) -> None:
        """One try, if it is time for one."""

    def renew(self, cause: str) -> None:
        """Gives it up, to join it anew."""


class Guarded(Protocol):
    """The part of `GuardedPool` used here."""

    def look(self) -> None:
        """Asks a pool that is down whether it is back."""


class Monitor(Protocol):
    """The part of `PoolMonitor` used here."""

    restarts: int

    def usage(self) -> PoolUsage:
        """May raise PoolError."""


class PoolWatch:
    """A thread which, every `period_s`, measures the pool, and joins one that was not there so far or is lost.

    A client that outlives its service cannot allocate where it remembers objects of the old one, so it is replaced
    (test_a_client_is_replaced_with_its_service). A pool that was down is up again without a request that tries it
    (test_a_pool_that_is_back_is_noticed_without_a_request). Requests never wait for this thread.

    Nobody leaves or joins while the service does not answer: a client that has to be killed because it cannot leave
    keeps everybody out for a minute (test_nobody_leaves_or_joins_a_pool_whose_service_is_silent).
    """

    def __init__(self, joining: Joining, guarded: Guarded, monitor: Monitor, *, period_s: float) -> None:
        self._joining, self._guarded, self._monitor, self._period_s = joining, guarded, monitor, period_s
        self._restarts = monitor.restarts
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
        return self._silent or self._joining.missing

    def close(self) -> None:
        """Ends the thread; one that is busy with a pool that hangs is left behind."""
        self._stopping.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._measure()
            if self._restarts != self._monitor.restarts:
                self._restarts = self._monitor.restarts
                self._joining.renew("its service was restarted")
            if not self._silent:
                self._joining.join()
            if not self.missing:
                self._guarded.look()

    def _measure(self) -> None:
        try:
            self._usage, self._silent = self._monitor.usage(), ""
        except PoolError as error:
            self._usage, self._silent = None, str(error)
