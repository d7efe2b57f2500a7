"""A local deployment to be measured, next to others that are idle meanwhile."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from sluice.v1 import client_pb2, common_pb2

from deploy.client import Client, ClientError
from deploy.launcher import started
from deploy.signals import Signals
from engine.config import SluiceConfig, load_config
from transfer import hostcann

CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "configs" / "local.yaml"
_VOCABULARY = 320
_HEARTBEATS_S = 2.5
PREFILL = "prefill-0/tp0"


def prompt(tokens: int, seed: int) -> list[int]:
    """Random tokens of the benchmark models."""
    return random.Random(seed).choices(range(2, _VOCABULARY), k=tokens)


class Side:
    """A running deployment with one prefill and one decode worker."""

    def __init__(self, config: SluiceConfig, device_root: Path, client: Client) -> None:
        self.config, self._root, self._client = config, device_root, client

    def first_tokens(self, prompts: Sequence[Sequence[int]]) -> float:
        """Seconds until the last of these prompts, sent together, has its first token. Raises ClientError."""
        errors: list[ClientError] = []

        def ask(tokens: Sequence[int]) -> None:
            sampling = common_pb2.SamplingParams(max_tokens=1, ignore_eos=True)
            request = client_pb2.GenerateRequest(tokens=client_pb2.TokenIds(ids=tokens), sampling=sampling)
            try:
                list(self._client.generate(request))
            except ClientError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(tokens,)) for tokens in prompts]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return time.perf_counter() - begin

    def status(self) -> common_pb2.WorkerStatus:
        """The prefill worker's, after a heartbeat."""
        time.sleep(_HEARTBEATS_S)
        return next(worker.status for worker in self._client.status().workers if worker.info.worker_id == PREFILL)

    def counters(self) -> Mapping[str, float]:
        return dict(self.status().counters)

    def device_bytes(self) -> int:
        """What the driver has given the prefill worker."""
        device = self.config.prefill_device(0, 0)
        return next(each.allocated_bytes for each in hostcann.counters(self._root) if each.device == device)


@contextlib.contextmanager
def side(model: Path, overrides: Sequence[str], console: Console) -> Iterator[Side]:
    """Starts a deployment; its links are open when it begins to be measured. Raises DeploymentFailed, ConfigError."""
    config = load_config(CONFIG, ["http.port=0", "grpc.port=0", f"model.path={model}", *overrides])
    with started(config, console, Signals()) as (run, _), Client(run.grpc_address) as client:
        running = Side(run.config, run.device_root, client)
        running.first_tokens([prompt(300, 0)])
        yield running
