"""The process that has a worker's pool client: `python -m transfer.mem_pool_child CONTROL LIFE LINE...`.

The arguments are file descriptors to the worker, see `transfer.mem_pool_messages`. It lives no longer than the
worker: the kernel kills it when the other end of LIFE is closed, whatever the wheel is doing then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence

from transfer.hostcann import runtime, shared
from transfer.hostcann.runtime import DeviceError
from transfer.line import Line
from transfer.mem_pool import MemPool, PoolError
from transfer.mem_pool_messages import CONTROL, FIRST_LINE, LIFE, Answer, Call, Join


def main(arguments: Sequence[str]) -> None:
    """Joins the pool and answers calls until it is told to leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides when the pool is left
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptors = [int(argument) for argument in arguments]
    _die_with(descriptors[LIFE])
    control = Line.inherited(descriptors[CONTROL])
    join: Join = control.receive()
    try:
        pool = _joined(join)
    except (PoolError, DeviceError) as error:
        control.send(Answer(error=PoolError(str(error))))
        runtime.end_process(1)
    control.send(Answer())
    for descriptor in descriptors[FIRST_LINE:]:
        threading.Thread(target=_serve, args=(pool, Line.inherited(descriptor)), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        control.receive()
        pool.close()
    runtime.end_process(0)


def _joined(join: Join) -> MemPool:
    for region in join.regions:
        shared.map_shared(region.share, join.options["device_id"], region.address, region.nbytes)
    pool = MemPool(**join.options)
    try:
        for region in join.regions:
            pool.register(region.address, region.nbytes)
    except PoolError:
        pool.close()
        raise
    return pool


def _serve(pool: MemPool, line: Line) -> None:
    while True:
        try:
            call: Call = line.receive()
        except (EOFError, OSError):  # the worker is gone, and soon we are
            return
        try:
            answer = Answer(getattr(pool, call.method)(*call.positional, **call.named))
        except (PoolError, ValueError) as error:
            answer = Answer(error=error)
        except Exception as error:
            answer = Answer(error=PoolError(f"{call.method} failed: {type(error).__name__}: {error}"))
        line.send(answer)


def _die_with(descriptor: int) -> None:
    """Nothing is ever written to this pipe: when its other end is closed, the kernel sends us SIGKILL."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([descriptor], [], [], 0)[0]:  # it was closed before
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
