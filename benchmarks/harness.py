"""What the benchmarks share: timing of alternatives against each other, result rows, the table and the JSON file."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs of one thing: median, and first and third quartile as the spread."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        """Of at least one value."""
        if len(seconds) < 2:
            return Timing(seconds[0], seconds[0], seconds[0])
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return Timing(median, low, high)

    def __truediv__(self, count: float) -> Timing:
        """Of one of `count` things done in each run."""
        return Timing(self.median / count, self.low / count, self.high / count)


@dataclass(frozen=True)
class Pair:
    """Two things timed in turns, so that what disturbs the machine disturbs both."""

    subject: Timing
    baseline: Timing
    ratio: Timing  # of the subject's time to the baseline's, run by run


def clock(threads: int) -> Callable[[], float]:
    """What to time work on `threads` threads with.

    One thread is timed by its processor time, which other processes on the machine do not lengthen; several by the wall
    clock.
    """
    return time.thread_time if threads == 1 else time.perf_counter


def time_in_turns(
    subject: Callable[[int], object],
    baseline: Callable[[int], object],
    *,
    budget_s: float,
    now: Callable[[], float],
    least: int = 5,
) -> Pair:
    """Run both with run numbers 0, 1, ... until `budget_s` is spent, and at least `least` times after a warm-up."""
    spent: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + budget_s
    for run in range(10_000):
        if run > least and time.perf_counter() > deadline:
            break
        order = (0, 1) if run % 2 else (1, 0)
        for which in order:
            begin = now()
            (subject, baseline)[which](run)
            spent[which].append(now() - begin)
    ours, theirs = spent[0][1:], spent[1][1:]
    return Pair(Timing.of(ours), Timing.of(theirs), Timing.of([a / b for a, b in zip(ours, theirs, strict=True)]))


def time_alone(subject: Callable[[], object], *, budget_s: float, now: Callable[[], float]) -> Timing:
    """Run it until `budget_s` is spent, at least three times after a warm-up."""
    seconds: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(seconds) < 4 or time.perf_counter() < deadline:
        begin = now()
        subject()
        seconds.append(now() - begin)
    return Timing.of(seconds[1:])


@dataclass(frozen=True)
class Row:
    """One result. `met` is None where there is no goal."""

    name: str
    value: float
    unit: str
    baseline: float | None = None  # in `unit`
    ratio: float | None = None
    goal: str | None = None
    met: bool | None = None
    spread: tuple[float, float] | None = None  # quartiles of `ratio`, or of `value` where there is none
    note: str = ""


def slowdown_row(name: str, pair: Pair, goal: float | None, note: str = "") -> Row:
    """Ratio = our time over the baseline's; met if at most `goal`."""
    ratio = pair.ratio
    return Row(
        name,
        pair.subject.median * 1e3,
        "ms",
        pair.baseline.median * 1e3,
        ratio.median,
        None if goal is None else f"<= {goal:.2f}x",
        None if goal is None else ratio.median <= goal,
        (ratio.low, ratio.high),
        note,
    )


def speedup_row(name: str, pair: Pair, goal: float | None, note: str = "") -> Row:
    """Ratio = the baseline's time over ours; met if at least `goal`."""
    ratio = pair.ratio
    return Row(
        name,
        pair.subject.median * 1e3,
        "ms",
        pair.baseline.median * 1e3,
        1 / ratio.median,
        None if goal is None else f">= {goal:.2f}x",
        None if goal is None else 1 / ratio.median >= goal,
        (1 / ratio.high, 1 / ratio.low),
        note,
    )


def rate_row(name: str, amount: float, timing: Timing, unit: str, best: float | None = None, note: str = "") -> Row:
    """`amount` per second in `unit` (GB/s or GFLOP/s); the ratio is to `best`, what the machine reaches otherwise."""
    rate = amount / timing.median / 1e9
    spread = amount / timing.high / 1e9, amount / timing.low / 1e9
    return Row(name, rate, unit, best, None if best is None else rate / best, None, None, spread, note)


def publish(rows: Sequence[Row], file_name: str, console: Console) -> Path:
    """Print a table and write the rows to `benchmarks/results/<file_name>`; returns the path."""
    table = Table("name", "value", "unit", "baseline", "ratio", "quartiles", "goal", "met", "note")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.3f}",
            row.unit,
            "" if row.baseline is None else f"{row.baseline:.3f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.spread is None else f"{row.spread[0]:.2f} to {row.spread[1]:.2f}",
            row.goal or "",
            {None: "", True: "yes", False: "no"}[row.met],
            row.note,
        )
    console.print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / file_name
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return path


def published(file_name: str) -> list[Row]:
    """The rows of an earlier `publish`; none if there was none."""
    path = RESULTS / file_name
    if not path.exists():
        return []
    return [row_of(fields) for fields in json.loads(path.read_text())]


def row_of(fields: dict[str, Any]) -> Row:
    """A row as it was written."""
    spread = fields["spread"]
    return Row(**fields | {"spread": spread and (spread[0], spread[1])})
