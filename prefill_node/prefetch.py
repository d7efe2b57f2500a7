"""Gets layer buffers ready before their layer is computed: gate, then rows from the pool, while others are computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from prefill_node.plan import LayerBufferPlan
from prefill_node.pool_loader import PoolLoader
from prefill_node.pool_objects import Held
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError


class Gate(Protocol):
    """The part of `ReuseGate` used here."""

    def wait(self, slot: int) -> object:
        """Blocks until the slot may be overwritten."""


class Prefetcher:
    """Loads run one layer after the other on a thread of their own, so a layer's load overlaps the layers before it.

    Invariant (test_nothing_is_written_before_the_gate_opens): nothing is loaded into a slot before its gate was waited
    for, and the gate is waited for only after the layer that used the slot before has been computed (`computed`).

    With the last layer that a chunk's rows are loaded for they are confirmed: they were what they should have been.
    """

    def __init__(self, plan: LayerBufferPlan, gate: Gate, loader: PoolLoader) -> None:
        self._plan, self._gate, self._loader = plan, gate, loader
        self._next = {earlier: layer for layer, earlier in plan.prefetch_of.items()}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: dict[int, Future[Mapping[str, str]]] = {}
        self._chunks: Sequence[Chunk] = ()
        self._last_load: Mapping[str, int] = {}  # request id -> layer
        self._earlier: Mapping[str, Callable[[], Held]] = {}
        self.wait_seconds = 0.0  # how long the computation waited for readers, saves and loads

    def begin(self, chunks: Sequence[Chunk], earlier: Mapping[str, Callable[[], Held]]) -> None:
        """A step begins; `earlier` waits for the pool objects of the rows before each chunk, where they are needed.

        It may raise PoolError: the request's rows are not there; or PoolStuck.
        """
        self._chunks, self._earlier = chunks, earlier
        layers = range(self._plan.num_layers)
        self._last_load = {
            chunk.request_id: max((layer for layer in layers if self._wants(layer, chunk)), default=-1)
            for chunk in chunks
        }
        for layer in layers:
            if layer not in self._plan.prefetch_of:  # the first layer in its slot
                self._fetch(layer)

    def ready(self, layer: int) -> Mapping[str, str]:
        """Waits until `layer`'s slot may be written and has its earlier rows; why they are missing, by request id.

        Raises GateStuck or PoolStuck.
        """
        started = time.monotonic()
        try:
            if ahead := self._ahead.pop(layer, None):
                return ahead.result()
            self._gate.wait(self._plan.slot_of_layer[layer])
            return {}
        finally:
            self.wait_seconds += time.monotonic() - started

    def computed(self, layer: int) -> None:
        """`layer` needs its slot no more: the next layer that uses it may be fetched."""
        if layer in self._next:
            self._fetch(self._next[layer])

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, layer: int) -> None:
        wanting = [chunk for chunk in self._chunks if self._wants(layer, chunk)]
        if wanting:
            self._ahead[layer] = self._thread.submit(self._load, layer, wanting, self._earlier)

    def _wants(self, layer: int, chunk: Chunk) -> bool:
        """Whether the chunk's earlier rows of `layer` must come from the pool."""
        return chunk.request_id in self._earlier and (self._plan.is_reused(layer) or chunk.takes_prefix)

    def _load(
        self, layer: int, chunks: Sequence[Chunk], earlier: Mapping[str, Callable[[], Held]]
    ) -> Mapping[str, str]:
        held, missing = {}, {}
        for chunk in chunks:
            try:
                held[chunk.request_id] = earlier[chunk.request_id]()
            except PoolError as error:
                missing[chunk.request_id] = f"request {chunk.request_id!r}: {error}"
        self._gate.wait(self._plan.slot_of_layer[layer])
        errors = {**missing, **self._loader.load(layer, chunks, held)}
        for request_id in held.keys() - errors.keys():
            if layer == self._last_load[request_id] and (why := self._loader.confirm(request_id, held[request_id])):
                errors[request_id] = why
        return errors
