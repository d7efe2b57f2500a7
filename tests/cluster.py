"""A whole local deployment for end-to-end tests: the real ``sluice up`` in a subprocess, asked over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
from sluice.v1 import client_pb2, common_pb2

from deploy.client import Client
from engine.config import load_config
from engine.credentials import client_trust
from transfer import hostcann

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = REPOSITORY / "deploy" / "configs" / "local.yaml"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Completion:
    """One answer of POST /v1/completions."""

    tokens: list[int]
    text: str
    finish_reason: str
    body: dict[str, Any]


class ClusterError(AssertionError):
    """The deployment did not do what every test relies on; the text carries its output and logs."""


class Cluster:
    """Starts a deployment, offers it to a test, ends it, and checks that nothing is left.

    `overrides` are fields of sluice.yaml by dotted path. On a clean exit of the block the pools must have returned to
    zero, `sluice up` must end with status 0 within 15 s, and no process, device memory or shared memory may remain.
    """

    def __init__(
        self, model_dir: Path, overrides: Mapping[str, object] | None = None, *, may_hang: bool = False
    ) -> None:
        """`may_hang`: workers may have to be killed in the end, as leaving a pool one of whose members was killed may
        never return."""
        self._may_hang = may_hang
        self._model_dir = model_dir
        self._overrides = dict(overrides or {})
        self.http_url = self.grpc_address = ""
        self._output: list[str] = []
        self._ready = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-t-")

    def __enter__(self) -> Cluster:
        fields = {
            "http.port": 0,
            "grpc.port": 0,
            "runtime.run_dir": self._folder.name,
            **self._overrides,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", "--config", str(CONFIG), "--model", str(self._model_dir)]
            + [part for key, value in fields.items() for part in ("--set", f"{key}={value}")],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.wait(0.1):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise ClusterError(f"the deployment did not start:\n{self.diagnosis()}")
        config = load_config(Path(self._folder.name, "sluice.yaml"))
        self._grpc = Client.of(config, self.grpc_address)
        trust = client_trust(config.security)
        verify = ssl.create_default_context(cafile=config.security.ca) if trust.ca else True
        self._http = httpx.Client(base_url=self.http_url, timeout=300.0, verify=verify, headers=dict(trust.metadata))
        self.root = Path(str(config.hostcann.root))
        self.processes = psutil.Process(self._process.pid).children(recursive=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._process.poll() is None:
                if error is None:
                    self.wait_idle()
                self.stop()
        except AssertionError as failure:
            raise ClusterError(f"{failure}\n{self.diagnosis()}") from None
        finally:
            self._http.close()
            self._grpc.__exit__()
            self._process.kill()
            self._folder.cleanup()

    def stop(self) -> None:
        """Ends the deployment with SIGTERM and checks that it is clean."""
        self.processes = psutil.Process(self._process.pid).children(recursive=True)  # some may have been restarted
        self._process.send_signal(signal.SIGTERM)
        status = self.wait_exit()
        assert status == 0, f"sluice up ended with status {status} after SIGTERM"
        assert self._may_hang or not self.said("had to kill"), "not every process ended by itself"

    def wait_exit(self) -> int:
        """Waits until `sluice up` has ended and checks that nothing is left of it. Returns its exit status."""
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"sluice up still runs after {STOP_TIMEOUT_S:.0f} s") from None
        self._reader.join(5)
        orphans = [process for process in self.processes if _runs(process)]
        assert not orphans, f"orphan processes: {orphans}"
        assert not self.root.exists(), f"left in {self.root}: {[str(p) for p in self.root.rglob('*')]}"
        return status

    def kill_launcher(self) -> None:
        """kill -9 of `sluice up` itself."""
        self._process.kill()
        self._process.wait()

    # --- asking ---

    def post(self, path: str, body: object) -> httpx.Response:
        """POST of a JSON body."""
        return self._http.post(path, json=body)

    def post_raw(self, path: str, body: bytes) -> httpx.Response:
        """POST of bytes which say they are JSON."""
        return self._http.post(path, content=body, headers={"Content-Type": "application/json"})

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Events of a streamed answer, without the final [DONE], which must come. Closing it early disconnects."""
        with self._http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            done = False
            for line in response.iter_lines():
                assert not (done and line), f"an event after [DONE]: {line}"
                if line == "data: [DONE]":
                    done = True
                elif line:
                    yield json.loads(line.removeprefix("data: "))
            assert done, "the stream ended without [DONE]"

    def post_and_leave(self, path: str, body: object, after_s: float) -> None:
        """POST by a client that closes its connection before the answer comes."""
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(self.http_url + path, json=body, timeout=httpx.Timeout(30, read=after_s))
            raise ClusterError(f"the answer came within {after_s} s")

    def get(self, path: str) -> httpx.Response:
        """GET."""
        return self._http.get(path)

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, **fields: object) -> Completion:
        """Greedy completion of one prompt over POST /v1/completions (fields override); fails on any other status."""
        body = {
            "prompt": list(prompt) if not isinstance(prompt, str) else prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        response = self.post("/v1/completions", body)
        if response.status_code != 200:
            raise ClusterError(f"status {response.status_code}: {response.text}\n{self.diagnosis()}")
        answer = response.json()
        choice = answer["choices"][0]
        return Completion(choice["token_ids"], choice["text"], choice["finish_reason"], answer)

    def complete_all(
        self, prompts: Sequence[Sequence[int] | str], max_tokens: int, **fields: object
    ) -> list[Completion]:
        """All prompts at the same time, one thread each."""
        answers: list[Completion | BaseException | None] = [None] * len(prompts)

        def ask(index: int) -> None:
            try:
                answers[index] = self.complete(prompts[index], max_tokens, **fields)
            except BaseException as error:
                answers[index] = error

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            if not isinstance(answer, Completion):
                raise ClusterError(f"a completion failed: {answer}")
        return [answer for answer in answers if isinstance(answer, Completion)]

    def generate(self, prompt: Sequence[int], max_tokens: int, request_id: str = "") -> list[int]:
        """Greedy completion of one prompt over gRPC, under an id of the caller's choice."""
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        tokens = client_pb2.TokenIds(ids=prompt)
        request = client_pb2.GenerateRequest(tokens=tokens, sampling=sampling, request_id=request_id)
        return [token.id for response in self._grpc.generate(request) for token in response.tokens]

    # --- looking inside ---

    def status(self) -> client_pb2.GetStatusResponse:
        """GetStatus of the meta server."""
        return self._grpc.status()

    def worker(self, worker_id: str) -> client_pb2.WorkerState:
        """One worker's part of the status."""
        for worker in self.status().workers:
            if worker.info.worker_id == worker_id:
                return worker
        raise ClusterError(f"no worker {worker_id}\n{self.diagnosis()}")

    def pid_of(self, worker_id: str) -> int:
        """Process id of a worker, for example "decode-0/dp0/tp0"."""
        return self.worker(worker_id).info.pid

    def counters(self) -> list[hostcann.DeviceCounters]:
        """What the emulated driver counted, per device."""
        return hostcann.counters(str(self.root))

    def used_pools(self) -> list[str]:
        """Every pool of every live process that is not empty."""
        status = self.status()
        owners = [(w.info.worker_id, w.status.pools) for w in status.workers if w.health != "lost"]
        pools = [(owner, pool) for owner, pools in [*owners, ("deployment", status.pools)] for pool in pools]
        busy = [f"{owner} {pool.name} {pool.used}/{pool.total}" for owner, pool in pools if pool.used]
        return busy + ([f"{status.requests_in_flight} requests in flight"] if status.requests_in_flight else [])

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Waits until every pool reports zero used, in a heartbeat that is younger than this call."""
        called = time.monotonic()

        def heard_since() -> bool:
            age = time.monotonic() - called
            return all(w.heartbeat_age_seconds < age for w in self.status().workers if w.health != "lost")

        self.wait_for(heard_since, timeout_s, lambda: "a worker sends no heartbeats")
        self.wait_for(lambda: not self.used_pools(), timeout_s, lambda: f"pools not empty: {self.used_pools()}")

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str]) -> None:
        """Polls until `condition` holds; fails with `explain()` when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"{explain()}\n{self.diagnosis()}")
            time.sleep(0.05)

    def kill(self, worker_id: str) -> None:
        """kill -9 of one worker process."""
        os.kill(self.pid_of(worker_id), signal.SIGKILL)

    def children(self) -> list[psutil.Process]:
        """Every process below `sluice up`, as they are now."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def process_of(self, module: str) -> psutil.Process:
        """The process that runs a Python module, for example "meta_server.main"."""
        self.processes = psutil.Process(self._process.pid).children(recursive=True)
        return next(process for process in self.processes if module in process.cmdline())

    def said(self, text: str) -> bool:
        """Whether `sluice up` printed a line with `text`."""
        return any(text in line for line in self._output)

    @property
    def output(self) -> list[str]:
        """The lines that `sluice up` has printed so far."""
        return list(self._output)

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs; gone when the cluster is."""
        return Path(self._folder.name, "logs")

    def diagnosis(self) -> str:
        """The launcher's output and the end of every log."""
        parts = ["--- sluice up ---", *self._output[-60:]]
        for log in sorted(self.logs.glob("*.log")):
            parts += [f"--- {log.name} ---", *log.read_text(errors="replace").splitlines()[-40:]]
        return "\n".join(parts)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output.append(line.rstrip("\n"))
            if line.startswith("sluice ready "):
                _, _, self.http_url, grpc_url = line.split()
                self.grpc_address = grpc_url.rpartition("//")[2]
                self._ready.set()


def _runs(process: psutil.Process) -> bool:
    """A process that has ended and that nobody has asked for its status does not run."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
