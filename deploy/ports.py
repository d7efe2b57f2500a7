"""Free TCP ports for the fields of ``sluice.yaml`` that are 0."""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import ConfigError
from engine.ports import NoFreePort, bind_error, free_port

_LOOKUP_S = 10.0
_POLL_S = 0.05


def can_connect(host: str, port: int) -> bool:
    """Whether somebody listens on `host`:`port`."""
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


@dataclass(frozen=True)
class LocalHost:
    """`name`, as the field `field` has it, and the IPv4 address of this machine that it stands for."""

    field: str
    name: str
    address: str

    @classmethod
    def of(cls, field: str, name: str, pause: Callable[[float], None] = time.sleep) -> LocalHost:
        """Looks the name up, once, and asks `pause` meanwhile, which may raise.

        Raises ConfigError: it cannot be resolved, or is another machine's.
        """
        address = _looked_up(name, pause) if name else "0.0.0.0"
        if address is None:
            raise ConfigError(f"{field} = {name!r}: cannot be resolved to an IPv4 address")
        error = bind_error(address, 0)
        if error is not None and error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{field} = {name!r}: is not an address of this machine")
        return cls(field, name, address)


def _looked_up(name: str, pause: Callable[[float], None]) -> str | None:
    """None: there is no such name, or nobody who knows. Name servers that do not answer are waited for _LOOKUP_S."""
    found: queue.Queue[str | None] = queue.Queue()

    def look_up() -> None:
        try:
            found.put(socket.gethostbyname(name))
        except (OSError, UnicodeError):
            found.put(None)

    thread = threading.Thread(target=look_up, daemon=True)  # in C it cannot be interrupted, and is not waited for
    thread.start()
    deadline = time.monotonic() + _LOOKUP_S
    while found.empty() and time.monotonic() < deadline:
        pause(_POLL_S)
    return None if found.empty() else found.get()


class PortChooser:
    """Gives out ports of this machine, none of them twice."""

    def __init__(self) -> None:
        self._taken: dict[int, str] = {}  # the fields they were given to

    def choose(self, field: str, host: LocalHost, wanted: int) -> int:
        """`wanted` if it is not 0, else a free port. Raises ConfigError naming `field` if there is none to give."""
        if wanted and (problem := self._problem(host, wanted)):
            raise ConfigError(f"{field} = {wanted}: {problem}; choose another, or 0 for a free one")
        try:
            port = wanted or free_port(host.address, self._taken)
        except NoFreePort as error:
            raise ConfigError(f"{field} = 0: {error}") from None
        self._taken[port] = field
        return port

    def _problem(self, host: LocalHost, port: int) -> str | None:
        if port in self._taken:
            return f"same as {self._taken[port]}"
        error = bind_error(host.address, port)
        if error is None:
            return None
        if error.errno == errno.EADDRINUSE:
            return f"already in use on {host.name}"
        return f"cannot be listened on at {host.field} = {host.name!r}: {error.strerror}"
