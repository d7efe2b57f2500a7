"""``make bench-transfer``: what a pull costs, against memcpy and other transfer engines on the same descriptors.

Every read goes from one process's memory into another's; the destination's bytes are checked before it is timed. memcpy
is the C library's, on one thread of the reading process, over the same descriptors between two regions of its own.
Writes ``benchmarks/results/transfer.json``. Measure on an idle machine: a reader and a source need a core each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import RESULTS, Pair, Row, Timing, publish, rate_row
from benchmarks.transfer_peers import PeerFailed, prefill_and_decode, reader_and_sources
from benchmarks.transfer_shapes import (
    LAYERS,
    MAX_SOURCES,
    Shape,
    growth,
    layers_in_order,
    shapes,
    share_of_sources,
)
from tests.transfer.test_pull_over_memfabric import Peers
from transfer.hostcann import HostcannError

GOALS: Mapping[str, float] = {
    "61 layers x 16 blocks, a read per layer": 0.95,
    "61 layers x 16 blocks, one read": 0.95,
    "4096 scattered blocks of 16 KiB": 0.8,
    "one range of 256 MiB": 1.0,
}
PARTS = ("sluice", "nixl", "mooncake", "sources", "handshake", "layers")
_HANDSHAKES = 2000
_CHECKSUMS = ("off", "sample", "all")
_AHEAD = 1, 4, 16  # layers published before the first one is acknowledged


def pair_of(answer: Mapping[str, Any]) -> Pair:
    return Pair(*(Timing(**answer[part]) for part in ("subject", "baseline", "ratio")))


def speed_row(engine: str, shape: Shape, pair: Pair, goal: float | None) -> Row:
    """GB/s of the engine, of memcpy, and the median ratio of the two run by run."""
    ratio, speed = 1 / pair.ratio.median, shape.bytes / pair.subject.median / 1e9
    return Row(
        f"{engine}: {shape.label}",
        speed,
        "GB/s",
        shape.bytes / pair.baseline.median / 1e9,
        ratio,
        None if goal is None else f">= {goal:.2f}x",
        None if goal is None else ratio >= goal,
        (1 / pair.ratio.high, 1 / pair.ratio.low),
        f"{pair.subject.median / shape.descriptors * 1e6:.2f} us per descriptor; baseline: memcpy",
    )


def missing_row(name: str, reason: str) -> Row:
    return Row(name, 0.0, "GB/s", note=f"not measured: {reason}")


def engine_rows(engine: str, budget_s: float, root: Path) -> Iterator[Row]:
    """Ours with goals and growth; the others on the same shapes."""
    ours = engine == "sluice"
    try:
        with reader_and_sources(engine, 1, root) as reader:
            for shape in [*shapes(), *(growth() if ours else [])]:
                try:
                    pair = pair_of(reader.ask("compare", shape.label, budget_s))
                except PeerFailed as error:
                    yield missing_row(f"{engine}: {shape.label}", str(error))
                else:
                    yield speed_row(engine, shape, pair, GOALS.get(shape.label) if ours else None)
    except PeerFailed as error:
        yield missing_row(engine, str(error))


def sources_rows(budget_s: float, root: Path) -> Iterator[Row]:
    """Several sources read side by side by one process, 512 blocks of 128 KiB from each."""
    alone = 0.0
    with reader_and_sources("sluice", MAX_SOURCES, root) as reader:
        for count in (1, 2, MAX_SOURCES):
            timing = Timing(**reader.ask("together", count, budget_s))
            row = rate_row(
                f"sluice: {count} sources at once", count * share_of_sources(0).bytes, timing, "GB/s", alone or None
            )
            alone = alone or row.value
            yield row


def handshake_rows(folder: Path) -> Iterator[Row]:
    """READ_READY until the gate is open again, over the real publisher, puller and wheel, of a layer of a few bytes."""
    peers = Peers(folder)
    try:
        decode, prefill = peers.start("decode", 1), peers.start("prefill", 0)
        decode.ready(), prefill.ready()
        if refusal := prefill.ask("connect", decode.ask("address")):
            raise PeerFailed(str(refusal))
        decode.ask("expect", "r", 1, 0)
        seconds = prefill.ask("latencies", "r", 1, _HANDSHAKES)
    finally:
        peers.close()
    assert isinstance(seconds, list)
    cuts = statistics.quantiles(seconds[_HANDSHAKES // 10 :], n=100)
    yield Row("sluice: READ_READY to an open gate, p50", cuts[49] * 1e6, "us", spread=(cuts[24] * 1e6, cuts[74] * 1e6))
    yield Row("sluice: READ_READY to an open gate, p99", cuts[98] * 1e6, "us")


def layers_rows(budget_s: float, root: Path) -> Iterator[Row]:
    """One request's 61 layers through publisher and puller, for each way to send checksums; bytes are checked."""
    shape = layers_in_order()
    for checksum in _CHECKSUMS:
        with prefill_and_decode(checksum, root) as (prefill, decode):
            whole: dict[int, list[tuple[float, float]]] = {ahead: [] for ahead in _AHEAD}
            single: list[float] = []
            end = time.perf_counter() + 2 * budget_s
            for number, ahead in enumerate(itertools.cycle(_AHEAD), 1):
                if number > 6 * len(_AHEAD) and time.perf_counter() > end:
                    break
                decode.ask("expect", f"r{number}", number)
                took, *layers = prefill.ask("pull", f"r{number}", number, ahead)
                decode.ask("receive", f"r{number}")
                whole[ahead].append((took, decode.ask("memcpy")))
                if ahead == 1:
                    single += layers
            if not decode.ask("right"):
                raise PeerFailed(f"wrong bytes arrived with checksums {checksum}")
        for ahead, spent in whole.items():
            ours, plain = zip(*spent[1:], strict=True)
            ratios = [took / copy for took, copy in spent[1:]]
            row = speed_row("sluice", shape, Pair(*map(Timing.of, (ours, plain, ratios))), None)
            name = f"sluice: publisher to puller, 61 layers x 16 blocks, checksums {checksum}, {ahead} under way"
            yield replace(row, name=name)
        cuts = statistics.quantiles(single[LAYERS:], n=100)
        for name, cut in (("p50", 49), ("p99", 98)):
            yield Row(
                f"sluice: one layer of 2.25 MiB to an open gate, checksums {checksum}, {name}", cuts[cut] * 1e6, "us"
            )


def measure(parts: Sequence[str], budget_s: float, console: Console) -> Iterator[Row]:
    """Part by part, as the rows come."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir="/dev/shm") as folder:
        for part in parts:
            console.print(f"{part} ...")
            root = Path(folder, part)
            if part == "sources":
                yield from sources_rows(budget_s, root)
            elif part == "handshake":
                root.mkdir()
                yield from handshake_rows(root)
            elif part == "layers":
                yield from layers_rows(budget_s, root)
            else:
                yield from engine_rows(part, budget_s, root)


def others(rows: Sequence[Row], parts: Sequence[str]) -> list[Row]:
    """Rows of earlier runs that this one, of only some parts, has not measured."""
    path, measured = RESULTS / "transfer.json", {row.name for row in rows}
    if set(parts) == set(PARTS) or not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8")) if row["name"] not in measured]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each comparison (default: %(default)s)")
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=PARTS, help="parts to run (default: all); other rows stay"
    )
    arguments = parser.parse_args()
    console = Console()
    try:
        rows = list(measure(arguments.only, arguments.seconds, console))
    except (PeerFailed, HostcannError) as error:
        sys.exit(f"bench-transfer: {error}")
    path = publish([*rows, *others(rows, arguments.only)], "transfer.json", console)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
