"""Selection by LIM, the fused indexer that also manages the hot slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decode_node.memory import DecodeMemory, RowTables
from decode_node.selection import Layout, Pass, Selection
from engine.indexer_cache import IndexerCache
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from engine.ops.lim import NO_SLOT, fused_lightning_indexer_manage
from engine.ops.lim_quant import fused_quant_lightning_indexer_manage
from engine.ops.tail import select_with_tail

_SHORT, _FIRST, _STEADY = -3, -2, -1  # LIM's request states


class _History(NamedTuple):
    """What the last pass over some layers left in each hot row, [rows] int64 each."""

    generation: Tensor
    prefix: Tensor  # of the positions that LIM searched
    end: Tensor  # behind the last position in the row's tail


class _Plan(NamedTuple):
    """What LIM is told about a pass over some layers, and what has to be fetched besides its misses."""

    states: Tensor  # [B] int32
    fills: list[tuple[int, int, Tensor, Tensor]]  # request, place in its miss list, positions, slots


class LimSelector:
    """LIM over the stable prefix in whole blocks, and the exact top-k of its picks and the tail.

    A request whose prefix is shorter than the hot row is short: its positions are their own slots, fetched once. Of a
    longer one, `hot.tokens` positions are resident, chosen by LIM, and two blocks behind them hold, turn and turn
    about, the positions from the prefix on. Where query and keys are not int8, index weights are rounded to their
    dtype, as Ascend's operator wants them. Layers that are run together (the model's, or the draft layer) have one
    history: a row they left at another place than a pass begins at is filled anew.

    Invariant (test_attention_equals_that_of_residency): tokens attend to the same positions as with `LruSelector`.
    """

    def __init__(self, model: ModelConfig, memory: DecodeMemory, tables: RowTables) -> None:
        g = memory.geometry
        if g.hot.tail_blocks < 2:
            raise ValueError(f"hot rows have a tail of {g.hot.tail_blocks} blocks; legal for LIM: 2")
        self._geometry, self._hot, self._topk = g, g.hot, model.index_topk
        self._model_layers, self._tables = model.num_hidden_layers, tables
        width = g.max_blocks_per_request * g.block_size
        self._slot_of = {
            layer: torch.full((g.hot.rows, width), NO_SLOT, dtype=torch.int32) for layer in model.indexer_layers
        }
        self._histories: dict[bool, _History] = {}
        for drafts in (False, True):
            self._histories[drafts] = _History(*(torch.full((g.hot.rows,), -1, dtype=torch.int64) for _ in range(3)))
        self._plans: dict[bool, _Plan] = {}
        self._unread_key_scale = torch.empty(g.num_blocks, g.block_size, 1)

    def begin(self, given: Pass) -> Layout:
        """See `Selector`."""
        block, hot = self._geometry.block_size, self._hot
        self._pass, self._plans = given, {}
        self._prefix = given.stable_prefix // block * block
        if not given.selects:  # LIM does not run: what is resident stays as the draft layer's pass before left it
            self._prefix = self._histories[True].prefix[given.rows]
        self._long = self._prefix >= hot.tokens
        self._capacity = torch.where(self._long, hot.tokens, 0)
        self._table = self._tables.indexer[given.rows]
        base = self._tables.hot[given.rows].clone()
        kept = hot.tokens // block
        turn = torch.where(self._long, self._prefix // block, 0).unsqueeze(1) + torch.arange(2)
        base[:, kept:] = base[:, kept : kept + 1] + (turn % 2).int()
        tail = hot.tokens + given.positions % (2 * block)
        own = torch.where(self._long[given.request], tail, given.positions)
        return Layout(base, given.rows[given.request] * hot.stride + own)

    def select(self, layer: int, cache: IndexerCache, query: IndexerQuery) -> Selection:
        """See `Selector`."""
        given, operands = self._pass, cache.operands(query)
        plan = self._plan(layer)
        tokens, requests = len(given.request), len(given.rows)
        ids, slots = torch.empty(2, tokens, 1, self._topk, dtype=torch.int32)
        scores = torch.empty(tokens, 1, self._topk)
        miss_ids, miss_slots = torch.empty(2, requests, self._hot.stride, dtype=torch.int32)
        miss_counts, leading = torch.empty(requests, dtype=torch.int32), torch.empty(tokens, dtype=torch.int32)
        lengths = (
            *(self._table, given.query_ends, given.visible),
            *(self._prefix.int(), self._capacity.int(), plan.states),
        )
        scales = operands.query_scale, operands.key_scale
        if scales[0] is None or scales[1] is None:
            weights, manage = operands.weights.to(operands.query.dtype), fused_lightning_indexer_manage
            told = torch.empty(weights.shape), self._unread_key_scale
        else:
            weights, manage = operands.weights, fused_quant_lightning_indexer_manage
            told = scales[0], scales[1]
        manage(
            *(weights, told[0], operands.query, told[1], operands.keys, *lengths),
            *(given.rows.int(), self._slot_of[layer], ids, slots, leading, miss_ids, miss_slots, miss_counts, scores),
        )
        picks, at = select_with_tail(weights, operands.query, operands.keys, *lengths, ids, slots, scores, *scales)
        for request, place, positions, into in plan.fills:
            end = place + len(positions)
            miss_ids[request, place:end], miss_slots[request, place:end] = positions, into
            miss_counts[request] = end
        picks = picks.squeeze(1)
        hits = self._sealed(picks).sub_(miss_counts).clamp_(min=0)
        return Selection(picks, at, miss_ids, miss_slots, miss_counts, hits)

    def again(self, layer: int, picks: Tensor) -> Selection:
        """See `Selector`."""
        given = self._pass
        self._note(layer)
        row, long = given.rows[given.request].unsqueeze(1), self._long[given.request].unsqueeze(1)
        prefix = self._prefix[given.request].unsqueeze(1)
        managed = self._slot_of[layer][row, picks.clamp(min=0).long()]
        resident = torch.where(picks < prefix, managed, self._hot.tokens + picks - prefix)
        slots = torch.where(picks < 0, -1, torch.where(long, resident, picks)).int()
        none = torch.full((len(given.rows), 1), -1, dtype=torch.int32)
        counts = torch.zeros(len(given.rows), dtype=torch.int32)
        return Selection(picks, slots.unsqueeze(1), none, none, counts, self._sealed(picks))

    def _plan(self, layer: int) -> _Plan:
        """Of the pass over the layers that are run together with `layer`, made at the first of them."""
        drafts = layer >= self._model_layers
        if drafts in self._plans:
            return self._plans[drafts]
        given, history, hot = self._pass, self._histories[drafts], self._hot
        before = _History(*(of[given.rows] for of in history))
        kept = (before.generation == given.generations) & (before.end >= given.starts)
        kept &= (before.prefix <= self._prefix) & ((before.prefix >= hot.tokens) == self._long)
        states = torch.where(self._long, torch.where(kept, _STEADY, _FIRST), _SHORT).int()
        fills = []
        for request in (~kept).nonzero().flatten().tolist():
            start, prefix = int(given.starts[request]), int(self._prefix[request])
            if self._long[request]:
                positions = torch.arange(prefix, start, dtype=torch.int32)
                fills.append((request, hot.tokens, positions, hot.tokens + positions - prefix))
            else:
                positions = torch.arange(start, dtype=torch.int32)
                fills.append((request, 0, positions, positions))
        self._note(layer)
        self._plans[drafts] = _Plan(states, fills)
        return self._plans[drafts]

    def _note(self, layer: int) -> None:
        """Remember what the pass leaves behind."""
        given, history = self._pass, self._histories[layer >= self._model_layers]
        history.generation[given.rows] = given.generations
        history.prefix[given.rows] = self._prefix
        history.end[given.rows] = given.visible.long()

    def _sealed(self, picks: Tensor) -> Tensor:
        """[B] int32: picks of positions below the stable prefix."""
        given = self._pass
        sealed = (picks >= 0) & (picks < given.stable_prefix[given.request].unsqueeze(1))
        counts = torch.zeros(len(given.rows), dtype=torch.int64)
        return counts.index_add_(0, given.request, sealed.sum(1)).int()
