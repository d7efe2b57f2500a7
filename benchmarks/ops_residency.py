"""Residency against the reference system's algorithm, written plainly in C++ (plain_residency.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Pair, Row, speedup_row, time_in_turns
from benchmarks.native import compiled
from benchmarks.ops_lim import i32
from engine.ops import Residency, ResidencyState, native

TOPK = 2048
_CONTEXT = 131072
_STEPS_PER_RUN = 16  # timed together: one takes hardly longer than looking at the clock
_SETS = 64  # so many that what one step drops is long forgotten when it comes again
_SOURCE = Path(__file__).resolve().parent / "plain_residency.cpp"


@dataclass(frozen=True)
class ResidencyShape:
    """`drift` of a row's top-k is new in each step."""

    capacity: int
    drift: float
    batch: int = 1

    @property
    def label(self) -> str:
        """For result rows."""
        return f"residency {self.capacity} slots, batch {self.batch}, {self.drift:.0%} new per step"


SHAPES = (
    ResidencyShape(4096, 0.1),
    ResidencyShape(8192, 0.1),
    ResidencyShape(8192, 0.1, batch=24),
    ResidencyShape(8192, 0.5),
    ResidencyShape(12288, 0.05),
    ResidencyShape(16384, 0.1, batch=8),
)


class ResidencyBench:
    """The same top-k sets for both algorithms, each with its own state."""

    def __init__(self, shape: ResidencyShape) -> None:
        self.shape = shape
        rng, batch = torch.Generator().manual_seed(3), shape.batch
        fresh = round(TOPK * shape.drift)
        chosen = [torch.randperm(_CONTEXT, generator=rng)[:TOPK] for _ in range(batch)]
        self.sets = []
        for _ in range(_SETS):
            for row in range(batch):
                kept = chosen[row][torch.randperm(TOPK, generator=rng)[: TOPK - fresh]]
                others = torch.randperm(_CONTEXT, generator=rng)[: 2 * TOPK]
                new = others[~torch.isin(others, kept)][:fresh]
                mixed = torch.cat([kept, new])
                chosen[row] = mixed[torch.randperm(TOPK, generator=rng)]
            self.sets.append(torch.stack(chosen).int())
        self.stable = i32([_CONTEXT] * batch)
        self.generations, self.rows = torch.ones(batch, dtype=torch.int64), torch.arange(batch).int()
        self.state, self.out = ResidencyState.empty(batch, shape.capacity), Residency.empty(batch, TOPK)
        self.plain_tokens = torch.full((batch, shape.capacity), -1, dtype=torch.int32)
        self.plain_order = torch.arange(shape.capacity).int().repeat(batch, 1)
        self.plain_out = Residency.empty(batch, TOPK)
        self.mark, self.pos = torch.zeros(_CONTEXT, dtype=torch.int32), torch.zeros(_CONTEXT, dtype=torch.int32)
        self.work, self.miss_pos = torch.zeros(3 * shape.capacity, dtype=torch.int32), torch.zeros(TOPK).int()
        self.epoch = torch.zeros(1, dtype=torch.int32)
        self._calls = self._ours(), self._plain()

    def ours(self, step: int) -> None:
        """One call of the operator."""
        self._calls[0][step % _SETS]()

    def plain(self, step: int) -> None:
        """One call of the plain algorithm."""
        self._calls[1][step % _SETS]()

    def compare(self, now: Callable[[], float], budget_s: float) -> Pair:
        """Both in turns, several steps at a time."""

        def several(step: Callable[[int], None], run: int) -> None:
            for number in range(run * _STEPS_PER_RUN, (run + 1) * _STEPS_PER_RUN):
                step(number)

        pair = time_in_turns(
            partial(several, self.ours), partial(several, self.plain), budget_s=budget_s, now=now, least=20
        )
        return Pair(pair.subject / _STEPS_PER_RUN, pair.baseline / _STEPS_PER_RUN, pair.ratio)

    def _ours(self) -> list[Callable[[], None]]:
        """One call of the operator's C++ function per set of top-k."""
        sizes = {"rows": self.shape.batch, "topk": TOPK, "requests": self.shape.batch, "miss_capacity": TOPK}
        state = {"state_rows": self.shape.batch, "capacity": self.shape.capacity, **self.state._asdict()}
        inputs = {"query_ends": None, "stable_prefix": self.stable, "generation": self.generations}
        return [
            native.Prepared(
                "lru_residency",
                {"topk_ids": ids, "row_index": self.rows, **inputs, **state, **self.out._asdict(), **sizes},
            )
            for ids in self.sets
        ]

    def _plain(self) -> list[Callable[[], None]]:
        """One call of the plain algorithm per set of top-k."""
        function, out = ctypes.CDLL(str(compiled(_SOURCE))).plain_residency, self.plain_out
        tensors = (
            *(self.plain_tokens, self.plain_order, out.slots, out.miss_counts, out.miss_ids, out.miss_slots),
            *(self.mark, self.pos, self.work, self.miss_pos, self.epoch),
        )
        sizes = [ctypes.c_int(size) for size in (self.shape.batch, TOPK, self.shape.capacity, _CONTEXT)]
        return [partial(function, *_pointers((ids, self.stable)), *sizes, *_pointers(tensors)) for ids in self.sets]

    def warm_up(self) -> tuple[float, float]:
        """Fill both, and return the shares of misses of ours and of the plain algorithm over one round of the sets.

        RuntimeError if a slot does not hold the position it stands for.
        """
        misses = [0, 0]
        for step in range(2 * _SETS):
            self.ours(step)
            self.plain(step)
            both = (self.state.slot_to_token, self.out), (self.plain_tokens, self.plain_out)
            for i, (tokens, out) in enumerate(both):
                if not torch.equal(tokens.gather(1, out.slots.long()), self.sets[step % _SETS]):
                    raise RuntimeError(f"{self.shape.label}: a slot does not hold the position it stands for")
                misses[i] += int(out.miss_counts.sum()) if step >= _SETS else 0
        ours, plain = (count / (_SETS * self.shape.batch * TOPK) for count in misses)
        return ours, plain


def run(now: Callable[[], float], budget_s: float) -> list[Row]:
    """Rows for all shapes; `budget_s` for each, timed with `now`."""
    floor = _lookup_time(now, budget_s)
    rows = []
    for shape in SHAPES:
        bench = ResidencyBench(shape)
        ours, plain = bench.warm_up()
        pair = bench.compare(now, budget_s)
        ceiling = pair.baseline.median / (floor * shape.batch)
        note = (
            f"{ours:.1%} misses, the reference's {plain:.1%}; finding the top-k among no more slots than that takes "
            f"{floor * 1e6:.1f} us a row, so more than {ceiling:.2f}x would take another way of looking up"
        )
        rows.append(speedup_row(f"{shape.label}: over the reference's algorithm", pair, 3.0, note))
    return rows


def _lookup_time(now: Callable[[], float], budget_s: float) -> float:
    """Seconds of one row whose top-k fills the hot buffer: look-ups of hits, and next to nothing else."""
    bench = ResidencyBench(ResidencyShape(TOPK, 0.0))
    bench.warm_up()
    return bench.compare(now, budget_s).subject.median


def _pointers(tensors: tuple[torch.Tensor, ...]) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
