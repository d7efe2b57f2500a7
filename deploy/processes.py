"""Which processes a deployment consists of, with their command lines and environment."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.child import ChildSpec
from deploy.resolve import Run
from transfer import hostcann

META_SERVER = "meta-server"
POOL_SERVICE = "memcache-meta"
_REAL_DRIVER = Path("/usr/local/Ascend/driver/version.info")


def pool_service(run: Run) -> ChildSpec:
    """MemCache's MetaService, which prefill workers connect to at start.

    It needs no driver, but has one lock file per host, which the emulation moves into the run's own folder.
    """
    host, pool = run.config.runtime.host, run.config.pool
    arguments = [
        *("--meta-url", f"tcp://{host}:{pool.meta_port}"),
        *("--config-store-url", f"tcp://{host}:{pool.config_port}"),
        *("--metrics-url", f"http://{host}:{pool.metrics_port}"),
        *("--log-dir", str(run.run_dir)),  # the wheel adds logs/ to it
    ]
    return _spec(run, POOL_SERVICE, ["transfer.mem_pool_service", *arguments], driver_environment(run))


def meta_server(run: Run) -> ChildSpec:
    return _spec(run, META_SERVER, ["meta_server.main", "--config", str(run.config_file)], {})


def workers(run: Run) -> list[ChildSpec]:
    """Prefill workers, then decode workers, in the order of their devices."""
    prefill, decode = run.config.prefill, run.config.decode
    specs = []
    for group in range(prefill.groups):
        for tp_rank in range(prefill.tp):
            arguments = ["--group", str(group), "--tp-rank", str(tp_rank), *_rendezvous(run, f"prefill-{group}")]
            specs.append(_worker(run, f"prefill-{group}/tp{tp_rank}", "prefill_node.main", arguments, prefill.threads))
    for group in range(decode.groups):
        for dp_rank in range(decode.dp):
            meeting = _rendezvous(run, f"decode-{group}.dp{dp_rank}")
            for tp_rank in range(decode.tp):
                name = f"decode-{group}/dp{dp_rank}/tp{tp_rank}"
                arguments = ["--group", str(group), "--dp-rank", str(dp_rank), "--tp-rank", str(tp_rank), *meeting]
                specs.append(_worker(run, name, "decode_node.main", arguments, decode.threads))
    return specs


def servers(run: Run) -> list[ChildSpec]:
    """What the workers need, in the order in which they start."""
    return [pool_service(run), meta_server(run)]


def everything(run: Run) -> list[ChildSpec]:
    """All processes, in the order in which they start."""
    return [*servers(run), *workers(run)]


def driver_environment(run: Run) -> dict[str, str]:
    """Variables by which a process finds the emulated driver; none where the machine has a real one."""
    if _REAL_DRIVER.exists():
        return {}
    emulated = run.config.hostcann
    devices = emulated.devices or run.config.worker_count
    return hostcann.environment(str(run.device_root), emulated.chip, devices, emulated.hbm_bytes)


def _rendezvous(run: Run, name: str) -> list[str]:
    return ["--rendezvous", f"file://{run.run_dir}/{name}.rendezvous"]


def _worker(run: Run, name: str, module: str, arguments: list[str], threads: int) -> ChildSpec:
    environment = {
        **driver_environment(run),
        "OMP_NUM_THREADS": str(threads),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    return _spec(run, name, [module, "--config", str(run.config_file), *arguments], environment)


def _spec(run: Run, name: str, module_and_arguments: list[str], environment: dict[str, str]) -> ChildSpec:
    argv = [sys.executable, "-m", *module_and_arguments]
    log = run.log_dir / f"{name.replace('/', '.')}.log"
    return ChildSpec(name, argv, {"PYTHONUNBUFFERED": "1", **environment}, log)
