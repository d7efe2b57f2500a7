"""``make bench``: speed of a whole local cluster with the pass-key model, at rising context lengths.

One request at a time: prompt tokens per second until the first token, and time per further token. Then several at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sluice.v1 import client_pb2, common_pb2

from benchmarks.passkey import make_prompt
from deploy.client import Client, ClientError
from deploy.launcher import DeploymentFailed, started
from deploy.signals import Signals, Stopped
from engine.config import ConfigError, load_config

_CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "configs" / "local.yaml"
_NEW_TOKENS = 32


@dataclass(frozen=True)
class Measurement:
    """`requests` alike prompts sent together; times in seconds, speeds in tokens per second over all of them."""

    prompt_tokens: int
    requests: int
    first_token_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure(client: Client, tokens: int, requests: int) -> Measurement:
    """Sends the prompts at once and waits for all answers. Raises ClientError."""
    usages: list[client_pb2.Usage] = []
    errors: list[ClientError] = []

    def ask(seed: int) -> None:
        text, _ = make_prompt(tokens, 0.5, seed)
        sampling = common_pb2.SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
        try:
            *_, last = client.generate(client_pb2.GenerateRequest(text=text, sampling=sampling))
            usages.append(last.usage)
        except ClientError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(requests)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - begin
    if errors:
        raise errors[0]
    last_first = max(usage.ttft_seconds for usage in usages)
    return Measurement(
        prompt_tokens=usages[0].prompt_tokens,
        requests=requests,
        first_token_s=last_first,
        prefill_tokens_per_s=sum(usage.prompt_tokens for usage in usages) / last_first,
        decode_tokens_per_s=requests * (_NEW_TOKENS - 1) / max(elapsed - last_first, 1e-9),
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--together", type=int, default=4, help="requests sent at once in the second round")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of the config"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    try:
        config = load_config(_CONFIG, ["http.port=0", "grpc.port=0", *arguments.set])
        with started(config, console, Signals()) as (run, _), Client(run.grpc_address) as client:
            measure(client, 256, 1)  # opens the links
            rounds = [(tokens, count) for count in (1, arguments.together) for tokens in arguments.lengths]
            results = [measure(client, tokens, count) for tokens, count in rounds]
    except (ConfigError, DeploymentFailed, ClientError, ValueError) as error:
        sys.exit(f"bench: {error}")
    except Stopped:
        sys.exit(130)
    if arguments.json:
        for result in results:
            print(json.dumps(asdict(result)))
        return
    table = Table("prompt tokens", "requests", "last first token", "prefill tokens/s", "decode tokens/s")
    for result in results:
        table.add_row(
            str(result.prompt_tokens),
            str(result.requests),
            f"{result.first_token_s:.2f} s",
            f"{result.prefill_tokens_per_s:.0f}",
            f"{result.decode_tokens_per_s:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
