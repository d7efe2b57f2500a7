"""Which processes a deployment consists of, with their command lines and environment."""

from __future__ import annotations

import sys
from dataclasses import dataclass
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
    host, pool = run.config.pool_host, run.config.pool
    arguments = [
        *("--meta-url", f"tcp://{host}:{pool.meta_port}"),
        *("--config-store-url", f"tcp://{host}:{pool.config_port}"),
        *("--metrics-url", f"http://{host}:{pool.metrics_port}"),
        *("--log-dir", str(run.run_dir)),  # the wheel adds logs/ to it
    ]
    return _spec(run, POOL_SERVICE, ["transfer.mem_pool_service", *arguments], driver_environment(run))


def meta_server(run: Run) -> ChildSpec:
    return _spec(run, META_SERVER, ["meta_server.main", "--config", str(run.config_file)], {})


@dataclass(frozen=True)
class Room:
    """Where the workers of a group run: their devices and ports follow each other from these on."""

    device: int
    port: int

    def after(self, workers: int) -> Room:
        return Room(self.device + workers, self.port + workers if self.port else 0)

    @property
    def arguments(self) -> list[str]:
        return ["--device", str(self.device), "--grpc-port", str(self.port)]


def prefill_group(run: Run, group: int, room: Room) -> list[ChildSpec]:
    """Its workers, in the order of their devices; the first one leads."""
    section = run.config.prefill
    specs: list[ChildSpec] = []
    for tp_rank in range(section.tp):
        place = ["--group", str(group), "--tp-rank", str(tp_rank), *_rendezvous(run, f"prefill-{group}")]
        arguments = [*place, *room.after(tp_rank).arguments]
        specs.append(_worker(run, f"prefill-{group}/tp{tp_rank}", "prefill_node.main", arguments, section.threads))
    return specs


def decode_group(run: Run, group: int, room: Room) -> list[ChildSpec]:
    """Its workers, in the order of their devices; TP rank 0 of each DP rank leads."""
    specs: list[ChildSpec] = []
    for dp_rank in range(run.config.decode.dp):
        specs += decode_replica(run, group, dp_rank, room.after(len(specs)))
    return specs


def decode_replica(run: Run, group: int, dp_rank: int, room: Room) -> list[ChildSpec]:
    """The TP ranks of one DP rank, in the order of their devices; the first one leads."""
    section = run.config.decode
    specs: list[ChildSpec] = []
    meeting = _rendezvous(run, f"decode-{group}.dp{dp_rank}")
    for tp_rank in range(section.tp):
        place = ["--group", str(group), "--dp-rank", str(dp_rank), "--tp-rank", str(tp_rank), *meeting]
        arguments = [*place, *room.after(tp_rank).arguments]
        name = f"decode-{group}/dp{dp_rank}/tp{tp_rank}"
        specs.append(_worker(run, name, "decode_node.main", arguments, section.threads))
    return specs


def workers(run: Run) -> list[ChildSpec]:
    """Prefill workers, then decode workers, in the order of their devices."""
    specs: list[ChildSpec] = []
    room = Room(0, run.config.grpc.worker_port)
    for group in range(run.config.prefill.groups):
        specs += prefill_group(run, group, room.after(len(specs)))
    for group in range(run.config.decode.groups):
        specs += decode_group(run, group, room.after(len(specs)))
    return specs


def servers(run: Run) -> list[ChildSpec]:
    """What the workers need, in the order in which they start."""
    return [pool_service(run), meta_server(run)]


def everything(run: Run) -> list[ChildSpec]:
    """All processes, in the order in which they start."""
    return [*servers(run), *workers(run)]


def has_driver() -> bool:
    """Whether this machine has a real Ascend driver, so that none is emulated."""
    return _REAL_DRIVER.exists()


def driver_environment(run: Run) -> dict[str, str]:
    """Variables by which a process finds the emulated driver; none where the machine has a real one."""
    if has_driver():
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
    log = None if run.log_to_output else run.log_dir / f"{name.replace('/', '.')}.log"
    return ChildSpec(name, argv, {"PYTHONUNBUFFERED": "1", **environment}, log)
