"""The emulated Ascend driver, seen from outside: what a child process needs to run over it, and what it counted.

Nothing here loads the library. The layout of a root folder is described in src/process.h; the two structures below
mirror `struct hc_devices` and `struct hc_usage` there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transfer.build_folder import build_folder

DEFAULT_CHIP = "Ascend910_9382"
MAX_DEVICES = 64
COPY_KINDS = ("h2d", "d2h", "d2d", "peer")

_MAGIC = 0x314E4E4143545348
_HEADER = struct.Struct("<3Q")  # magic, devices, HBM bytes of each
_HEADER_BYTES = 128
_COUNTERS = struct.Struct("<10Q")  # peak, failures, bytes by copy kind, copies by kind
_COUNTERS_STRIDE = 128
_USAGE = struct.Struct("<2Q")  # bytes, allocations; one per device, then one for pinned host memory


class HostcannError(RuntimeError):
    """The emulated driver is not built, or a root folder cannot be used."""


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """What one emulated device holds (now, over all live processes) and did (since its root folder was made).

    Sizes are bytes; copy counts are numbers of descriptors. `peer` copies had one end in another process.
    """

    device: int
    hbm_bytes: int
    allocated_bytes: int
    allocations: int
    peak_bytes: int
    allocation_failures: int
    copied_bytes: dict[str, int]
    copies: dict[str, int]


def home() -> Path:
    """The built driver (its libraries lie in lib64); raises HostcannError when it has not been built."""
    folder = build_folder() / "hostcann"
    library = folder / "lib64" / "libhostcann.so"
    if not library.exists():
        raise HostcannError(f"the emulated Ascend driver is not built: {library} is missing; run `make setup`")
    return folder


def environment(root: str | os.PathLike[str], chip: str, devices: int, hbm_bytes: int) -> dict[str, str]:
    """The variables that make a child process run over hostcann; merge them into its environment.

    `root` is the cluster's own folder, on a tmpfs (below /dev/shm); `hbm_bytes` is the size of each device's memory.
    """
    if not 1 <= devices <= MAX_DEVICES:
        raise ValueError(f"devices: {devices} is not in 1..{MAX_DEVICES}")
    if hbm_bytes <= 0:
        raise ValueError(f"hbm_bytes: {hbm_bytes} is not positive")
    built = home()
    libraries = [str(built / "lib64"), os.environ.get("LD_LIBRARY_PATH", "")]
    preloads = [str(built / "lib64" / "libhostcann_preload.so"), os.environ.get("LD_PRELOAD", "")]
    return {
        "HOSTCANN_ROOT": os.fspath(root),
        "HOSTCANN_CHIP": chip,
        "HOSTCANN_DEVICES": str(devices),
        "HOSTCANN_HBM_BYTES": str(hbm_bytes),
        "ASCEND_HOME_PATH": str(built),
        "ASCEND_OPP_PATH": str(built / "opp"),
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "LD_PRELOAD": ":".join(filter(None, preloads)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def sweep(root: str | os.PathLike[str], *, keep: bool = False) -> int:
    """Remove what dead processes left below `root`, and `root` itself when nobody lives there; returns bytes freed.

    Call it before a cluster starts and after one has ended; with `keep`, which leaves `root`, at any time. It waits for
    processes that are just registering, and never touches a live process's memory.
    """
    folder = Path(root)
    if not folder.is_dir():
        return 0
    freed = 0
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        dead = [process for process in _processes(folder) if not _is_alive(process)]
        for process in dead:
            freed += _remove(process)
        if not keep and not any(_processes(folder)):
            for part in ("processes", "pool", "devices", "lock"):
                freed += _remove(folder / part)
            if not any(folder.iterdir()):
                folder.rmdir()
    return freed


def sweep_own_root() -> None:
    """`sweep`, with `keep`, of the root that this process runs over; nothing if it runs over a real driver."""
    if root := os.environ.get("HOSTCANN_ROOT"):
        sweep(root, keep=True)


def counters(root: str | os.PathLike[str]) -> list[DeviceCounters]:
    """The counters of every device below `root`; an empty list before the first process has registered there."""
    folder = Path(root)
    try:
        shared = (folder / "devices").read_bytes()
    except FileNotFoundError:
        return []
    magic, devices, hbm_bytes = _HEADER.unpack_from(shared)
    if magic != _MAGIC:
        raise HostcannError(f"{folder}/devices is not a hostcann counter file")
    live = [usage for process in _processes(folder) if (usage := _usage(process)) is not None]
    return [_device_counters(device, hbm_bytes, shared, live) for device in range(devices)]


def _device_counters(device: int, hbm_bytes: int, shared: bytes, live: list[bytes]) -> DeviceCounters:
    peak, failures, *by_kind = _COUNTERS.unpack_from(shared, _HEADER_BYTES + device * _COUNTERS_STRIDE)
    held = [_USAGE.unpack_from(usage, device * _USAGE.size) for usage in live]
    kinds = len(COPY_KINDS)
    return DeviceCounters(
        device=device,
        hbm_bytes=hbm_bytes,
        allocated_bytes=sum(size for size, _ in held),
        allocations=sum(count for _, count in held),
        peak_bytes=peak,
        allocation_failures=failures,
        copied_bytes=dict(zip(COPY_KINDS, by_kind[:kinds], strict=True)),
        copies=dict(zip(COPY_KINDS, by_kind[kinds:], strict=True)),
    )


def _processes(root: Path) -> Iterator[Path]:
    folder = root / "processes"
    if folder.is_dir():
        yield from sorted(folder.glob("p-*"))


def _is_alive(process: Path) -> bool:
    """A live process holds its lock; the check takes it shared, so that several may ask at once."""
    try:
        with open(process / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _usage(process: Path) -> bytes | None:
    """What a live process holds; None for a dead one."""
    if not _is_alive(process):
        return None
    try:
        content = (process / "usage").read_bytes()
    except FileNotFoundError:
        return None
    return content if len(content) >= (MAX_DEVICES + 1) * _USAGE.size else None


def _remove(path: Path) -> int:
    """Delete a file or a folder; returns the bytes it occupied."""
    if path.is_dir():
        freed = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
        return freed
    if not path.exists():
        return 0
    freed = path.stat().st_blocks * 512
    path.unlink()
    return freed
