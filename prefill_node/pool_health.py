"""The pool as long as it answers; without waiting for it while it does not."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from prefill_node.pool_client import PoolClient, WrappedPool
from transfer.mem_pool import PoolError, PoolFull, PoolKeyExists

log = logging.getLogger(__name__)
T = TypeVar("T")


class HealthCounters(NamedTuple):
    errors: int  # calls that failed
    outages: int  # times it stopped answering


class GuardedPool(WrappedPool):
    """A `PoolClient` over another one. Thread safe.

    A call that fails (a full pool or an existing key is an answer, not a failure) means that the pool is down: for
    `retry_s` further calls raise PoolError at once, then one may try again, and the first answer means that it is up.
    Invariant: nobody waits for a pool that is known to be down (test_a_pool_that_is_down_is_asked_seldom).
    """

    def __init__(self, pool: PoolClient, *, retry_s: float = 1.0) -> None:
        self._pool, self._retry_s = pool, retry_s
        self._lock = threading.Lock()
        self._cause = ""
        self._failed_at = self._retry_at = 0.0
        self._errors = self._outages = 0

    @property
    def down(self) -> str:
        """Why the pool is not used; empty while it is."""
        return self._cause

    def look(self) -> None:
        """Asks a pool that is down whether it is back, if it is time for that. Does not raise for one that is not."""
        if self._cause:
            with contextlib.suppress(PoolError):
                self.exists(["is the pool back"])

    def counters(self) -> HealthCounters:
        return HealthCounters(self._errors, self._outages)

    def _call(self, operation: Callable[[PoolClient], T]) -> T:
        began = time.monotonic()
        if self._cause and began < self._retry_at:
            raise PoolError(f"the pool is down: {self._cause}")
        try:
            result = operation(self._pool)
        except (PoolFull, PoolKeyExists):
            self._up(began)
            raise
        except PoolError as error:
            self._fail(str(error))
            raise
        self._up(began)
        return result

    def _fail(self, cause: str) -> None:
        with self._lock:
            self._errors += 1
            self._outages += not self._cause
            if not self._cause:
                log.warning("the pool is down, prefill goes on without it: %s", cause)
            self._cause, self._failed_at = cause, time.monotonic()
            self._retry_at = self._failed_at + self._retry_s

    def _up(self, began: float) -> None:
        """An operation that began at `began` was answered; if another has failed since then, that says nothing."""
        with self._lock:
            if not self._cause or began < self._failed_at:
                return
            self._cause = ""
        log.info("the pool is up again")
