"""Brings earlier rows of one layer back from the pool into the layer's buffer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefill_node.block_checksums import NamedBlocks
from prefill_node.busy_time import BusyTime
from prefill_node.layer_buffers import LayerBuffers
from prefill_node.pool_client import PoolClient, PoolThread
from prefill_node.pool_layout import Copy, PoolObjectLayout
from prefill_node.pool_objects import Held
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError

LOADS_AT_ONCE = 2  # while one call comes back and the next is prepared, another one copies
T = TypeVar("T")


class Wanted(NamedTuple):
    """A layer whose earlier rows these chunks need."""

    layer: int
    chunks: Sequence[Chunk]


class LoadCounters(NamedTuple):
    bytes_loaded: int
    load_seconds: float  # in which rows were being loaded or checked
    failed_loads: int
    wrong_checksums: int


class PoolLoader:
    """Loads one request at a time, so that one lost object fails one request, and two side by side. Thread safe.

    With checksums a row that is not what was saved is an error like one that could not be read
    (test_a_corrupted_object_is_never_used). Loads that are slow, but within a pool call's deadline, only take their
    time, however many there are (test_loads_that_take_almost_their_deadline_end_no_process).
    """

    def __init__(self, pool: PoolClient, layout: PoolObjectLayout, buffers: LayerBuffers, timeout_s: float) -> None:
        self._pool, self._layout, self._buffers = pool, layout, buffers
        self._threads = [PoolThread(f"pool-loader-{number}", timeout_s) for number in range(LOADS_AT_ONCE)]
        self._idle: queue.SimpleQueue[PoolThread] = queue.SimpleQueue()  # so no call waits for another one
        for thread in self._threads:
            self._idle.put(thread)
        self._lock = threading.Lock()  # of the counters
        self._bytes = self._failed = self._wrong = 0
        self._loading = BusyTime()
        self._places: dict[str, tuple[Held, NamedBlocks, NDArray[np.int64]]] = {}  # by request id, of this step

    def begin_step(self) -> None:
        """The loads that follow are a new step's."""
        self._places = {}

    def load(self, wanted: Sequence[Wanted], earlier: Mapping[str, Held]) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Writes rows [0, chunk.start) of layers into their slots, for every chunk that has objects in `earlier`.

        The slots' gates must be open. Rows of all `wanted` layers are copied in one call for each request, then
        checked; yields each layer and request id -> cause for those whose rows could not be had. Raises PoolStuck when
        the pool does not answer.
        """
        with self._loading:
            chunks = {chunk.request_id: chunk for want in wanted for chunk in want.chunks}
            missing = {}
            for request_id, chunk in chunks.items():
                layers = [want.layer for want in wanted if any(each.request_id == request_id for each in want.chunks)]
                if request_id in earlier and (cause := self._copy(layers, chunk, earlier[request_id])):
                    missing[request_id] = cause
        for layer, wanting in wanted:
            with self._loading:
                causes = {
                    chunk.request_id: missing.get(chunk.request_id) or self._check(layer, chunk, earlier)
                    for chunk in wanting
                }
                errors = {request_id: cause for request_id, cause in causes.items() if cause}
            yield layer, errors

    def size(self, wanted: Wanted) -> int:
        """Bytes to be loaded."""
        row_bytes = sum(size for _, size in self._layout.parts(wanted.layer))
        return row_bytes * sum(chunk.start for chunk in wanted.chunks) // self._buffers.geometry.block_size

    def confirm(self, request_id: str, held: Held) -> str:
        """After the last load of a step: why these objects may have been others meanwhile; empty if they were not.

        Their lease may have ended, or the pool may have been restarted and given their memory to others. Raises
        PoolStuck when the pool does not answer.
        """
        if not held.names:
            return ""
        cause = "its lease of them ended"
        if time.monotonic() < held.until:
            try:
                where = self._run(f"locate objects of {request_id!r}", lambda: self._pool.locate(held.names))
            except PoolError as error:
                cause = str(error)
            else:
                if where == list(held.addresses):
                    return ""
                cause = "objects have moved or disappeared"
        self._count(failed=1)
        return f"request {request_id!r}: its rows from the pool are not certain: {cause}"

    def counters(self) -> LoadCounters:
        with self._lock:
            return LoadCounters(self._bytes, self._loading.seconds, self._failed, self._wrong)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()

    def _run(self, what: str, call: Callable[[], T]) -> T:
        thread = self._idle.get()
        try:
            return thread.run(what, call)
        finally:
            self._idle.put(thread)

    def _copy(self, layers: Sequence[int], chunk: Chunk, held: Held) -> str:
        """Why the rows could not be had; empty if they could."""
        blocks, objects = self._places_of(chunk, held)
        copy = Copy.nothing()
        for layer in layers:
            tensors = self._buffers.pool_addresses(layer)
            copy.extend(self._layout.copy(layer, tensors, blocks.main, blocks.indexer, objects))
        if not copy.sizes:
            return ""
        what = f"load layer {' and '.join(map(str, layers))} of request {chunk.request_id!r}"
        try:
            self._run(what, partial(self._pool.load, copy.pool, copy.device, copy.sizes))
        except PoolError as error:
            self._count(failed=1)
            return f"request {chunk.request_id!r}: cannot {what} from the pool: {error}"
        self._count(nbytes=copy.nbytes)
        return ""

    def _check(self, layer: int, chunk: Chunk, earlier: Mapping[str, Held]) -> str:
        """Why the rows that were copied cannot be used; empty if they can, or none were."""
        if chunk.request_id not in earlier:
            return ""
        blocks, _ = self._places_of(chunk, earlier[chunk.request_id])
        wrong = self._buffers.broken_blocks(layer, blocks)
        if not wrong:
            return ""
        self._count(failed=1, wrong=1)
        return (
            f"request {chunk.request_id!r}: cannot load layer {layer} of request {chunk.request_id!r} from the pool: "
            f"blocks {wrong} have wrong checksums"
        )

    def _places_of(self, chunk: Chunk, held: Held) -> tuple[NamedBlocks, NDArray[np.int64]]:
        """Blocks and objects, which are the same for every layer of a step."""
        known = self._places.get(chunk.request_id)
        if known is None or known[0] is not held:
            blocks = slice(len(held.addresses))
            named = NamedBlocks.of(chunk.keys[blocks], chunk.main_blocks[blocks], chunk.indexer_blocks[blocks])
            known = self._places[chunk.request_id] = held, named, np.array(held.addresses, dtype=np.int64)
        return known[1:]

    def _count(self, *, nbytes: int = 0, failed: int = 0, wrong: int = 0) -> None:
        with self._lock:
            self._bytes, self._failed, self._wrong = self._bytes + nbytes, self._failed + failed, self._wrong + wrong
