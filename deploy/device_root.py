"""The folder below which the emulated driver keeps device memory, and the removal of what dead deployments left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from transfer import hostcann

_OWNER = "owner.lock"


def default_parent() -> Path:
    """This user's folder in shared memory. Nothing outside it is ever touched."""
    return Path("/dev/shm") / f"sluice-{os.getuid()}"


class DeviceRoot:
    """One deployment's folder of device memory, owned by the launcher.

    Invariant: a root whose owner lock is held belongs to a live launcher and is never swept by another one. The lock
    ends with the launcher process however it dies, so a later start can tell what was left behind.
    """

    def __init__(self, path: Path) -> None:
        """Creates `path` and takes its lock. Raises BlockingIOError if another launcher holds it."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self._lock = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise
        hostcann.sweep(str(path))

    def close(self) -> None:
        """Removes the folder with what killed processes have left in it. No child may be running."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        if self.path.parent == default_parent():
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()  # works only when it is empty


def sweep_dead(parent: Path) -> list[Path]:
    """Removes the roots below `parent` whose launcher is dead and whose processes are gone. Returns them."""
    removed = []
    for root in sorted(parent.glob("*")) if parent.is_dir() else []:
        try:
            lock = os.open(root / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not a root, or being created
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hostcann.sweep(str(root))
            if [item.name for item in root.iterdir()] == [_OWNER]:
                shutil.rmtree(root)
                removed.append(root)
        except OSError:
            continue  # its launcher lives
        finally:
            os.close(lock)
    return removed
