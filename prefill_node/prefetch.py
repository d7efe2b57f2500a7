"""Gets layer buffers ready before their layer is computed: gate, then rows from the pool, while others are computed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from prefill_node.plan import LayerBufferPlan
from prefill_node.pool_layout import CALL_BYTES
from prefill_node.pool_loader import LOADS_AT_ONCE, PoolLoader, Wanted
from prefill_node.pool_objects import Held
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError


class Gate(Protocol):
    """The part of `ReuseGate` used here."""

    def wait(self, slot: int) -> object:
        """Blocks until the slot may be overwritten."""

    def is_open(self, slot: int) -> bool:
        """Whether `wait` would return at once."""


class _Load(NamedTuple):
    """A layer to be loaded."""

    wanted: Wanted
    earlier: Mapping[str, Callable[[], Held]]
    before: Collection[Future[Mapping[str, str]]]  # loads that were asked for before and may not have ended
    ended: Future[Mapping[str, str]]  # why rows are missing, by request id


class Prefetcher:
    """Loads run on threads of their own, two at a time and in layer order, so a layer's load overlaps the layers before
    it. Small layers that wait for their turn are loaded together.

    Invariant (test_nothing_is_written_before_the_gate_opens): nothing is loaded into a slot before its gate was waited
    for, and the gate is waited for only after the layer that used the slot before has been computed (`computed`).

    After all loads of a chunk's rows they are confirmed: they were what they should have been
    (test_rows_are_confirmed_after_every_load).
    """

    def __init__(self, plan: LayerBufferPlan, gate: Gate, loader: PoolLoader) -> None:
        self._plan, self._gate, self._loader = plan, gate, loader
        self._next = {earlier: layer for layer, earlier in plan.prefetch_of.items()}
        self._threads = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="prefetch")
        self._lock = threading.Lock()
        self._due: deque[_Load] = deque()  # loads that have not begun
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
        self._loader.begin_step()
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
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, layer: int) -> None:
        wanting = [chunk for chunk in self._chunks if self._wants(layer, chunk)]
        if wanting:
            ended: Future[Mapping[str, str]] = Future()
            load = _Load(Wanted(layer, wanting), self._earlier, tuple(self._ahead.values()), ended)
            with self._lock:
                self._due.append(load)
            self._ahead[layer] = ended
            self._threads.submit(self._load_due)

    def _wants(self, layer: int, chunk: Chunk) -> bool:
        """Whether the chunk's earlier rows of `layer` must come from the pool."""
        return chunk.request_id in self._earlier and (self._plan.is_reused(layer) or chunk.takes_prefix)

    def _load_due(self) -> None:
        """Loads the layer that is due, with those behind it as far as their slots are open and they fit into a call."""
        with self._lock:
            loads = self._take()
        try:
            self._load(loads)
        except Exception as error:
            for load in loads:
                if not load.ended.done():
                    load.ended.set_exception(error)

    def _take(self) -> list[_Load]:
        """None, if the layer that was due is loaded with one before."""
        loads: list[_Load] = []
        nbytes = 0
        while self._due and (not loads or (nbytes < CALL_BYTES and self._gate.is_open(self._slot(self._due[0])))):
            loads.append(self._due.popleft())
            nbytes += self._loader.size(loads[-1].wanted)
        return loads

    def _load(self, loads: Sequence[_Load]) -> None:
        held: dict[str, Held] = {}
        missing: dict[str, str] = {}
        for load in loads:
            for request_id in {chunk.request_id for chunk in load.wanted.chunks} - held.keys() - missing.keys():
                try:
                    held[request_id] = load.earlier[request_id]()
                except PoolError as error:
                    missing[request_id] = f"request {request_id!r}: {error}"
        for load in loads:
            self._gate.wait(self._slot(load))
        results = self._loader.load([load.wanted for load in loads], held)
        for load, (layer, failed) in zip(loads, results, strict=True):
            wanting = {chunk.request_id for chunk in load.wanted.chunks}
            errors = {name: cause for name, cause in missing.items() if name in wanting} | dict(failed)
            complete = [name for name in wanting - errors.keys() if layer == self._last_load[name]]
            if complete:
                wait(load.before)
            for request_id in complete:
                if why := self._loader.confirm(request_id, held[request_id]):
                    errors[request_id] = why
            load.ended.set_result(errors)

    def _slot(self, load: _Load) -> int:
        return self._plan.slot_of_layer[load.wanted.layer]
