"""A Ray head as users start it, and jobs on it by the command line they use."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from tests.cluster import REPOSITORY

DASHBOARD = "http://127.0.0.1:8265"
SMALL = {
    "http.port": 0,
    "grpc.port": 0,
    "prefill.max_tokens_per_step": 256,
    "decode.host_pool_bytes": "64MiB",
    "pool.dram_bytes": "64MiB",
    "hostcann.hbm_bytes": "256MiB",
}
"""A deployment that fits beside other work, without fixed ports."""

OBJECT_STORE_BYTES = 100_000_000
_MODULES = ("prefill_node.main", "decode_node.main", "meta_server.main", "transfer.mem_pool_service", "deploy.")
_READY = re.compile(r"^sluice ready (\S+) grpcs?://(\S+)$", re.MULTILINE)


class RayTestError(AssertionError):
    """Ray or a job did not do what the test relies on; the text carries the job's log."""


def environment() -> dict[str, str]:
    """Ray's commands and jobs run by this Python."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
    address = documented("export RAY_API_SERVER_ADDRESS").partition("=")[2]
    return {**own, "RAY_API_SERVER_ADDRESS": address, "OMP_NUM_THREADS": "1"}


def options(**fields: object) -> list[str]:
    """Fields of sluice.yaml over `SMALL`, for the job's command line; `__` stands for a dot."""
    chosen = SMALL | {name.replace("__", "."): value for name, value in fields.items()}
    return [part for name, value in chosen.items() for part in ("--set", f"{name}={value}")]


def documented(command: str) -> str:
    """The one line of docs/ray.md that begins so."""
    lines = (REPOSITORY / "docs" / "ray.md").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(command)]
    return line


def wait_for(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str]) -> None:
    """Polls until `condition` holds; fails with `explain()` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise RayTestError(explain())
        time.sleep(0.2)


def deployment_processes(*others: int) -> list[psutil.Process]:
    """Processes of deployments in this network namespace, and in those of the processes with the ids `others`."""
    ours = {os.readlink(f"/proc/{process}/ns/net") for process in ("self", *others)}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{process.pid}/ns/net") not in ours or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if any(argument.startswith(_MODULES) for argument in process.cmdline()):
                found.append(process)
    return found


def folders_of(processes: Sequence[psutil.Process]) -> set[Path]:
    """Device memory and run folders of workers."""
    folders = set()
    for process in processes:
        if root := process.environ().get("HOSTCANN_ROOT"):
            folders.add(Path(root))
        folders |= {Path(argument).parent for argument in process.cmdline() if argument.endswith("/sluice.yaml")}
    return folders


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """Signals the process that was started; what is left of it and its children after a while is killed."""
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(everything, timeout=20)
    for left in alive:
        left.kill()
    process.wait(20)


def sluice_ready(log: str) -> tuple[str, str] | None:
    """HTTP URL and gRPC address that a deployment has announced, the latest of them."""
    said = _READY.findall(log)
    return said[-1] if said else None


class RayHead:
    """`ray start --head`, ended by a signal to the process that was started, never by name."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        """`address` is the node's own."""
        self._address = address

    def __enter__(self) -> RayHead:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-t-", dir="/tmp"))
        with (self._folder / "head.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *shlex.split(documented("ray start --head")),
                    *(f"--node-ip-address={self._address}", f"--temp-dir={self._folder}"),
                ],
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_for(self._serves, 60, lambda: (self._folder / "head.log").read_text())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_with_children(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serves(self) -> bool:
        if self._process.poll() is not None:
            raise RayTestError((self._folder / "head.log").read_text())
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{DASHBOARD}/api/version", timeout=1).status_code == 200
        return False

    def submit(self, job: str, *more: str) -> None:
        """`ray job submit` as documented, under another name and with further arguments."""
        line = documented("ray job submit").replace("--submission-id sluice", f"--submission-id {job}")
        run(*shlex.split(line), *more)

    def log(self, job: str) -> str:
        """`ray job logs`."""
        return run(*documented("ray job logs").replace("sluice", job).split())

    def status(self, job: str) -> str:
        """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
        return str(httpx.get(f"{DASHBOARD}/api/jobs/{job}", timeout=10).json()["status"])

    def stop(self, job: str) -> None:
        """`ray job stop`."""
        run(*documented("ray job stop").replace("sluice", job).split())

    def wait_ready(self, job: str, timeout_s: float = 120) -> tuple[str, str]:
        """HTTP URL and gRPC address of the deployment, once its log shows them."""
        found: tuple[str, str] | None = None

        def ready() -> bool:
            nonlocal found
            found = sluice_ready(self.log(job))
            if found is None and self.status(job) in ("FAILED", "STOPPED", "SUCCEEDED"):
                raise RayTestError(self.log(job))
            return found is not None

        wait_for(ready, timeout_s, lambda: self.log(job))
        assert found is not None
        return found


@contextlib.contextmanager
def job_of(cluster: str, log: Path, *more: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """The job's documented command with further arguments, on the Ray cluster at an address, as Ray itself runs it.

    `variables` are those of the head's environment that matter.
    """
    command = [*shlex.split(documented("ray job submit").partition(" -- ")[2]), *more]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment() | {"RAY_ADDRESS": cluster, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_announced(log: Path) -> tuple[str, str]:
    """HTTP URL and gRPC address, once a log shows them."""
    wait_for(lambda: sluice_ready(log.read_text()) is not None, 120, log.read_text)
    found = sluice_ready(log.read_text())
    assert found is not None
    return found


def run(*command: str) -> str:
    """A command in the repository; its standard output. Fails if it fails."""
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RayTestError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
