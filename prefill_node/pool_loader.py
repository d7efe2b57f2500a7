"""Brings earlier rows of one layer back from the pool into the layer's buffer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from prefill_node.layer_buffers import LayerBuffers
from prefill_node.pool_client import PoolClient, PoolThread
from prefill_node.pool_layout import PoolObjectLayout
from prefill_node.pool_objects import Held
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError


class LoadCounters(NamedTuple):
    bytes_loaded: int
    load_seconds: float
    failed_loads: int
    wrong_checksums: int


class PoolLoader:
    """Loads on a thread of its own, one request at a time, so that one lost object fails one request.

    With checksums a row that is not what was saved is an error like one that could not be read
    (test_a_corrupted_object_is_never_used).
    """

    def __init__(self, pool: PoolClient, layout: PoolObjectLayout, buffers: LayerBuffers, timeout_s: float) -> None:
        self._pool, self._layout, self._buffers = pool, layout, buffers
        self._thread = PoolThread("pool-loader", timeout_s)
        self._bytes = self._failed = self._wrong = 0
        self._seconds = 0.0

    def load(self, layer: int, chunks: Sequence[Chunk], earlier: Mapping[str, Held]) -> Mapping[str, str]:
        """Writes rows [0, chunk.start) of `layer` into its slot, for every chunk that has objects in `earlier`.

        The slot's gate must be open. Returns request id -> cause for those whose rows could not be had; raises
        PoolStuck when the pool does not answer.
        """
        errors = {}
        started = time.monotonic()
        for chunk in chunks:
            objects = earlier[chunk.request_id].addresses if chunk.request_id in earlier else ()
            if not objects:
                continue
            main, indexer = chunk.main_blocks[: len(objects)], chunk.indexer_blocks[: len(objects)]
            copy = self._layout.copy(layer, self._buffers.pool_addresses(layer), main, indexer, objects)
            what = f"load layer {layer} of request {chunk.request_id!r}"
            try:
                self._thread.run(what, partial(self._pool.load, copy.pool, copy.device, copy.sizes))
            except PoolError as error:
                self._failed += 1
                errors[chunk.request_id] = f"request {chunk.request_id!r}: cannot {what} from the pool: {error}"
                continue
            self._bytes += copy.nbytes
            if wrong := self._buffers.broken_blocks(layer, chunk.keys[: len(objects)], main, indexer):
                self._failed += 1
                self._wrong += 1
                errors[chunk.request_id] = (
                    f"request {chunk.request_id!r}: cannot {what} from the pool: blocks {wrong} have wrong checksums"
                )
        self._seconds += time.monotonic() - started
        return errors

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
                where = self._thread.run(f"locate objects of {request_id!r}", lambda: self._pool.locate(held.names))
            except PoolError as error:
                cause = str(error)
            else:
                if where == list(held.addresses):
                    return ""
                cause = "objects have moved or disappeared"
        self._failed += 1
        return f"request {request_id!r}: its rows from the pool are not certain: {cause}"

    def counters(self) -> LoadCounters:
        return LoadCounters(self._bytes, self._seconds, self._failed, self._wrong)

    def close(self) -> None:
        self._thread.close()
