"""Brings a request's earlier rows of one layer back from the pool into the layer's buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from prefill_node.layer_buffers import LayerBuffers
from prefill_node.pool_client import PoolClient, PoolThread
from prefill_node.pool_layout import PoolObjectLayout
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError


class LoadCounters(NamedTuple):
    bytes_loaded: int
    failed_loads: int


class PoolLoader:
    """Loads on a thread of its own, one request at a time, so that one lost object fails one request."""

    def __init__(self, pool: PoolClient, layout: PoolObjectLayout, buffers: LayerBuffers, timeout_s: float) -> None:
        self._pool, self._layout, self._buffers = pool, layout, buffers
        self._thread = PoolThread("pool-loader", timeout_s)
        self._bytes = self._failed = 0

    def load(self, layer: int, chunks: Sequence[Chunk], objects: Mapping[str, Sequence[int]]) -> Mapping[str, str]:
        """Writes rows [0, chunk.start) of `layer` into its slot, for every chunk with `objects`: pool addresses of its
        blocks before `start`, by request id.

        The slot's gate must be open. Returns request id -> cause for those whose rows could not be had; raises
        PoolStuck when the pool does not answer.
        """
        errors = {}
        for chunk in chunks:
            addresses = objects.get(chunk.request_id, ())
            if not addresses:
                continue
            blocks = len(addresses)
            copy = self._layout.copy(
                layer,
                self._buffers.addresses(layer),
                chunk.main_blocks[:blocks],
                chunk.indexer_blocks[:blocks],
                addresses,
            )
            what = f"load layer {layer} of request {chunk.request_id!r}"
            try:
                self._thread.run(what, partial(self._pool.load, copy.pool, copy.device, copy.sizes))
            except PoolError as error:
                self._failed += 1
                errors[chunk.request_id] = f"request {chunk.request_id!r}: cannot {what} from the pool: {error}"
            else:
                self._bytes += copy.nbytes
        return errors

    def counters(self) -> LoadCounters:
        return LoadCounters(self._bytes, self._failed)

    def close(self) -> None:
        self._thread.close()
