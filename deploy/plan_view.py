"""``sluice plan`` on the screen, or as JSON for scripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.plan import Plan
from deploy.plan_fit import Shortfall
from deploy.status_view import format_bytes
from engine.model.config import ModelConfig


def plan_as_json(plan: Plan, short: Sequence[Shortfall], problems: str) -> dict[str, Any]:
    """Numbers in bytes, tokens and blocks; `settings` has exactly room for the load; null if no settings can help."""
    return {
        "load": dataclasses.asdict(plan.load),
        "prefill": dataclasses.asdict(plan.prefill),
        "decode": dataclasses.asdict(plan.decode),
        "settings": None if problems else plan.settings(),
        "fits": not short and not problems,
        "shortfalls": [dataclasses.asdict(each) for each in short],
        "problems": problems.splitlines(),
    }


def plan_view(model: ModelConfig, plan: Plan, short: Sequence[Shortfall], problems: str) -> RenderableType:
    """Both sides' needs, and what does not fit."""
    config, load = plan.config, plan.load
    head = Text(
        f"{model.model_type}, {plan.prefill.layers} layers, {len(model.indexer_layers)} of them with an indexer, "
        f"{config.model.dtype}, blocks of {config.kv.block_size} tokens\n"
        f"{load.concurrency} requests of {load.context:,} tokens; KV cache only, without weights and activations"
    )
    parts: list[RenderableType] = [
        head,
        _table(f"prefill: each worker, of {config.prefill.groups * config.prefill.tp}", _prefill_rows(plan)),
        _table(f"decode: each DP rank, of {config.decode.groups * config.decode.dp}", _decode_rows(plan)),
    ]
    if problems:
        parts.append(Text(problems, "bold red"))
    for each in short:
        parts.append(Text(_shortfall_text(each), "bold red"))
    verdict = "fits the configuration" if not short and not problems else "does not fit the configuration"
    hint = "" if problems else "; exactly enough would be:"
    parts.append(Text(f"the load {verdict}{hint}", "bold"))
    return Group(*parts)


def settings_line(plan: Plan) -> str:
    """The options that have exactly room, for the command line."""
    return " ".join(f"--set {path}={value}" for path, value in plan.settings().items())


def _table(title: str, rows: Iterator[tuple[str, str, str]]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left", box=None)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def _prefill_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    p = plan.prefill
    buffers = p.independent + p.shared
    yield "layer buffers", f"{buffers} of {p.layers}", f"{p.independent} independent, {p.shared} shared"
    yield "footprint", f"{p.footprint:.1%}", "(I + min(B, N - I)) / N"
    yield "device bytes", format_bytes(p.device_bytes), f"all resident: {format_bytes(p.device_bytes_all_resident)}"
    yield "pool bytes", format_bytes(p.pool_bytes), "host memory from which one prompt's shared buffers are reloaded"


def _decode_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    d = plan.decode
    int8 = "no power of two" if d.indexer_bytes_int8 is None else format_bytes(d.indexer_bytes_int8)
    yield "requests", str(d.requests), f"of {plan.load.concurrency}"
    yield "host bytes", format_bytes(d.host_bytes), "main KV, shared by the TP ranks"
    yield (
        "indexer bytes",
        format_bytes(d.indexer_bytes),
        f"model's dtype: {format_bytes(d.indexer_bytes_model)}, int8: {int8}",
    )
    yield "hot bytes per request", format_bytes(d.hot_bytes_per_request), f"{d.hot_tokens} tokens and a tail block"
    yield (
        "device bytes",
        format_bytes(d.device_bytes),
        f"of each worker; all resident: {format_bytes(d.device_bytes_all_resident)}",
    )
    yield (
        "break-even context",
        f"{d.break_even_context} tokens",
        "up to here a hot row is no smaller than the main KV",
    )


def _shortfall_text(short: Shortfall) -> str:
    as_bytes = short.field.endswith("_bytes")

    def amount(value: int) -> str:
        return f"{format_bytes(value)} ({value})" if as_bytes else str(value)

    lines = [f"{short.field} = {amount(short.configured)}: raise it to {amount(short.needed)}, {short.reason}"]
    for remedy in short.remedies:
        fits = "fits" if remedy.fits else "does not fit either"
        lines.append(f"  with {remedy.setting}: {format_bytes(remedy.device_bytes)}, {fits}")
    return "\n".join(lines)
