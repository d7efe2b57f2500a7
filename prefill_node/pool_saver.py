"""Saves every layer's new blocks to the pool, finds prompts' blocks there, and pins what requests use."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefill_node.block_checksums import NamedBlocks
from prefill_node.layer_buffers import LayerBuffers
from prefill_node.pool_client import PoolClient, PoolThread
from prefill_node.pool_layout import CALL_BYTES, Copy, PoolObjectLayout
from prefill_node.pool_objects import Held, PoolObjects
from prefill_node.reuse_gate import Consumer, ReuseGate
from prefill_node.saved_steps import SavedSteps, no_other_ranks
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError

log = logging.getLogger(__name__)


class SaveCounters(NamedTuple):
    objects: int  # in use now: being written or leased
    object_bytes: int  # in use now
    objects_saved: int  # finished; whether they still are in the pool is the pool's business
    bytes_saved: int
    save_seconds: float
    failed_requests: int  # requests that are not (completely) in the pool


class _Due(NamedTuple):
    """A layer to be saved."""

    layer: int
    slot: int
    consumer: Consumer
    chunks: Sequence[Chunk]


class _Writing(NamedTuple):
    """The blocks of a request that are being written in this step, and their objects."""

    keys: list[str]
    main_blocks: NDArray[np.int64]
    indexer_blocks: NDArray[np.int64]
    objects: NDArray[np.int64]


class PoolSaver:
    """Pool calls other than loads, on a thread of their own, in the order in which the engine thread asks for them.

    One object per block of a prompt: allocated in the step that writes the block, saved layer by layer, finished after
    its step if no rank had an error with the request. TP ranks compute equal rows, so rank 0 alone writes; the others
    (`writes` false) find and lease what it has finished, when it has told them so (`prefill_node/saved_steps.py`).

    Invariants: for every save added to the gate, `gate.done` is called when the pool has stopped reading the buffer,
    whether it failed or not (test_a_failed_save_opens_the_gate). Rows that may be wrong are never finished
    (test_rows_of_a_failed_request_are_not_shared). A request whose save failed stays out of the pool; the others are
    not affected.
    """

    def __init__(
        self,
        pool: PoolClient,
        objects: PoolObjects,
        layout: PoolObjectLayout,
        buffers: LayerBuffers,
        gate: ReuseGate,
        *,
        writes: bool,
        timeout_s: float,
        saved_steps: SavedSteps = no_other_ranks,
    ) -> None:
        """`timeout_s` bounds every pool call."""
        self._pool, self._objects, self._layout, self._buffers, self._gate = pool, objects, layout, buffers, gate
        self._writes, self._timeout_s, self._meet = writes, timeout_s, saved_steps
        self._thread = PoolThread("pool-saver", timeout_s)
        self._due: deque[_Due] = deque()  # saves that have not begun
        self._sealed: list[NamedBlocks] = []  # of the step which the engine thread is at
        self._writing: dict[str, _Writing] = {}  # request id -> its blocks of the step that is being saved
        self._errors: dict[str, str] = {}  # request id -> why it is not in the pool
        self._idents = itertools.count(1)
        self._lock = threading.Lock()  # of the counters
        self._held = self._saved = self._bytes_saved = self._failed = 0
        self._save_seconds = 0.0

    def look_up(self, request_id: str, keys: Sequence[str], reply: Callable[[int | None], None]) -> None:
        """Tells, on the pool's thread, how many leading blocks are in the pool; they are held until `release`.

        None when the pool does not answer.
        """

        def find() -> None:
            try:
                found: int | None = self._objects.find(request_id, keys)
            except PoolError as error:
                log.warning("request %s: its prompt was not looked up in the pool: %s", request_id, error)
                found = None
            self._count_held()
            reply(found)

        self._thread.submit(find)

    def meet(self, step: int) -> None:
        """Step number `step` begins: what is asked for from now on finds what rank 0 has saved in earlier ones."""
        self._thread.submit(lambda: self._meet(step))

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Allocates the objects of the full blocks that `chunks` write."""
        if self._writes and any(chunk.keys for chunk in chunks):
            self._sealed = [self._named(chunk) for chunk in chunks if chunk.keys]
            self._thread.submit(lambda: self._begin(chunks))

    def save(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """Saves the blocks which `chunks` have written of `layer`; its slot's gate is closed until that is done.

        Their checksums are taken here and now. `chunks` are those of `begin_step`.
        """
        if not self._writes or not any(chunk.keys for chunk in chunks):
            return
        for blocks in self._sealed:
            self._buffers.seal(layer, blocks)
        slot = self._buffers.plan.slot_of_layer[layer]
        consumer = Consumer("save", next(self._idents))
        self._gate.add(slot, consumer, time.monotonic() + self._timeout_s)
        due = _Due(layer, slot, consumer, chunks)
        self._due.append(due)
        self._thread.submit(lambda: self._save_from(due))

    def end_step(self, chunks: Sequence[Chunk], failed: Collection[str]) -> None:
        """The blocks' last layer was saved: finishes their objects, or gives back those of `failed` requests."""
        if self._writes:
            self._thread.submit(lambda: self._end(chunks, failed))

    def hold(self, request_id: str, keys: Sequence[str]) -> Callable[[], Held]:
        """Asks where these blocks lie, after all saves asked for so far; what is returned waits for the answer.

        It raises PoolError when they are not all in the pool, PoolStuck when the pool does not answer.
        """

        def find() -> Held:
            if cause := self._errors.get(request_id):
                raise PoolError(f"its earlier rows are not in the pool: {cause}")
            held = self._objects.hold(request_id, keys)
            self._count_held()
            return held

        return self._thread.ask(f"find the blocks of request {request_id!r}", find)

    def release(self, request_id: str, *, distrust: bool = False) -> None:
        """The request is over: gives its objects back, after the saves under way; they stay in the pool.

        With `distrust` those it used are removed: what was read from one of them was wrong.
        """
        self._thread.submit(lambda: self._release(request_id, distrust))

    def counters(self) -> SaveCounters:
        with self._lock:
            return SaveCounters(
                self._held,
                self._held * self._layout.object_bytes,
                self._saved,
                self._bytes_saved,
                self._save_seconds,
                self._failed,
            )

    @property
    def failure(self) -> str:
        """Why nothing can be saved any more; empty while all is well."""
        return self._thread.failure

    def close(self) -> None:
        self._thread.close()

    def _named(self, chunk: Chunk) -> NamedBlocks:
        """The full blocks that the chunk writes."""
        blocks = slice(chunk.start // self._buffers.geometry.block_size, len(chunk.keys))
        return NamedBlocks.of(chunk.keys[blocks], chunk.main_blocks[blocks], chunk.indexer_blocks[blocks])

    def _begin(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            blocks = [
                block for block in chunk.written_blocks(self._buffers.geometry.block_size) if block < len(chunk.keys)
            ]
            if not blocks or chunk.request_id in self._errors:
                continue
            wait_s = self._timeout_s / 4 if self._buffers.plan.has_reuse and not chunk.is_last else 0.0
            try:
                new = self._objects.begin(chunk.request_id, [chunk.keys[block] for block in blocks], wait_s)
            except PoolError as error:
                self._fail(chunk.request_id, str(error))
                continue
            written = [block for block in blocks if chunk.keys[block] in new]
            self._writing[chunk.request_id] = _Writing(
                [chunk.keys[block] for block in written],
                np.array([chunk.main_blocks[block] for block in written], dtype=np.int64),
                np.array([chunk.indexer_blocks[block] for block in written], dtype=np.int64),
                np.array([new[chunk.keys[block]] for block in written], dtype=np.int64),
            )
        self._count_held()

    def _save_from(self, first: _Due) -> None:
        """Saves a layer, with those behind it in its step as far as they fit into a call."""
        if not self._due or self._due[0] is not first:  # it was saved with one before
            return
        started = time.monotonic()
        layers = [self._due.popleft()]
        error: str | None = None
        try:
            copy = self._copy_of(layers[0])
            while self._due and self._due[0].chunks is layers[0].chunks and copy.nbytes < CALL_BYTES:
                layers.append(self._due.popleft())
                copy.extend(self._copy_of(layers[-1]))
            if copy.sizes:
                error = self._save(layers, copy)
        finally:
            with self._lock:
                self._save_seconds += time.monotonic() - started
            for due in layers:
                self._gate.done(due.slot, due.consumer, error)

    def _copy_of(self, due: _Due) -> Copy:
        copy = Copy.nothing()
        for writing in self._healthy(due.chunks).values():
            copy.extend(self._layout.copy(due.layer, self._buffers.pool_addresses(due.layer), *writing[1:]))
        return copy

    def _save(self, layers: Sequence[_Due], copy: Copy) -> str | None:
        try:
            self._pool.save(copy.pool, copy.device, copy.sizes)
        except PoolError as failure:
            which = " and ".join(str(due.layer) for due in layers)
            error = f"layer {which} was not saved: {failure}"
            for request_id in self._healthy(layers[0].chunks):
                self._fail(request_id, error)
            return error
        with self._lock:
            self._bytes_saved += copy.nbytes
        return None

    def _healthy(self, chunks: Sequence[Chunk]) -> dict[str, _Writing]:
        """What is being written of these chunks, by request id, without requests that have failed."""
        writing = {chunk.request_id: self._writing.get(chunk.request_id) for chunk in chunks}
        return {name: it for name, it in writing.items() if it and it.keys and name not in self._errors}

    def _end(self, chunks: Sequence[Chunk], failed: Collection[str]) -> None:
        for chunk in chunks:
            writing = self._writing.pop(chunk.request_id, None)
            if writing is None or not writing.keys:
                continue
            keys = writing.keys
            if chunk.request_id not in failed and chunk.request_id not in self._errors:
                try:
                    self._objects.finish(keys)
                    with self._lock:
                        self._saved += len(keys)
                    continue
                except PoolError as error:
                    self._fail(chunk.request_id, str(error))
            self._give_back(chunk.request_id, partial(self._objects.abort, keys))
        self._count_held()

    def _fail(self, request_id: str, reason: str) -> None:
        self._errors[request_id] = reason
        with self._lock:
            self._failed += 1
        log.warning("request %s is not saved to the pool: %s", request_id, reason)

    def _release(self, request_id: str, distrust: bool) -> None:
        self._errors.pop(request_id, None)
        self._writing.pop(request_id, None)
        if distrust:
            self._give_back(request_id, lambda: self._objects.distrust(request_id))
        self._give_back(request_id, lambda: self._objects.drop(request_id))
        self._count_held()

    def _give_back(self, request_id: str, call: Callable[[], None]) -> None:
        try:
            call()
        except PoolError as error:
            log.warning("request %s: the pool did not take its objects back: %s", request_id, error)

    def _count_held(self) -> None:
        with self._lock:
            self._held = len(self._objects)
