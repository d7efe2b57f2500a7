"""The command ``sluice``. Imports no torch, so that it answers at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from engine.config import ConfigError, SluiceConfig, build_config, load_config

if TYPE_CHECKING:
    from deploy.client import Client

app = typer.Typer(
    help="Serve sparse-attention LLMs with separate prefill and decode nodes and almost all KV cache off the device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEFAULT_CONFIG = Path("deploy/configs/local.yaml")
_PIPED_WIDTH = 140  # columns of tables that go to a file or a pipe
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The deployment's sluice.yaml.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a field: key.path=value. Repeatable.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="gRPC host:port of the meta server; from the config if absent.")
]


@app.command()
def up(
    config: ConfigOption = _DEFAULT_CONFIG,
    set_: SetOption = None,
    model: Annotated[str | None, typer.Option("--model", help="Checkpoint directory, instead of model.path.")] = None,
) -> None:
    """Start a deployment in the foreground; SIGTERM or Ctrl-C ends it."""
    from deploy.launcher import up as launch

    launch(_load(config, set_, model), Console())


@app.command()
def status(
    config: ConfigOption = _DEFAULT_CONFIG,
    set_: SetOption = None,
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, field names as in proto/sluice/v1.")] = False,
) -> None:
    """Show workers, topology, pools and requests in flight of a running deployment."""
    from deploy.status_view import status_as_json, status_view

    with _client(config, set_, address) as client:
        snapshot = client.status()
    if as_json:
        print(json.dumps(status_as_json(snapshot), indent=2))
    else:
        width = None if sys.stdout.isatty() else _PIPED_WIDTH
        Console(width=width).print(status_view(snapshot))


@app.command()
def plan(
    context: Annotated[str, typer.Option("--context", help="Tokens of each request, prompt and output: 128K, 1M.")],
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests served at a time.")] = 1,
    model: Annotated[str | None, typer.Option("--model", help="Checkpoint directory; config.json is enough.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="sluice.yaml; the defaults if absent.")] = None,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes in bytes.")] = False,
) -> None:
    """Say what a load needs on each side and which fields have no room for it (exit status 1). Starts nothing."""
    from deploy.checkpoint import checkpoint_of, default_config
    from deploy.plan import Load, parse_tokens, plan_deployment
    from deploy.plan_fit import other_problems, shortfalls
    from deploy.plan_view import plan_as_json, plan_view, settings_line

    load = Load(parse_tokens(context), concurrency)
    if config is not None:
        chosen = _load(config, set_, model)
    elif model is not None:
        chosen = default_config(Path(model), set_ or [])
    else:
        raise ConfigError("give --model DIR, or --config FILE with a model.path")
    shape = checkpoint_of(chosen)
    planned = plan_deployment(chosen, shape, load)
    short, problems = shortfalls(chosen, shape, planned), other_problems(shape, planned)
    if as_json:
        print(json.dumps(plan_as_json(planned, short, problems), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(plan_view(shape, planned, short, problems))
        if not problems:
            print(f"  {settings_line(planned)}")  # one line, however long: it is there to be copied
    if short or problems:
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="UTF-8 text; '-': standard input.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="Token ids instead of text: 1,2,3.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 = greedy.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False,
    config: ConfigOption = _DEFAULT_CONFIG,
    set_: SetOption = None,
    address: AddressOption = None,
) -> None:
    """Send one prompt to a running deployment and stream the completion."""
    from sluice.v1 import client_pb2, common_pb2

    from deploy.generate_view import stream_completion, summary

    request = client_pb2.GenerateRequest(
        sampling=common_pb2.SamplingParams(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos, seed=seed, stop=stop
        )
    )
    if (prompt is None) == (tokens is None):
        raise ConfigError("give either --prompt TEXT or --tokens 1,2,3")
    if tokens is not None:
        request.tokens.ids.extend(_token_ids(tokens))
    else:
        request.text = _utf8(sys.stdin.read() if prompt == "-" else str(prompt))
    with _client(config, set_, address) as client:
        last, _ = stream_completion(client.generate(request), sys.stdout)
    print(summary(last), file=sys.stderr)


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--prompt: is not UTF-8 at character {error.start}") from None
    return text


def _token_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        ids = []
    if not ids or not all(0 <= token < 1 << 32 for token in ids):
        raise ConfigError(f"--tokens {text!r}: write token ids as 1,2,3")
    return ids


def _load(config: Path, overrides: list[str] | None, model: str | None = None) -> SluiceConfig:
    chosen = [*(overrides or []), *([f"model.path={json.dumps(model)}"] if model is not None else [])]
    return load_config(config, chosen)


def _client(config: Path, overrides: list[str] | None, address: str | None) -> Client:
    """For the deployment at `address`, or that of `config`, with what section `security` says.

    With an address, the default configuration may be absent.
    """
    from deploy.client import Client
    from deploy.resolve import reachable

    if address is not None:
        _check_address(address)
    if address is not None and config == _DEFAULT_CONFIG and not config.exists():
        return Client.of(build_config({"model": {"path": "."}}, overrides or []), address)
    chosen = _load(config, overrides)
    if address is None and not chosen.grpc.port:
        raise ConfigError("grpc.port = 0 says nothing about where the deployment listens; give --address HOST:PORT")
    return Client.of(chosen, address or f"{reachable(chosen.grpc.host)}:{chosen.grpc.port}")


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"--address {address!r}: write HOST:PORT, as 127.0.0.1:50051")


def main() -> None:
    """Entry point: every expected failure is one message on standard error and exit status 1 (2 for a bad config)."""
    try:
        from deploy.client import ClientError
        from deploy.launcher import DeploymentFailed
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        app()
    except ConfigError as error:
        sys.exit(_fail(str(error), 2))
    except (DeploymentFailed, ClientError) as error:
        sys.exit(_fail(str(error), 1))
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(130)


def _fail(message: str, status: int) -> int:
    print(f"sluice: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
