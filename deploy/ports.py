"""Free TCP ports for the fields of ``sluice.yaml`` that are 0."""

from __future__ import annotations

import socket

from engine.config import ConfigError
from engine.ports import NoFreePort, free_port, is_free


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

    def choose(self, field: str, host: str, wanted: int) -> int:
        """`wanted` if it is not 0, else a free port. Raises ConfigError naming `field` if there is none to give."""
        if wanted and (wanted in self._taken or not is_free(host, wanted)):
            raise ConfigError(f"{field} = {wanted}: already in use on {host}; choose another, or 0 for a free one")
        try:
            port = wanted or free_port(host, self._taken)
        except NoFreePort as error:
            raise ConfigError(f"{field} = 0: {error}") from None
        self._taken.add(port)
        return port
