"""A whole decode step with the main KV offloaded, against one with all of it resident, and at 128K against 8K."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Row, slowdown_row, time_in_turns
from benchmarks.step_layer import random_layer
from benchmarks.step_sides import INDEX_DIM, TOPK, Inputs, Offloaded, Picked, Resident, StepShape
from engine.model.attention import IndexerQuery
from engine.model.decoder import DsaDecoder

MISS_SHARE = 0.10
_TURNS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # steps of a queries' round: the more, the fewer misses
_PICKS = 64

SHAPES = (
    StepShape("deepseek_v32", 128, 8192, layers=16),
    StepShape("deepseek_v32", 128, 131072),
    StepShape("deepseek_v32", 128, 65536, batch=5),
    StepShape("deepseek_v32", 128, 32768, batch=2, rows=2),
    StepShape("deepseek_v32", 16, 8192, layers=16),
    StepShape("deepseek_v32", 16, 131072),
    StepShape("glm_moe_dsa", 64, 32768, batch=4),
)
WHOLE_LAYERS = (
    StepShape("deepseek_v32", 128, 8192, layers=1),
    StepShape("deepseek_v32", 128, 65536, batch=5, layers=1),
)
GROWTH = (
    StepShape("deepseek_v32", 128, 8192),
    StepShape("deepseek_v32", 16, 8192),
    StepShape("glm_moe_dsa", 64, 8192, batch=8),
)


class Round:
    """Index queries that turn on a circle in `turns` equal steps, so that each step's picks differ from the last's."""

    def __init__(self, shape: StepShape, turns: int) -> None:
        rng = torch.Generator().manual_seed(11)
        size = shape.tokens, shape.index_heads, INDEX_DIM
        a, b = torch.randn(size, generator=rng), torch.randn(size, generator=rng)
        angles = [2 * math.pi * turn / turns for turn in range(turns)]
        self._queries = [(math.cos(angle) * a + math.sin(angle) * b).bfloat16() for angle in angles]
        self._key = torch.randn(shape.tokens, INDEX_DIM, generator=rng).bfloat16()
        self._weights = torch.rand(shape.tokens, shape.index_heads, generator=rng)

    def __len__(self) -> int:
        return len(self._queries)

    def __call__(self, step: int) -> IndexerQuery:
        return IndexerQuery(self._queries[step % len(self)], self._key, self._weights)


class StepBench:
    """Both sides, fed alike."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.offloaded = Offloaded(shape)
        self.resident = Resident(self.offloaded, shape)
        self.inputs = Inputs.random(shape, torch.Generator().manual_seed(13))
        self.round, self.misses = self._calibrated()

    def step(self, side: Offloaded | Resident, number: int) -> None:
        """One step through all layers."""
        side.begin()
        for layer in range(self.shape.layers):
            side.attend(layer, *self.inputs, self.round(number))

    def check(self) -> None:
        """RuntimeError unless both sides attend to the same: outputs may differ by rounding alone."""
        self.offloaded.begin(), self.resident.begin()
        ours = self.offloaded.attend(0, *self.inputs, self.round(1))
        theirs = self.resident.attend(0, *self.inputs, self.round(1))
        if not torch.allclose(ours.float(), theirs.float(), atol=2e-2):
            raise RuntimeError(f"{self.shape.label}: the two sides attend to different rows")

    def _calibrated(self) -> tuple[Round, float]:
        """The round whose share of misses is next to MISS_SHARE, and that share."""
        low, high = 0, len(_TURNS) - 1
        best: tuple[float, Round, float] | None = None
        while low <= high:
            middle = (low + high) // 2
            self.round = Round(self.shape, _TURNS[middle])
            share = self._miss_share()
            distance = abs(share - MISS_SHARE)
            if best is None or distance < best[0]:
                best = distance, self.round, share
            if share > MISS_SHARE:
                low = middle + 1
            else:
                high = middle - 1
        assert best is not None
        return best[1], best[2]

    def _miss_share(self) -> float:
        for number in range(2 * len(self.round)):
            if number == len(self.round):
                self.offloaded.miss_share()
            self.offloaded.begin()
            self.offloaded.attend(0, *self.inputs, self.round(number))
        return self.offloaded.miss_share()


def run(now: Callable[[], float], budget_s: float) -> list[Row]:
    """Rows for all shapes; `budget_s` for each comparison, timed with `now`."""
    rows = [_over_resident(shape, now, budget_s) for shape in SHAPES]
    rows += [_whole_layer(shape, now, budget_s) for shape in WHOLE_LAYERS]
    rows += [_growth(shape, now, budget_s) for shape in GROWTH]
    return rows


def _over_resident(shape: StepShape, now: Callable[[], float], budget_s: float) -> Row:
    bench = StepBench(shape)
    bench.check()
    pair = time_in_turns(
        lambda number: bench.step(bench.offloaded, number),
        lambda number: bench.step(bench.resident, number),
        budget_s=budget_s,
        now=now,
    )
    note = f"attention of {shape.layers} layers without their projections and experts, {bench.misses:.0%} misses"
    return slowdown_row(f"{shape.label}: offload over all-resident", pair, 1.03, note)


def _whole_layer(shape: StepShape, now: Callable[[], float], budget_s: float) -> Row:
    """With projections and a dense MLP, which takes as long as the experts of one token."""
    bench = StepBench(shape)
    model = bench.offloaded.model
    weights = random_layer(model)
    decoder = DsaDecoder(model, weights, None, torch.bfloat16)
    hidden = torch.randn(shape.tokens, model.hidden_size, generator=torch.Generator().manual_seed(17)).bfloat16()

    def layer(side: Offloaded | Resident, number: int) -> Tensor:
        positions = side.begin()
        given = _WithQueries(side, bench.round(number))
        return decoder.run_layer(0, weights.layers[0], hidden, positions, given)

    pair = time_in_turns(
        lambda number: layer(bench.offloaded, number),
        lambda number: layer(bench.resident, number),
        budget_s=budget_s,
        now=now,
    )
    note = f"a whole layer with projections and dense MLP, {bench.misses:.0%} misses"
    return slowdown_row(f"{shape.label}: offload over all-resident, whole layer", pair, 1.03, note)


class _WithQueries:
    """A side whose index queries are replaced, so that the share of misses is known."""

    def __init__(self, side: Offloaded | Resident, query: IndexerQuery) -> None:
        self._side, self._query = side, query

    def attend(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, indexer: IndexerQuery | None
    ) -> Tensor:
        return self._side.attend(layer, q_nope, q_rope, ckv, k_rope, self._query)


def _growth(shape: StepShape, now: Callable[[], float], budget_s: float) -> Row:
    """128K over the shape's own context, with picks made beforehand."""
    long = StepShape(shape.family, shape.heads, 131072, shape.batch, shape.rows, shape.layers)
    sides = [_given_picks(each) for each in (long, shape)]
    pair = time_in_turns(sides[0], sides[1], budget_s=budget_s, now=now)
    note = f"{MISS_SHARE:.0%} of the picks are new in each step; index scoring apart"
    return slowdown_row(f"{shape.label}: 128K over {shape.context // 1024}K", pair, 1.15, note)


def _given_picks(shape: StepShape) -> Callable[[int], None]:
    offloaded = Offloaded(shape)
    inputs = Inputs.random(shape, torch.Generator().manual_seed(13))
    query = Round(shape, 4)(0)
    for layer in range(shape.layers):
        offloaded.memory.indexers[layer] = Picked(_drifting_picks(shape, seed=layer))

    def step(number: int) -> None:
        offloaded.begin()
        for layer in range(shape.layers):
            offloaded.attend(layer, *inputs, query)

    for number in range(2 * _PICKS):
        step(number)
    return step


def _drifting_picks(shape: StepShape, seed: int) -> list[Tensor]:
    """[tokens, TOPK] for each of _PICKS steps: the oldest picks of a row give way to positions not picked for long."""
    rng = torch.Generator().manual_seed(seed)
    fresh = round(TOPK * MISS_SHARE)
    orders = [torch.randperm(shape.context - shape.rows, generator=rng) for _ in range(shape.tokens)]
    picks = []
    for step in range(_PICKS):
        at = torch.arange(step * fresh, step * fresh + TOPK)
        picks.append(torch.stack([order[at % len(order)] for order in orders]).int())
    return picks
