"""What prefill asks of the pool, and the thread that asks it under a deadline."""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
_STOP_S = 5.0


class PoolClient(Protocol):
    """The part of `transfer.mem_pool.MemPool` used here. Failures raise `transfer.mem_pool.PoolError`."""

    def alloc(self, keys: Sequence[str], sizes: Sequence[int], *, wait_s: float = 0.0) -> list[int]:
        """Addresses of new objects, waiting up to `wait_s` for room; others do not see them until `finish`."""

    def save(self, pool: Sequence[int], sources: Sequence[int], sizes: Sequence[int], /) -> None:
        """Copies device memory to the pool."""

    def load(self, pool: Sequence[int], destinations: Sequence[int], sizes: Sequence[int], /) -> None:
        """Copies from the pool to device memory."""

    def finish(self, keys: Sequence[str]) -> None:
        """The objects are complete."""

    def abort(self, keys: Sequence[str]) -> None:
        """Gives unfinished objects back."""

    def lease(self, keys: Sequence[str], ttl_ms: int) -> list[int | None]:
        """Protects finished objects from eviction; their addresses, None where an object is gone."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which objects are finished and still there."""

    def locate(self, keys: Sequence[str]) -> list[int | None]:
        """Addresses of finished objects at this moment, without a lease."""

    def release(self, keys: Sequence[str]) -> None:
        """Ends the leases."""

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Deletes finished objects; which of them were there."""


class WrappedPool(ABC):
    """A `PoolClient` whose every operation goes through `_call`."""

    def alloc(self, keys: Sequence[str], sizes: Sequence[int], *, wait_s: float = 0.0) -> list[int]:
        return self._call(lambda pool: pool.alloc(keys, sizes, wait_s=wait_s))

    def save(self, pool: Sequence[int], sources: Sequence[int], sizes: Sequence[int], /) -> None:
        self._call(lambda inner: inner.save(pool, sources, sizes))

    def load(self, pool: Sequence[int], destinations: Sequence[int], sizes: Sequence[int], /) -> None:
        self._call(lambda inner: inner.load(pool, destinations, sizes))

    def finish(self, keys: Sequence[str]) -> None:
        self._call(lambda pool: pool.finish(keys))

    def abort(self, keys: Sequence[str]) -> None:
        self._call(lambda pool: pool.abort(keys))

    def lease(self, keys: Sequence[str], ttl_ms: int) -> list[int | None]:
        return self._call(lambda pool: pool.lease(keys, ttl_ms))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self._call(lambda pool: pool.exists(keys))

    def locate(self, keys: Sequence[str]) -> list[int | None]:
        return self._call(lambda pool: pool.locate(keys))

    def release(self, keys: Sequence[str]) -> None:
        self._call(lambda pool: pool.release(keys))

    def remove(self, keys: Sequence[str]) -> list[bool]:
        return self._call(lambda pool: pool.remove(keys))

    @abstractmethod
    def _call(self, operation: Callable[[PoolClient], T]) -> T:
        """Carries out one operation on the pool behind."""


class PoolStuck(RuntimeError):
    """The pool did not return from its calls in time. It may still touch our memory, so the process must end."""


class PoolThread:
    """Runs pool calls one after the other on a thread of its own.

    Invariant: whoever waits for a call waits no longer than twice the timeout (test_every_wait_has_a_deadline); twice,
    so that calls which the pool itself gives up in time are errors of a request, not the end of the process.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """`timeout_s` is the deadline of one pool operation."""
        self._patience_s = 2 * timeout_s
        self.failure = ""  # why the thread ended early
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Runs `call` after all earlier ones. It must handle its own errors; one that escapes ends the thread."""
        self._tasks.put(call)

    def run(self, what: str, call: Callable[[], T]) -> T:
        """Runs `call` after all earlier ones and returns its result or raises its error.

        Raises PoolStuck, naming `what`, when that takes too long.
        """
        return self.ask(what, call)()

    def ask(self, what: str, call: Callable[[], T]) -> Callable[[], T]:
        """Runs `call` after all earlier ones. What is returned waits for it, from any thread, and answers as `run`."""
        future: Future[T] = Future()

        def resolve() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        def answer() -> T:
            try:
                return future.result(self._patience_s)
            except FutureTimeout:
                raise PoolStuck(
                    f"the pool did not {what} within {self._patience_s:g} s, twice pool.timeout_s{self._because()}"
                ) from None

        self.submit(resolve)
        return answer

    def close(self) -> None:
        """Lets the queued calls end; gives up after a few seconds."""
        self._tasks.put(None)
        self._thread.join(_STOP_S)

    def _because(self) -> str:
        return f" ({self.failure})" if self.failure else ""

    def _run(self) -> None:
        try:
            while (call := self._tasks.get()) is not None:
                call()
        except Exception as error:
            log.exception("%s ended", threading.current_thread().name)
            self.failure = f"{threading.current_thread().name} ended: {type(error).__name__}: {error}"
