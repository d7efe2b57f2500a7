"""``python -m benchmarks.prefill``: what prefill's layer buffers, pool and packing cost, over whole local deployments.

A random model of moderate size, so only speeds mean something. Each number is the better of two rounds. The two
deployments run one after the other, so the host must have nothing else to do: compare only numbers of an idle one.
`load_wait_share` is the part of the loads' time for which the computation waited, i.e. that was not hidden.
Writes ``benchmarks/results/prefill.json``: rows of name, value, unit, baseline, ratio, goal, met.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from sluice.v1 import client_pb2, common_pb2

from deploy.client import Client, ClientError
from deploy.launcher import DeploymentFailed, started
from deploy.signals import Signals, Stopped
from engine.config import ConfigError, load_config
from tests.checkpoints import random_checkpoint

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results" / "prefill.json"
_VOCABULARY = 320
_TOKENS = 1600
_CACHED = 0.9
_MIXED = (200, 400, 800, 1600)
_ROUNDS = 2
_WORKER = "prefill-0/tp0"
_COPY_BYTES = 64 << 20
_SIZES = {"num_hidden_layers": 8, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "index_head_dim": 64}


@dataclass(frozen=True)
class Row:
    """`ratio` = value / baseline; `goal` is what it should be at most, or at least for throughputs."""

    name: str
    value: float
    unit: str
    baseline: float
    ratio: float
    goal: float
    met: bool


def row(name: str, value: float, unit: str, baseline: float, goal: float, *, at_least: bool = False) -> Row:
    ratio = value / baseline
    return Row(name, value, unit, baseline, ratio, goal, ratio >= goal if at_least else ratio <= goal)


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, _VOCABULARY), k=tokens)


def first_tokens(client: Client, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds until the last of these prompts, sent together, has its first token. Raises ClientError."""
    errors: list[ClientError] = []

    def ask(tokens: Sequence[int]) -> None:
        sampling = common_pb2.SamplingParams(max_tokens=1, ignore_eos=True)
        request = client_pb2.GenerateRequest(tokens=client_pb2.TokenIds(ids=tokens), sampling=sampling)
        try:
            list(client.generate(request))
        except ClientError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(tokens,)) for tokens in prompts]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.monotonic() - begin


def counters(client: Client) -> Mapping[str, float]:
    """Of the prefill worker, after a heartbeat."""
    time.sleep(2.5)
    return next(dict(w.status.counters) for w in client.status().workers if w.info.worker_id == _WORKER)


def copy_bytes_per_s() -> float:
    """What one thread copies in this host's memory."""
    source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target.copy_(source)
    begin = time.monotonic()
    for _ in range(8):
        target.copy_(source)
    return 8 * _COPY_BYTES / (time.monotonic() - begin)


def measure(model: Path, overrides: Sequence[str], console: Console) -> tuple[float, list[Row]]:
    """Seconds of a cold prompt in a deployment, and the rows that one deployment gives."""
    config = load_config(
        _ROOT / "deploy" / "configs" / "local.yaml",
        ["http.port=0", "grpc.port=0", f"model.path={model}", "model.max_model_len=4096", *overrides],
    )
    with started(config, console, Signals()) as (run, _), Client(run.grpc_address) as client:
        first_tokens(client, [prompt(300, 0)])  # opens the links
        cold, warm, mixed, padded = ([] for _ in range(4))
        for seed in range(1, 1 + _ROUNDS):
            whole = prompt(_TOKENS, seed)
            cold.append(first_tokens(client, [whole]))
            warm.append(first_tokens(client, [whole[: int(_TOKENS * _CACHED)] + prompt(_TOKENS // 10, -seed)]))
            mixed.append(first_tokens(client, [prompt(length, 100 * seed + length) for length in _MIXED]))
            padded.append(first_tokens(client, [prompt(max(_MIXED), 9000 + 10 * seed + i) for i in range(len(_MIXED))]))
        seen = counters(client)
    copy = copy_bytes_per_s()
    put = seen["bytes_saved"] / max(seen["save_seconds"], 1e-9)
    get = seen["bytes_loaded"] / max(seen["load_seconds"], 1e-9)
    real = sum(_MIXED) / (len(_MIXED) * max(_MIXED))
    return min(cold), [
        row(f"ttft_{int(_CACHED * 100)}_percent_cached", min(warm), "s", min(cold), 0.2),
        row("packed_over_padded", min(mixed), "s", min(padded), 1.1 * real),
        row("pool_put", put, "bytes/s", copy, 0.5, at_least=True),
        row("pool_get", get, "bytes/s", copy, 0.5, at_least=True),
        row("load_wait_share", seen["load_wait_seconds"], "s", max(seen["load_seconds"], 1e-9), 0.05),
    ]


def main() -> None:
    """Entry point."""
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
            model = random_checkpoint(Path(folder) / "model", "glm_moe_dsa", seed=0, **_SIZES)
            resident, _ = measure(model, ["prefill.independent_layers=all"], console)
            shared, rows = measure(model, ["prefill.shared_buffers=3"], console)
    except (ConfigError, DeploymentFailed, ClientError, ValueError) as error:
        sys.exit(f"bench-prefill: {error}")
    except Stopped:
        sys.exit(130)
    rows.insert(0, row("wall_3_buffers_over_all_resident", shared, "s", resident, 1.03))
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n", encoding="utf-8")
    for each in rows:
        console.print(
            f"{each.name}: {each.value:.4g} {each.unit}, ratio {each.ratio:.3g}, goal {each.goal:.3g}", markup=False
        )


if __name__ == "__main__":
    main()
