"""A pool that may not be there yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from prefill_node.pool_client import PoolClient, WrappedPool
from transfer.mem_pool import PoolError
from transfer.mem_pool_process import PoolLost

log = logging.getLogger(__name__)
T = TypeVar("T")
_LONGEST_RETRY_S = 10.0


class OpenPool(PoolClient, Protocol):
    """A pool that has been joined: `transfer.mem_pool_process.PoolProcess`. It may raise PoolLost."""

    def probe(self) -> None:
        """Finds out, when nobody uses it, whether it still can be used: bounded, and `ended` tells what was found."""

    def ended(self) -> str:
        """Why it cannot be used any more; empty while it can."""

    def close(self) -> None:
        """Leaves it."""


class JoiningPool(WrappedPool):
    """Until it has been joined, every operation raises PoolError with the reason.

    `join` is called again and again by one thread (PoolWatch), which then also finds out whether it is lost. Tries
    that fail, or whose pool is lost again within ten seconds, become rarer, up to one in ten seconds. Nobody waits long
    for it: the meta service lets nobody in for up to a minute after a member was killed
    (test_a_pool_that_lets_nobody_in_holds_nobody_up). A pool that is lost later is joined again in the same way
    (test_a_lost_pool_is_joined_again), also while nobody calls it (test_a_client_that_died_idle_is_noticed,
    test_a_client_that_hangs_idle_is_replaced_before_a_request_meets_it).
    """

    def __init__(self, open_pool: Callable[[], OpenPool], *, retry_s: float = 1.0) -> None:
        """`open_pool` raises PoolError when the pool cannot be joined."""
        self._open, self._shortest_retry_s = open_pool, retry_s
        self._retry_s, self._retry_at, self._joined_at = retry_s, 0.0, 0.0
        self._pool: OpenPool | None = None
        self._lost: list[OpenPool] = []  # still to be left
        self._cause = "it has not been joined yet"
        self._closed = False
        self._lock = threading.Lock()
        self._trying = threading.Lock()

    @property
    def missing(self) -> str:
        """Why it has not been joined; empty when it has."""
        return self._cause if self._pool is None else ""

    def join_within(self, seconds: float) -> None:
        """The first try; it goes on by itself if it takes longer. Raises what `open_pool` raises but PoolError."""
        failures: list[Exception] = []

        def first_try() -> None:
            try:
                self.join()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=first_try, name="join-pool", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            log.warning("prefill starts without its pool, which has not let it in within %g s", seconds)
        if failures:
            raise failures[0]

    def join(self) -> None:
        """One try, if it is time for one and none is under way; whether a pool that was joined still answers.

        Does not raise for a pool that is not there.
        """
        if self._trying.acquire(blocking=False):
            try:
                self._try()
            finally:
                self._trying.release()

    def close(self) -> None:
        """Leaves the pool, if it was joined. Idempotent."""
        with self._lock:
            self._closed, pool = True, self._pool
        self._leave_lost()
        if pool is not None:
            pool.close()

    def _try(self) -> None:
        if (pool := self._pool) is not None:
            pool.probe()
            if cause := pool.ended():
                self._lose(pool, cause)
        if self._pool is not None or time.monotonic() < self._retry_at:
            return
        self._leave_lost()
        try:
            pool = self._open()
        except PoolError as error:
            if str(error) != self._cause:
                log.warning("prefill goes on without its pool and tries again to join it: %s", error)
            self._cause = str(error)
            self._wait_longer()
            return
        with self._lock:
            self._pool, self._joined_at, closed = pool, time.monotonic(), self._closed
        if closed:
            pool.close()
        else:
            log.info("joined the pool")

    def _call(self, operation: Callable[[PoolClient], T]) -> T:
        if (pool := self._pool) is None:
            raise PoolError(self._cause)
        try:
            return operation(pool)
        except PoolLost as error:
            self._lose(pool, str(error))
            raise

    def renew(self, cause: str) -> None:
        """Gives up the pool, if it was joined, to join it anew at the next `join`."""
        if (pool := self._pool) is not None:
            self._lose(pool, cause)

    def _lose(self, pool: OpenPool, cause: str) -> None:
        with self._lock:
            if self._pool is not pool:  # another call has noticed before
                return
            self._cause, self._pool = cause, None
            self._lost.append(pool)
            if time.monotonic() - self._joined_at > _LONGEST_RETRY_S:
                self._retry_s, self._retry_at = self._shortest_retry_s, 0.0
            else:
                self._wait_longer()
        log.warning("the pool is to be joined anew: %s", cause)

    def _wait_longer(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

    def _leave_lost(self) -> None:
        """Before another one is joined: there is room for the memory of one."""
        while self._lost:
            self._lost.pop().close()
