"""Gets layer buffers ready before their layer is computed: gate, then rows from the pool, while others are computed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from prefill_node.plan import LayerBufferPlan
from prefill_node.pool_loader import PoolLoader
from prefill_node.pool_objects import Held
from prefill_node.steps import Chunk


class Gate(Protocol):
    """The part of `ReuseGate` used here."""

    def wait(self, slot: int) -> object:
        """Blocks until the slot may be overwritten."""


class Prefetcher:
    """Loads run one layer after the other on a thread of their own, so a layer's load overlaps the layers before it.

    Invariant (test_nothing_is_written_before_the_gate_opens): nothing is loaded into a slot before its gate was waited
    for, and the gate is waited for only after the layer that used the slot before has been computed (`computed`).
    """

    def __init__(self, plan: LayerBufferPlan, gate: Gate, loader: PoolLoader) -> None:
        self._plan, self._gate, self._loader = plan, gate, loader
        self._next = {earlier: layer for layer, earlier in plan.prefetch_of.items()}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: dict[int, Future[Mapping[str, str]]] = {}
        self._chunks: Sequence[Chunk] = ()
        self._earlier: Mapping[str, Held] = {}
        self.wait_seconds = 0.0  # how long the computation waited for loads

    def begin(self, chunks: Sequence[Chunk], earlier: Mapping[str, Held]) -> None:
        """A step begins; `earlier` are the pool objects of the rows before each chunk, where they are needed."""
        self._chunks, self._earlier = chunks, earlier
        for layer in range(self._plan.num_layers):
            if layer not in self._plan.prefetch_of:  # the first layer in its slot
                self._fetch(layer)

    def ready(self, layer: int) -> Mapping[str, str]:
        """Waits until `layer`'s slot may be written and has its earlier rows; why they are missing, by request id.

        Raises GateStuck or PoolStuck.
        """
        ahead = self._ahead.pop(layer, None)
        if ahead is None:
            self._gate.wait(self._plan.slot_of_layer[layer])
            return {}
        started = time.monotonic()
        try:
            return ahead.result()
        finally:
            self.wait_seconds += time.monotonic() - started

    def computed(self, layer: int) -> None:
        """`layer` needs its slot no more: the next layer that uses it may be fetched."""
        if layer in self._next:
            self._fetch(self._next[layer])

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, layer: int) -> None:
        reused = self._plan.is_reused(layer)
        wanting = [
            chunk for chunk in self._chunks if chunk.request_id in self._earlier and (reused or chunk.takes_prefix)
        ]
        if wanting:
            self._ahead[layer] = self._thread.submit(self._load, layer, wanting, self._earlier)

    def _load(self, layer: int, chunks: Sequence[Chunk], earlier: Mapping[str, Held]) -> Mapping[str, str]:
        self._gate.wait(self._plan.slot_of_layer[layer])
        return self._loader.load(layer, chunks, earlier)
