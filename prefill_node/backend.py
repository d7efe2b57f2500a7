"""Attention of prefill: each layer borrows its buffer, fills it, hands it out, and attends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sluice.v1 import wire_pb2
from torch import Tensor

from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from engine.model.decoder import KvRows
from engine.ops import sparse_flash_attention
from prefill_node.batch import StepBatch
from prefill_node.layer_buffers import LayerBuffers, SlotTensors
from prefill_node.link import Endpoint
from prefill_node.pool_loader import PoolLoader
from prefill_node.pool_objects import Held
from prefill_node.pool_saver import PoolSaver
from prefill_node.prefetch import Prefetcher
from prefill_node.reuse_gate import ReuseGate
from prefill_node.routes import Route, Routes
from prefill_node.steps import Chunk


class Publishes(Protocol):
    """The part of `Publisher` used here."""

    def publish(
        self,
        layer: int,
        slot: int,
        endpoint: Endpoint,
        entries: Sequence[wire_pb2.ReadEntry],
        finished: Sequence[str] = (),
    ) -> int | None:
        """Announces one layer's new blocks to one reader; does not block."""


class PrefillBackend:
    """An `engine.model.attention.AttentionBackend` over layer buffers.

    Invariant "reuse gate": within `attend`, nothing is loaded or written into a layer's slot before the gate has been
    waited for (test_nothing_is_written_before_the_gate_opens). Order per layer: gate, rows from the pool, new rows,
    save and publish, attention, prefetch of the slot's next layer; so the copies from and to the pool and to decode run
    while other layers are computed.

    A request that fails within a step is still computed, because every rank must run the same collectives, but nothing
    more of it is published; the others are not affected. `errors` names the failed ones, `pool_errors` those whose rows
    the pool did not return.
    """

    def __init__(
        self,
        config: ModelConfig,
        buffers: LayerBuffers,
        gate: ReuseGate,
        publisher: Publishes,
        routes: Routes,
        loader: PoolLoader,
        saver: PoolSaver,
    ) -> None:
        self._config, self._buffers = config, buffers
        self._publisher, self._routes, self._saver = publisher, routes, saver
        self._plan = buffers.plan
        self._prefetcher = Prefetcher(buffers.plan, gate, loader)
        self._batch: StepBatch | None = None
        self._topk: Tensor | None = None  # [T, topk] of the last layer with an indexer
        self.errors: dict[str, str] = {}
        self.pool_errors: dict[str, str] = {}

    def begin(self, batch: StepBatch) -> None:
        """Called before the forward pass over `batch`."""
        self._batch, self._topk, self.errors, self.pool_errors = batch, None, {}, {}
        earlier = self._hold(batch.chunks)
        self._saver.begin_step(batch.chunks)
        self._prefetcher.begin(batch.chunks, earlier)

    def end(self) -> None:
        """Called after the forward pass."""
        self._batch = self._topk = None

    def attend(
        self,
        layer: int,
        q_nope: Tensor,
        q_rope: Tensor,
        ckv: Tensor,
        k_rope: Tensor,
        indexer: IndexerQuery | None,
    ) -> Tensor:
        """See `AttentionBackend.attend`. Raises GateStuck or PoolStuck: the process must end."""
        batch, buffer = self._current(), self._buffers.of_layer(layer)
        self.store(layer, KvRows(ckv, k_rope, None if indexer is None else indexer.k))
        if indexer is not None:
            self._topk = self._select(buffer, batch, indexer)
        if self._topk is None:
            raise RuntimeError(f"layer {layer} reuses a top-k, but no layer before it has an indexer")
        attended = sparse_flash_attention(
            q_nope,
            q_rope,
            buffer.ckv,
            buffer.k_rope,
            batch.main_table,
            batch.query_ends,
            self._topk,
            self._config.softmax_scale,
        )
        self._prefetcher.computed(layer)
        return attended

    @property
    def transfer_wait_seconds(self) -> float:
        """How long the computation has waited for copies: those of readers and to and from the pool."""
        return self._prefetcher.wait_seconds

    def close(self) -> None:
        self._prefetcher.close()

    def store(self, layer: int, rows: KvRows) -> None:
        """The part of `attend` before attention: the step's rows of `layer` are written, saved and published."""
        batch, buffer = self._current(), self._buffers.of_layer(layer)
        self.pool_errors.update(self._prefetcher.ready(layer))
        self._write(buffer, batch, rows)
        self._saver.save(layer, batch.chunks)
        self._publish(layer)

    def _current(self) -> StepBatch:
        if self._batch is None:
            raise RuntimeError("attend was called outside a step")
        return self._batch

    def _healthy(self) -> list[Chunk]:
        failed = self.errors.keys() | self.pool_errors.keys()
        return [chunk for chunk in self._current().chunks if chunk.request_id not in failed]

    def _hold(self, chunks: Sequence[Chunk]) -> dict[str, Callable[[], Held]]:
        """Has the rows pinned that chunks need from the pool, while the first layers are computed."""
        held = {}
        for chunk in chunks:
            if not chunk.start or not (self._plan.has_reuse or chunk.takes_prefix):
                continue
            blocks = chunk.start // self._buffers.geometry.block_size
            keys = chunk.keys[:blocks]
            if len(keys) < blocks:
                raise RuntimeError(f"request {chunk.request_id!r}: a chunk from {chunk.start} without its earlier rows")
            held[chunk.request_id] = self._saver.hold(chunk.request_id, keys)
        return held

    def _write(self, buffer: SlotTensors, batch: StepBatch, rows: KvRows) -> None:
        buffer.ckv.view(-1, rows.ckv.shape[-1]).index_copy_(0, batch.main_slots, rows.ckv)
        buffer.k_rope.view(-1, rows.k_rope.shape[-1]).index_copy_(0, batch.main_slots, rows.k_rope)
        key = rows.index_key
        if key is not None and buffer.indexer is not None:
            buffer.indexer.write(batch.indexer_slots, key)

    def _select(self, buffer: SlotTensors, batch: StepBatch, indexer: IndexerQuery) -> Tensor:
        if buffer.indexer is None:
            raise RuntimeError("a layer with an indexer has a buffer without indexer keys")
        return buffer.indexer.select(
            indexer, batch.indexer_table, batch.query_ends, batch.key_lens, self._config.index_topk
        )

    def _publish(self, layer: int) -> None:
        """One message per reader with this layer's new blocks of all its requests."""
        messages: dict[Endpoint, tuple[list[wire_pb2.ReadEntry], list[str]]] = {}
        for chunk in self._healthy():
            route = self._routes.get(chunk.request_id)
            if route is None:
                self.errors[chunk.request_id] = f"request {chunk.request_id!r} has no route to its destination"
                continue
            finished = chunk.is_last and layer == self._plan.num_layers - 1
            entry = self._entry(layer, chunk, route)
            if entry.main_blocks or finished:
                entries, ends = messages.setdefault(route.endpoint, ([], []))
                entries.append(entry)
                ends.extend([chunk.request_id] if finished else [])
        slot = self._plan.slot_of_layer[layer]
        for endpoint, (entries, ends) in messages.items():
            self._publisher.publish(layer, slot, endpoint, entries, ends)

    def _entry(self, layer: int, chunk: Chunk, route: Route) -> wire_pb2.ReadEntry:
        block_size = self._buffers.geometry.block_size
        blocks = chunk.published_blocks(block_size)
        start = max(blocks.start, min(route.cached_tokens // block_size, blocks.stop))
        has_indexer = self._config.has_indexer(layer)
        return wire_pb2.ReadEntry(
            request_id=chunk.request_id,
            destination_generation=route.generation,
            main_start=start,
            main_blocks=chunk.main_blocks[start : blocks.stop],
            indexer_start=start if has_indexer else 0,
            indexer_blocks=chunk.indexer_blocks[start : blocks.stop] if has_indexer else (),
            begun_again=route.begun_again,
        )
