"""``make demo``: a whole cluster on this machine answers a question over a context far longer than index_topk.

1. start the deployment of deploy/configs/local.yaml with the shipped pass-key model;
2. hide a key in some thousand tokens of text, ask for it, stream the answer and check it;
3. show what it took, from the workers' own counters; stop everything.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sluice.v1 import client_pb2, common_pb2

from benchmarks.passkey import make_prompt
from deploy.client import Client, ClientError
from deploy.generate_view import stream_completion
from deploy.launcher import DeploymentFailed, started
from deploy.signals import Signals, Stopped
from deploy.status_view import format_bytes
from engine.config import ConfigError, load_config
from engine.config_check import served_model
from engine.model.config import ModelConfig

_REPOSITORY = Path(__file__).resolve().parent.parent
_CONFIG = _REPOSITORY / "deploy" / "configs" / "local.yaml"
_FREE_PORTS = ["http.port=0", "grpc.port=0"]


def run(tokens: int, depth: float, seed: int, overrides: list[str], console: Console) -> bool:
    """Runs the demo. Returns whether the answer was right. Raises what `deploy.launcher.started` raises."""
    config = load_config(_CONFIG, [*_FREE_PORTS, *overrides])
    model = served_model(config)
    text, answer = make_prompt(tokens, depth, seed)
    signals = Signals()
    with started(config, console, signals) as (deployment, _), Client.of(config, deployment.grpc_address) as client:
        console.rule("question")
        console.print(f"{text[5:145]} ... {text[-150:]}", markup=False, highlight=False)
        console.rule("answer")
        request = client_pb2.GenerateRequest(text=text, sampling=common_pb2.SamplingParams(max_tokens=32, stop=["\n"]))
        last, said = stream_completion(client.generate(request), sys.stdout)
        correct = answer in said
        console.print(
            f"the key is {answer}: {'right' if correct else 'WRONG'}", style="green" if correct else "bold red"
        )
        signals.sleep(2 * config.runtime.heartbeat_s)  # heartbeats bring the workers' counters
        console.print(_table(last.usage, client.status(), model))
    return correct


def _table(usage: client_pb2.Usage, status: client_pb2.GetStatusResponse, model: ModelConfig) -> Table:
    prefill = [w.status for w in status.workers if w.info.role == common_pb2.WORKER_ROLE_PREFILL]
    decode = [w.status for w in status.workers if w.info.role == common_pb2.WORKER_ROLE_DECODE]
    held, resident = prefill[0].gauges["main_kv_bytes"], prefill[0].gauges["main_kv_bytes_all_resident"]
    hits = sum(worker.counters["hot_hits"] for worker in decode)
    misses = sum(worker.counters["hot_misses"] for worker in decode)
    steps = max(1, usage.completion_tokens - 1)
    table = Table(show_header=False)
    rows = [
        ("prompt", f"{usage.prompt_tokens} tokens; every token attends to {model.index_topk} of them (index_topk)"),
        ("time to first token", f"{usage.ttft_seconds:.2f} s"),
        ("time per token", f"{usage.decode_seconds / steps * 1000:.1f} ms, {usage.completion_tokens} tokens"),
        (
            "main KV on the prefill device",
            f"{format_bytes(held)} in {prefill[0].gauges['layer_buffers']:.0f} layer buffers; "
            f"{format_bytes(resident)} if all {model.num_layers} layers were resident",
        ),
        ("pulled by decode", format_bytes(sum(worker.counters["bytes_pulled"] for worker in decode))),
        ("hot-buffer hit rate", f"{hits / max(1.0, hits + misses):.1%} of {hits + misses:.0f} rows"),
        ("fetched from host memory", format_bytes(sum(worker.counters["bytes_host_to_device"] for worker in decode))),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def main() -> None:
    """Entry point; exit status 0 means that the streamed answer was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=7000, help="length of the prompt")
    parser.add_argument("--depth", type=float, default=0.4, help="where the key stands: 0 = start, 1 = end")
    parser.add_argument("--seed", type=int, default=1, help="another seed, another text and key")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of the config"
    )
    arguments = parser.parse_args()
    try:
        correct = run(arguments.tokens, arguments.depth, arguments.seed, arguments.set, Console())
    except (ConfigError, DeploymentFailed, ClientError, ValueError) as error:
        sys.exit(f"demo: {error}")
    except Stopped:
        sys.exit(130)
    sys.exit(0 if correct else 1)


if __name__ == "__main__":
    main()
