"""Looks at the pool from time to time, so that status is true also while no request asks for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from prefill_node.pool_client import PoolClient
from transfer.mem_pool import PoolError, PoolUsage

_STOP_S = 1.0
_NOBODYS_KEY = "is the pool there"


class PoolWatch:
    """A thread which, every `period_s`, joins a pool that was not there so far, asks it something and measures it.

    Requests never wait for it.
    """

    def __init__(
        self,
        join: Callable[[], None],
        pool: PoolClient,
        measure: Callable[[], PoolUsage] | None,
        *,
        period_s: float,
    ) -> None:
        """`pool` notes by itself whether it answers (GuardedPool); `measure` may raise PoolError."""
        self._join, self._pool, self._measure, self._period_s = join, pool, measure, period_s
        self._usage: PoolUsage | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-watch", daemon=True)
        self._thread.start()

    @property
    def usage(self) -> PoolUsage | None:
        """What the pool holds, over all its members; None when it does not say."""
        return self._usage

    def close(self) -> None:
        """Ends the thread; one that is busy with a pool that hangs is left behind."""
        self._stopping.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._join()
            with contextlib.suppress(PoolError):  # GuardedPool has noted it
                self._pool.exists([_NOBODYS_KEY])
            if self._measure is not None:
                self._usage = self._measured(self._measure)

    @staticmethod
    def _measured(measure: Callable[[], PoolUsage]) -> PoolUsage | None:
        try:
            return measure()
        except PoolError:
            return None
