"""Free TCP ports for the fields of ``sluice.yaml`` that are 0."""

from __future__ import annotations

import random
import socket

from engine.config import ConfigError

_LOW, _HIGH = 15000, 32000
"""Below the range from which Linux takes the ports of outgoing connections, so that none steals a chosen port."""


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on `host`:`port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def can_connect(host: str, port: int) -> bool:
    """Whether somebody listens on `host`:`port`."""
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


class PortChooser:
    """Gives out ports of this machine, none of them twice."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._random = random.SystemRandom()

    def choose(self, field: str, host: str, wanted: int) -> int:
        """`wanted` if it is not 0, else a free port. Raises ConfigError naming `field` if `wanted` is in use."""
        if wanted:
            if wanted in self._taken or not is_free(host, wanted):
                raise ConfigError(f"{field} = {wanted}: already in use on {host}; choose another, or 0 for a free one")
            self._taken.add(wanted)
            return wanted
        for _ in range(1000):
            port = self._random.randrange(_LOW, _HIGH)
            if port not in self._taken and is_free(host, port):
                self._taken.add(port)
                return port
        raise ConfigError(f"{field} = 0: found no free port on {host} between {_LOW} and {_HIGH}")
