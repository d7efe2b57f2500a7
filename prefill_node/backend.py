"""Attention of prefill: each layer borrows its buffer, fills it, hands it out, and attends."""

from __future__ import annotations

from collections.abc import Sequence
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
from prefill_node.pool_saver import PoolSaver
from prefill_node.reuse_gate import ReuseGate
from prefill_node.routes import Route, Routes
from prefill_node.steps import Chunk
from transfer.mem_pool import PoolError


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
    waited for (test_nothing_is_written_before_the_gate_opens). Order per layer: gate, reload of earlier rows, new rows,
    save and publish, attention; so the copies to the pool and to decode run while the layer attends.

    A request that fails within a step is still computed, because every rank must run the same collectives, but nothing
    more of it is published; the others are not affected. `errors` names the failed ones.
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
        self._config, self._buffers, self._gate = config, buffers, gate
        self._publisher, self._routes, self._loader, self._saver = publisher, routes, loader, saver
        self._plan = buffers.plan
        self._batch: StepBatch | None = None
        self._topk: Tensor | None = None  # [T, topk] of the last layer with an indexer
        self._earlier: dict[str, tuple[int, ...]] = {}  # request id -> pool addresses of the blocks before its chunk
        self.errors: dict[str, str] = {}

    def begin(self, batch: StepBatch) -> None:
        """Called before the forward pass over `batch`. Raises PoolStuck."""
        self._batch, self._topk, self.errors = batch, None, {}
        self._earlier = self._locate(batch.chunks) if self._plan.has_reuse else {}
        self._saver.begin_step(batch.chunks)

    def end(self) -> None:
        """Called after the forward pass."""
        if self._batch is not None:
            self._saver.end_step(self._batch.chunks)
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
        return sparse_flash_attention(
            q_nope,
            q_rope,
            buffer.ckv,
            buffer.k_rope,
            batch.main_table,
            batch.query_ends,
            self._topk,
            self._config.softmax_scale,
        )

    def store(self, layer: int, rows: KvRows) -> None:
        """The part of `attend` before attention: the step's rows of `layer` are written, saved and published."""
        batch, buffer = self._current(), self._buffers.of_layer(layer)
        self._gate.wait(self._plan.slot_of_layer[layer])  # what failed has been reported by the saver and the publisher
        if self._plan.is_reused(layer):
            self.errors.update(self._loader.load(layer, self._healthy(), self._earlier))
        self._write(buffer, batch, rows)
        self._saver.save(layer, batch.chunks)
        self._publish(layer)

    def _current(self) -> StepBatch:
        if self._batch is None:
            raise RuntimeError("attend was called outside a step")
        return self._batch

    def _healthy(self) -> list[Chunk]:
        return [chunk for chunk in self._current().chunks if chunk.request_id not in self.errors]

    def _locate(self, chunks: Sequence[Chunk]) -> dict[str, tuple[int, ...]]:
        """Where the earlier rows of later chunks are; a request whose rows are lost fails."""
        found = {}
        for chunk in chunks:
            blocks = chunk.written_blocks(self._buffers.geometry.block_size).start
            try:
                found[chunk.request_id] = self._saver.addresses(chunk.request_id, blocks) if blocks else ()
            except PoolError as error:
                self.errors[chunk.request_id] = str(error)
        return found

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
        blocks = chunk.written_blocks(block_size)
        start = max(blocks.start, min(route.cached_tokens // block_size, blocks.stop))
        has_indexer = self._config.has_indexer(layer)
        return wire_pb2.ReadEntry(
            request_id=chunk.request_id,
            destination_generation=route.generation,
            main_start=start,
            main_blocks=chunk.main_blocks[start : blocks.stop],
            indexer_start=start if has_indexer else 0,
            indexer_blocks=chunk.indexer_blocks[start : blocks.stop] if has_indexer else (),
        )
