"""Saves every layer's new blocks to the pool, and knows where a request's blocks lie there."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefill_node.layer_buffers import LayerBuffers
from prefill_node.pool_client import PoolClient, PoolThread
from prefill_node.pool_layout import Copy, PoolObjectLayout, object_key
from prefill_node.reuse_gate import Consumer, ReuseGate
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError

log = logging.getLogger(__name__)


class SaveCounters(NamedTuple):
    objects: int  # held now
    object_bytes: int  # held now
    bytes_saved: int
    save_seconds: float
    failed_requests: int  # requests that are not (completely) in the pool


@dataclass
class _Saved:
    """One request's objects. Touched by the pool thread only, except `error`, which is only ever set once."""

    keys: list[str] = field(default_factory=list)  # by block index
    addresses: list[int] = field(default_factory=list)
    finished: int = 0  # leading objects that are complete
    error: str = ""  # why the request is not in the pool


class PoolSaver:
    """Layer-by-layer saves on a thread of their own.

    One object per (request, block): allocated in the step that writes the block, saved layer by layer, finished and
    leased after its last layer, removed when the request ends. Calls are made by the engine thread; pool calls run in
    the order of those calls. Each TP rank saves objects of its own: a MemCache client finds an address only if it
    allocated or leased the object itself, and takes it for the old one's when another client has removed that.

    Invariant: for every save added to the gate, `gate.done` is called when the pool has stopped reading the buffer,
    whether it failed or not (test_a_failed_save_opens_the_gate). A request whose save failed stays out of the pool; the
    others are not affected.
    """

    def __init__(
        self,
        pool: PoolClient,
        layout: PoolObjectLayout,
        buffers: LayerBuffers,
        gate: ReuseGate,
        *,
        fingerprint: str,
        rank: int,
        timeout_s: float,
        lease_s: float,
    ) -> None:
        """`timeout_s` bounds every pool call, `lease_s` is how long a request may need its objects."""
        self._pool, self._layout, self._buffers, self._gate = pool, layout, buffers, gate
        self._fingerprint, self._rank = fingerprint, rank
        self._timeout_s, self._lease_ms = timeout_s, int(lease_s * 1000)
        self._thread = PoolThread("pool-saver", timeout_s)
        self._requests: dict[str, _Saved] = {}
        self._idents = itertools.count(1)
        self._lock = threading.Lock()  # counters and the map
        self._objects = self._bytes_saved = self._failed = 0
        self._save_seconds = 0.0

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Allocates the objects of the blocks that `chunks` write."""
        with self._lock:
            for chunk in chunks:
                self._requests.setdefault(chunk.request_id, _Saved())
        self._thread.submit(lambda: self._alloc(chunks))

    def save(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """Saves the blocks which `chunks` have written of `layer`; its slot's gate is closed until that is done."""
        slot = self._buffers.plan.slot_of_layer[layer]
        consumer = Consumer("save", next(self._idents))
        self._gate.add(slot, consumer, time.monotonic() + self._timeout_s)
        self._thread.submit(lambda: self._save(layer, slot, consumer, chunks))

    def end_step(self, chunks: Sequence[Chunk]) -> None:
        """The blocks' last layer has been saved: finishes and leases their objects."""
        self._thread.submit(lambda: self._finish(chunks))

    def addresses(self, request_id: str, blocks: int) -> tuple[int, ...]:
        """Pool addresses of the request's first `blocks` blocks, after waiting for their saves.

        Raises PoolError when they are not all in the pool, PoolStuck when the pool does not answer.
        """

        def look_up() -> tuple[int, ...]:
            saved = self._requests.get(request_id, _Saved())
            if saved.error or saved.finished < blocks:
                cause = saved.error or f"only {saved.finished} of its first {blocks} blocks were saved"
                raise PoolError(f"request {request_id!r}: its earlier rows are not in the pool: {cause}")
            return tuple(saved.addresses[:blocks])

        return self._thread.run(f"save the blocks of request {request_id!r}", look_up)

    def release(self, request_id: str) -> None:
        """The request is over: removes its objects after the saves that are under way."""
        self._thread.submit(lambda: self._remove(request_id))

    def counters(self) -> SaveCounters:
        with self._lock:
            return SaveCounters(
                self._objects,
                self._objects * self._layout.object_bytes,
                self._bytes_saved,
                self._save_seconds,
                self._failed,
            )

    def settle(self) -> None:
        """Waits until everything asked for so far is done. Raises PoolStuck."""
        self._thread.run("finish its work", lambda: None)

    @property
    def failure(self) -> str:
        """Why nothing can be saved any more; empty while all is well."""
        return self._thread.failure

    def close(self) -> None:
        self._thread.close()

    def _alloc(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            blocks = chunk.written_blocks(self._buffers.geometry.block_size)
            keys = [object_key(self._fingerprint, chunk.request_id, block, self._rank) for block in blocks]

            def alloc(saved: _Saved, keys: list[str] = keys) -> None:
                sizes = [self._layout.object_bytes] * len(keys)
                addresses = self._pool.alloc(keys, sizes, wait_s=self._timeout_s / 4)
                saved.keys.extend(keys)
                saved.addresses.extend(addresses)
                with self._lock:
                    self._objects += len(keys)

            self._attempt(chunk.request_id, alloc)

    def _save(self, layer: int, slot: int, consumer: Consumer, chunks: Sequence[Chunk]) -> None:
        started = time.monotonic()
        error: str | None = None
        try:
            copy, members = Copy([], [], []), []
            for chunk in chunks:
                saved = self._requests.get(chunk.request_id)
                if saved is None or saved.error:
                    continue
                blocks = chunk.written_blocks(self._buffers.geometry.block_size)
                part = self._layout.copy(
                    layer,
                    self._buffers.addresses(layer),
                    chunk.main_blocks[blocks.start : blocks.stop],
                    chunk.indexer_blocks[blocks.start : blocks.stop],
                    saved.addresses[blocks.start : blocks.stop],
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

    def _finish(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            blocks = chunk.written_blocks(self._buffers.geometry.block_size)

            def finish(saved: _Saved, blocks: range = blocks) -> None:
                keys = saved.keys[blocks.start : blocks.stop]
                self._pool.finish(keys)
                saved.finished = blocks.stop
                leased = self._pool.lease(keys, self._lease_ms)
                if lost := [key for key, address in zip(keys, leased, strict=True) if not address]:
                    raise PoolError(f"objects {lost} disappeared from the pool")

            self._attempt(chunk.request_id, finish)

    def _attempt(self, request_id: str, work: Callable[[_Saved], None]) -> None:
        saved = self._requests.get(request_id)
        if saved is None or saved.error:
            return
        try:
            work(saved)
        except PoolError as error:
            self._fail(request_id, str(error))

    def _fail(self, request_id: str, reason: str) -> None:
        with self._lock:
            saved = self._requests.get(request_id)
            if saved is None or saved.error:
                return
            saved.error = reason
            self._failed += 1
        log.warning("request %s is not saved to the pool: %s", request_id, reason)

    def _remove(self, request_id: str) -> None:
        with self._lock:
            saved = self._requests.pop(request_id, None)
        if saved is None:
            return
        finished, unfinished = saved.keys[: saved.finished], saved.keys[saved.finished :]
        for keys, calls in ((finished, (self._pool.release, self._pool.remove)), (unfinished, (self._pool.abort,))):
            for call in calls if keys else ():
                try:
                    call(keys)
                except PoolError as error:
                    log.warning("request %s: the pool did not give its objects back: %s", request_id, error)
        with self._lock:
            self._objects -= len(saved.keys)
