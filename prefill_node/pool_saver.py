"""Saves every layer's new blocks to the pool, finds prompts' blocks there, and pins what requests use."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from prefill_node.layer_buffers import LayerBuffers
from prefill_node.pool_client import PoolClient, PoolThread
from prefill_node.pool_layout import Copy, PoolObjectLayout
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
        self._writing: dict[str, dict[int, tuple[str, int]]] = {}  # request id -> block -> key, address; of this step
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
            self._thread.submit(lambda: self._begin(chunks))

    def save(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """Saves the blocks which `chunks` have written of `layer`; its slot's gate is closed until that is done.

        Their checksums are taken here and now.
        """
        if not self._writes or not any(chunk.keys for chunk in chunks):
            return
        for chunk in chunks:
            blocks = slice(chunk.start // self._buffers.geometry.block_size, len(chunk.keys))
            self._buffers.seal(layer, chunk.keys[blocks], chunk.main_blocks[blocks], chunk.indexer_blocks[blocks])
        slot = self._buffers.plan.slot_of_layer[layer]
        consumer = Consumer("save", next(self._idents))
        self._gate.add(slot, consumer, time.monotonic() + self._timeout_s)
        self._thread.submit(lambda: self._save(layer, slot, consumer, chunks))

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
            self._writing[chunk.request_id] = {
                block: (chunk.keys[block], new[chunk.keys[block]]) for block in blocks if chunk.keys[block] in new
            }
        self._count_held()

    def _save(self, layer: int, slot: int, consumer: Consumer, chunks: Sequence[Chunk]) -> None:
        started = time.monotonic()
        error: str | None = None
        try:
            copy, members = Copy([], [], []), []
            for chunk in chunks:
                writing = self._writing.get(chunk.request_id)
                if not writing or chunk.request_id in self._errors:
                    continue
                part = self._layout.copy(
                    layer,
                    self._buffers.pool_addresses(layer),
                    [chunk.main_blocks[block] for block in writing],
                    [chunk.indexer_blocks[block] for block in writing],
                    [address for _, address in writing.values()],
                )
                members.append(chunk.request_id)
                for whole, piece in zip(copy, part, strict=True):
                    whole.extend(piece)
            if members:
                error = self._copy(layer, copy, members)
        finally:
            with self._lock:
                self._save_seconds += time.monotonic() - started
            self._gate.done(slot, consumer, error)

    def _copy(self, layer: int, copy: Copy, members: Sequence[str]) -> str | None:
        try:
            self._pool.save(copy.pool, copy.device, copy.sizes)
        except PoolError as failure:
            error = f"layer {layer} was not saved: {failure}"
            for request_id in members:
                self._fail(request_id, error)
            return error
        with self._lock:
            self._bytes_saved += copy.nbytes
        return None

    def _end(self, chunks: Sequence[Chunk], failed: Collection[str]) -> None:
        for chunk in chunks:
            keys = [key for key, _ in self._writing.pop(chunk.request_id, {}).values()]
            if not keys:
                continue
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
