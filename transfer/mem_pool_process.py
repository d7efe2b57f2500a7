"""The pool through a client in a process of its own, which can be ended when it hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from math import inf
from typing import Any, cast

from transfer import hostcann
from transfer.hostcann import shared
from transfer.line import Line
from transfer.mem_pool import PoolError
from transfer.mem_pool_messages import Answer, Call, Join, Leave, PoolOptions, SharedRegion

log = logging.getLogger(__name__)
_LINES = 4  # calls at a time: saves, two loads, and who looks whether the pool is back
_JOIN_S = 90.0  # the meta service lets nobody in for up to a minute after a member was killed
_LEAVE_S = 2.3  # it takes 2.1 s where nothing is wrong
_PROBE_S = 5.0
_END_S = 10.0


class PoolLost(PoolError):
    """The client is gone, and nothing of it touches our memory any more; the pool has to be joined anew."""


class PoolProcess:
    """As `transfer.mem_pool.MemPool`, which it has in a child process. Calls may come from several threads.

    A call of MemCache's client that meets a restart of the service may never return, and may go on copying from or to
    device memory at any time. So it is made in a process that maps the same device memory.

    Invariant: a call returns or raises within its deadline, however long it is
    (test_a_long_call_to_a_client_that_hangs_ends_too), and after a PoolLost no copy can be under way, as the process
    has ended (test_a_call_that_hangs_ends_its_process_and_nothing_is_copied_later).
    """

    def __init__(self, options: PoolOptions, regions: Sequence[tuple[int, int]], *, call_s: float) -> None:
        """Joins the pool; `save` and `load` may use `regions`, (address, bytes) of device memory.

        `call_s` is the deadline of a call. Raises PoolError when the pool cannot be joined, DeviceError when the memory
        cannot be shared.
        """
        self._call_s = call_s
        described = tuple(SharedRegion(address, nbytes, shared.share(address)) for address, nbytes in regions)
        try:
            self._process, self._life, self._control, lines = _start()
        except OSError as error:
            raise PoolError(f"the pool's client cannot be started: {error}") from error
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()  # those not in use
        for line in lines:
            self._lines.put(line)
        try:
            self._ask(self._control, Join(options, described), "join the pool", time.monotonic() + _JOIN_S)
        except PoolError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process with the client."""
        return self._process.pid

    def ended(self) -> str:
        """Why the client cannot be asked any more; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"the pool's client has ended with status {code}"

    def probe(self) -> None:
        """A client that nobody asks has to answer a call that does nothing, or is ended. Waits a few seconds for it.

        So one that hangs is noticed before a call has to wait for it (test_an_idle_client_that_hangs_is_ended).
        """
        if self._lines.qsize() == _LINES:
            with contextlib.suppress(PoolError):
                self._call("save", (), (), (), within_s=_PROBE_S)

    def alloc(self, keys: Sequence[str], sizes: Sequence[int], *, wait_s: float = 0.0) -> list[int]:
        return cast("list[int]", self._call("alloc", keys, sizes, wait_s=wait_s))

    def save(self, pool: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        self._call("save", *_packed(pool, sources, sizes))

    def load(self, pool: Sequence[int], destinations: Sequence[int], sizes: Sequence[int]) -> None:
        self._call("load", *_packed(pool, destinations, sizes))

    def finish(self, keys: Sequence[str]) -> None:
        self._call("finish", keys)

    def abort(self, keys: Sequence[str]) -> None:
        self._call("abort", keys)

    def lease(self, keys: Sequence[str], ttl_ms: int) -> list[int | None]:
        return cast("list[int | None]", self._call("lease", keys, ttl_ms))

    def locate(self, keys: Sequence[str]) -> list[int | None]:
        return cast("list[int | None]", self._call("locate", keys))

    def release(self, keys: Sequence[str]) -> None:
        self._call("release", keys)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return cast("list[bool]", self._call("exists", keys))

    def remove(self, keys: Sequence[str]) -> list[bool]:
        return cast("list[bool]", self._call("remove", keys))

    def close(self) -> None:
        """Leaves the pool; after a few seconds the process is ended without. Idempotent, and the last call.

        What a process that was ended had of the emulated driver's memory is removed.
        """
        if self._life < 0:
            return
        with contextlib.suppress(OSError):
            self._control.send(Leave())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        self._end()
        self._control.close()
        os.close(self._life)
        self._life = -1
        for line in [self._lines.get() for _ in range(_LINES)]:  # whoever waits for an answer gets none any more
            line.close()
            self._lines.put(line)
        if self._process.returncode:
            hostcann.sweep_own_root()

    def _call(self, method: str, *positional: Any, within_s: float = inf, **named: Any) -> Any:
        deadline = time.monotonic() + min(self._call_s, within_s)
        try:
            line = self._lines.get(timeout=self._call_s)
        except queue.Empty:
            raise PoolError(f"{method}: all lines to the pool's client were busy for {self._call_s:g} s") from None
        try:
            return self._ask(line, Call(method, positional, named), method, deadline)
        finally:
            self._lines.put(line)

    def _ask(self, line: Line, message: Join | Call, what: str, deadline: float) -> Any:
        try:
            line.send(message, until=deadline)
            answer: Answer = line.receive(until=deadline)
        except TimeoutError:
            self._end()
            raise PoolLost(f"{what}: the pool did not answer in time; its client was ended") from None
        except (OSError, EOFError) as error:
            self._end()
            raise PoolLost(f"{what}: {self.ended()}") from error
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _end(self) -> None:
        """Returns when the process is gone."""
        self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"process {self._process.pid} with the pool's client does not die") from None


def _start() -> tuple[subprocess.Popen[bytes], int, Line, list[Line]]:
    """The client's process, our end of LIFE, control line and other lines. Raises OSError, with nothing left open."""
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        pairs = []
        for _ in range(1 + _LINES):
            mine, other = Line.pair()
            ours.callback(mine.close)
            theirs.callback(other.close)
            pairs.append((mine, other))
        life, held = os.pipe()
        theirs.callback(os.close, life)
        ours.callback(os.close, held)
        (control, other_control), *lines = pairs
        descriptors = [other_control.fileno(), life, *(other.fileno() for _, other in lines)]
        process = subprocess.Popen(
            [sys.executable, "-m", "transfer.mem_pool_child", *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
        )
        ours.pop_all()
    return process, held, control, [mine for mine, _ in lines]


def _packed(*lists: Sequence[int]) -> tuple[array[int], ...]:
    """Of 64-bit numbers: much quicker to send than lists."""
    return tuple(numbers if isinstance(numbers, array) else array("q", numbers) for numbers in lists)
