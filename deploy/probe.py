"""Asks a pod's processes how they are, for Kubernetes' exec probes: ``python -m deploy.probe [--alive]``.

Without `--alive`: exit status 0 when every process says SERVING for its service (ready). With it: when every process
answers at all, whatever it says; a process that loads or drains is alive. Works on every version of Kubernetes, and
asks the same gRPC health service as anybody else would.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.trust import Trust

_FILE = "health_targets"
_OPTIONS = [("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True)
class Target:
    """A gRPC server, and the service of it that must be SERVING when it is ready.

    `ca` is the file with the certificates by which it is known, `server_name` what it is called in its own; without
    `ca` it does not speak TLS.
    """

    address: str
    service: str
    ca: str | None = None
    server_name: str | None = None


def write_targets(run_dir: Path, targets: Sequence[Target]) -> None:
    text = "".join(f"{json.dumps(dataclasses.asdict(target))}\n" for target in targets)
    (run_dir / _FILE).write_text(text, encoding="utf-8")


def read_targets(run_dir: Path) -> list[Target]:
    """Raises OSError when the pod has not begun to start its processes."""
    lines = (run_dir / _FILE).read_text(encoding="utf-8").splitlines()
    return [Target(**json.loads(line)) for line in lines]


def problem(target: Target, alive: bool, timeout_s: float) -> str | None:
    """What is wrong with a process; None if nothing is."""
    service = "" if alive else target.service
    try:
        trust = Trust(Path(target.ca).read_bytes() if target.ca else None, target.server_name)
    except OSError as error:
        return f"{target.ca!r}: cannot be read: {error.strerror}"
    with trust.channel(target.address, _OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            return f"{target.address} {service!r}: {_explained(error, target)}"
    if alive or answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{target.address} {service!r}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def _explained(error: grpc.RpcError, target: Target) -> str:
    text = f"{error.code().name}: {error.details()}"
    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
        return text
    way = "with" if target.ca else "without"
    return f"{text}: nothing answers there {way} TLS"


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 1 with one line per problem on standard output, which Kubernetes shows as an event."""
    parser = argparse.ArgumentParser(prog="deploy.probe", description=__doc__)
    parser.add_argument("--alive", action="store_true", help="whether it answers, not whether it is ready")
    parser.add_argument("--run-dir", type=Path, default=Path("/run/sluice"), help="runtime.run_dir of this pod")
    parser.add_argument("--address", help="host:port to ask instead of this pod's processes")
    parser.add_argument(
        "--service", default="", help="with --address: the service to ask for; the whole server if absent"
    )
    parser.add_argument("--ca", help="with --address: PEM file by which the server is known; no TLS if absent")
    parser.add_argument("--server-name", help="with --ca: name in the server's certificate, if it is not the host")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each process")
    options = parser.parse_args(arguments)
    try:
        asked = Target(options.address or "", options.service, options.ca, options.server_name)
        targets = [asked] if options.address else read_targets(options.run_dir)
    except OSError as error:
        print(f"no process has been started yet: {error}")
        return 1
    problems = [text for target in targets if (text := problem(target, options.alive, options.timeout))]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
