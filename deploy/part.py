"""Some processes of a deployment on one machine, for a launcher that supervises no others.

Such a launcher may be killed at any time, as the actors of Ray are (deploy/ray_job_actor.py), and still leaves nothing
behind. The whole deployment on one machine is deploy/launcher.py's business.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.child import ChildSpec
from deploy.resolve import Run, written
from deploy.supervisor import StopPhase, Supervisor
from deploy.sweeper import Sweeper
from deploy.watch import Watch
from engine.config import ConfigError, SluiceConfig

_SWEEP_S = 5.0


class Part:
    """Started processes, each started again when it dies (deploy/watch.py).

    Main thread only: children end with the thread that starts them.
    """

    def __init__(self, config: SluiceConfig, name: str, processes: Callable[[Run], Sequence[ChildSpec]]) -> None:
        """Starts what `processes` says, without waiting for anything.

        `config` has no open port, and names the addresses of the servers and of this machine. The device root it
        names is shared by all parts on a machine. Raises ConfigError: the run folder cannot be used.
        """
        run_dir, temporary = _folder(config, name)
        device_root = Path(str(config.hostcann.root))
        self._events: list[str] = []
        self._sweeper = Sweeper(device_root, run_dir if temporary else None)
        self.run = written(config, run_dir, device_root)
        specs = processes(self.run)
        self._supervisor = Supervisor()
        self._watch = Watch(self.run, specs, self._supervisor, self._say)
        self._supervisor.start(specs)

    def look(self) -> list[str]:
        """Starts again what has died; returns what has happened since the last call. To be called often.

        Raises DeploymentLost when a meta server of this part is gone for good.
        """
        self._watch.look()
        events, self._events = self._events, []
        return events

    def stop(self, phases: Sequence[StopPhase]) -> list[str]:
        """Ends all processes and removes what they leave. Returns the names of those that had to be killed."""
        killed = self._supervisor.stop(phases)
        self._sweeper.close(_SWEEP_S)
        return killed

    def _say(self, text: str) -> None:
        self._events.append(text)
        self._sweeper.keep_run_dir()


def _folder(config: SluiceConfig, name: str) -> tuple[Path, bool]:
    """A folder of its own, short for the sockets in it, and whether it is a temporary one."""
    plain = name.replace("/", ".")
    if config.runtime.run_dir is None:
        return Path(tempfile.mkdtemp(prefix=f"sluice-{plain}-")), True
    path = Path(config.runtime.run_dir) / plain
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"runtime.run_dir = {config.runtime.run_dir!r}: {error.strerror}") from None
    return path, False
