"""TCP ports of this machine to listen on."""

from __future__ import annotations

import random
import socket
from collections.abc import Container

LOW, HIGH = 15000, 32000
"""Below the range from which Linux takes the ports of outgoing connections, so that none steals a chosen port."""

_TRIES = 1000


class NoFreePort(RuntimeError):
    """No port of the range could be listened on."""


def bind_error(host: str, port: int) -> OSError | None:
    """Why no server could listen on `host`:`port` (0: on any port) now; None if one could."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def free_port(host: str, taken: Container[int] = ()) -> int:
    """A port in LOW..HIGH on which nobody listens now, not one of `taken`. Raises NoFreePort."""
    chosen = random.SystemRandom()
    for _ in range(_TRIES):
        port = chosen.randrange(LOW, HIGH)
        if port not in taken and bind_error(host, port) is None:
            return port
    raise NoFreePort(f"found no free port on {host} between {LOW} and {HIGH}")
