"""``make bench-prefill``: what prefill's layer buffers, prefixes, packing and pool cost.

Deployments that are compared run side by side on one host and are asked in turns, so what slows the host down slows
both; each ratio is the median over such pairs, with its quartiles. Models are random: only times mean something.
Rows of parts that are not run (`--only`) stay in ``benchmarks/results/prefill.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Pair, Row, Timing, publish, published, slowdown_row
from benchmarks.prefill_pool import pool_rows
from benchmarks.prefill_side import Side, prompt, side
from deploy.checkpoint import checkpoint_of
from deploy.client import ClientError
from deploy.launcher import DeploymentFailed
from deploy.signals import Stopped
from engine.config import ConfigError
from prefill_node.shape import prefill_shape
from tests.checkpoints import random_checkpoint

PARTS = ("layers", "prefix", "packing", "pool", "growth")
_FILE = "prefill.json"
_SHARED = 3
_TOKENS = 1600
_CACHED = 0.9
_MIXED = (200, 400, 800, 1600)
_LENGTHS = (4096, 8192, 16384, 32768, 65536)
_COMMON = {
    "index_head_dim": 64,
    "index_n_heads": 8,
    "kv_lora_rank": 256,
    "max_position_embeddings": 70000,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_MODEL = _COMMON | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
}
"""A layer takes some 70 ms for a step of 512 tokens, of which interpreter and bookkeeping are a few."""
_LONG_MODEL = _COMMON | {
    "hidden_size": 256,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "indexer_types": ["full", "shared", "shared", "shared", "shared"],
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
}
"""Smaller, so that 64K tokens take a minute; four of five layers reuse the first one's top-k, as GLM-5.2's do."""
_STEP = "prefill.max_tokens_per_step=512"
_RESIDENT, _REUSED = "prefill.independent_layers=all", f"prefill.shared_buffers={_SHARED}"


@contextlib.contextmanager
def _sides(model: Path, overrides: Sequence[str], console: Console) -> Iterator[tuple[Side, Side]]:
    """With shared layer buffers, and with one for each layer."""
    with (
        side(model, [*overrides, _STEP, _REUSED], console) as shared,
        side(model, [*overrides, _STEP, _RESIDENT], console) as resident,
    ):
        yield shared, resident


def _in_turns(
    subject: Callable[[int], float], baseline: Callable[[int], float], pairs: int, *, warm_up: int = 1
) -> Pair:
    """Both with run numbers 0, 1, ..., which give the seconds they took; the first `warm_up` pairs do not count."""
    spent: tuple[list[float], list[float]] = ([], [])
    for run in range(pairs + warm_up):
        for which in (0, 1) if run % 2 else (1, 0):
            spent[which].append((subject, baseline)[which](run))
    ours, theirs = spent[0][warm_up:], spent[1][warm_up:]
    return Pair(Timing.of(ours), Timing.of(theirs), Timing.of([a / b for a, b in zip(ours, theirs, strict=True)]))


def layers(shared: Side, resident: Side, pairs: int) -> list[Row]:
    """Few layer buffers against all of them: time, hidden copies, device memory."""
    before = shared.counters()
    pair = _in_turns(
        lambda run: shared.first_tokens([prompt(_TOKENS, 1 + run)]),
        lambda run: resident.first_tokens([prompt(_TOKENS, 1 + run)]),
        pairs,
    )
    spent = {name: value - before.get(name, 0.0) for name, value in shared.counters().items()}
    copies = spent["load_seconds"] + spent["save_seconds"]
    hidden = 1 - spent["transfer_wait_seconds"] / copies
    planned = prefill_shape(shared.config, checkpoint_of(shared.config))
    held = shared.device_bytes()
    ratio = shared.status().gauges["main_kv_bytes"] / shared.status().gauges["main_kv_bytes_all_resident"]
    expected = len(planned.plan.slots) / planned.plan.num_layers
    return [
        slowdown_row(
            f"wall, {_SHARED} buffers over all resident", pair, 1.03, f"{_TOKENS} tokens, time to first token"
        ),
        Row(
            "copies hidden behind the computation",
            hidden,
            "share",
            copies,
            hidden,
            ">= 0.95",
            hidden >= 0.95,
            note=f"baseline: seconds of pool copies; waited {spent['transfer_wait_seconds']:.4f} s, readers included",
        ),
        Row(
            "device bytes over planned",
            held,
            "bytes",
            planned.device_bytes,
            held / planned.device_bytes,
            "= 1",
            held == planned.device_bytes,
            note="as the driver counts them",
        ),
        Row("footprint", ratio, "of all resident", expected, ratio / expected, "= 1", ratio == expected),
    ]


def prefix(shared: Side, pairs: int) -> list[Row]:
    """A prompt of which the pool has nine tenths against one of which it has nothing."""
    common = int(_TOKENS * _CACHED)

    def cold(run: int) -> float:
        return shared.first_tokens([prompt(_TOKENS, 1000 + run)])

    def warm(run: int) -> float:
        shared.first_tokens([prompt(common + 1, 2000 + run)])  # puts the beginning into the pool
        return shared.first_tokens([prompt(_TOKENS, 2000 + run)[:common] + prompt(_TOKENS - common, 3000 + run)])

    return [slowdown_row(f"time to first token, {_CACHED:.0%} cached over cold", _in_turns(warm, cold, pairs), 0.2)]


def packing(shared: Side, pairs: int) -> list[Row]:
    """Prompts of mixed lengths in one batch against as many of the longest, which is what padding would compute."""
    seeds = iter(range(4000, 10**6))

    def mixed(run: int) -> float:
        return shared.first_tokens([prompt(length, next(seeds)) for length in _MIXED])

    def padded(run: int) -> float:
        return shared.first_tokens([prompt(max(_MIXED), next(seeds)) for _ in _MIXED])

    real = sum(_MIXED) / (len(_MIXED) * max(_MIXED))
    note = f"real tokens are {real:.3f} of the padded ones"
    return [slowdown_row("packed over padded", _in_turns(mixed, padded, pairs), 1.05 * real, note)]


def growth(shared: Side, resident: Side, lengths: Sequence[int], pairs: int) -> list[Row]:
    """How the time per prompt grows with its length, on both sides."""
    rows = []
    for length in lengths:
        pair = _in_turns(
            lambda run, length=length: shared.first_tokens([prompt(length, 7 * length + run)]),
            lambda run, length=length: resident.first_tokens([prompt(length, 7 * length + run)]),
            pairs,
            warm_up=0,
        )
        note = f"{length / pair.subject.median:.0f} tokens/s with {_SHARED} buffers"
        rows.append(slowdown_row(f"wall at {length} tokens, {_SHARED} buffers over all resident", pair, None, note))
    return rows


def measure(parts: Sequence[str], lengths: Sequence[int], pairs: int, folder: Path, console: Console) -> list[Row]:
    rows = []
    if {"layers", "prefix", "packing"} & set(parts):
        model = random_checkpoint(folder / "model", "glm_moe_dsa", seed=0, **_MODEL)
        with _sides(model, ["model.max_model_len=4096"], console) as (shared, resident):
            rows += layers(shared, resident, pairs) if "layers" in parts else []
            rows += prefix(shared, pairs) if "prefix" in parts else []
            rows += packing(shared, max(1, pairs // 2)) if "packing" in parts else []
    if "pool" in parts:
        rows += pool_rows(console)
    if "growth" in parts:
        model = random_checkpoint(folder / "long", "glm_moe_dsa", seed=0, **_LONG_MODEL)
        room = max(lengths) + 512
        fields = [f"model.max_model_len={room}", "prefill.max_requests=1", "decode.max_requests=2"]
        memory = ["decode.host_pool_bytes=1GiB", "pool.dram_bytes=1GiB", "hostcann.hbm_bytes=2GiB"]
        with _sides(model, [*fields, *memory], console) as (shared, resident):
            rows += growth(shared, resident, lengths, max(1, pairs // 3))
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to run (default: all)")
    parser.add_argument("--pairs", type=int, default=10, help="of runs that are compared (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=_LENGTHS, help="of growth (default: %(default)s)")
    arguments = parser.parse_args()
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
            rows = measure(arguments.only, arguments.lengths, arguments.pairs, Path(folder), console)
    except (ConfigError, DeploymentFailed, ClientError, ValueError) as error:
        sys.exit(f"bench-prefill: {error}")
    except Stopped:
        sys.exit(130)
    new = {row.name for row in rows}
    publish([*(row for row in published(_FILE) if row.name not in new), *rows], _FILE, console)


if __name__ == "__main__":
    main()
