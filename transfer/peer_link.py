"""Is the peer still there? Asked before each call into a wheel that would wait minutes for one that is gone."""

from __future__ import annotations

import os
import select
import socket
import stat
from dataclasses import dataclass

_DOWN = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerUnreachable(OSError):
    """Nobody accepts connections at the peer's address."""


def dial(host: str, port: int, timeout_s: float) -> None:
    """Connect and hang up; raises PeerUnreachable. The peer may log that a connection brought no request."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise PeerUnreachable(f"nobody answers at {host}:{port}: {error}") from error


@dataclass(frozen=True, slots=True)
class PeerLink:
    """The TCP connection that a wheel of this process holds to a peer, watched without touching it.

    The kernel closes it when the peer dies, before anybody has to time out.
    """

    fd: int
    inode: int

    @classmethod
    def find(cls, host: str, port: int) -> PeerLink | None:
        """The open connection to that address; None if this process has none."""
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if (inode := _socket_inode(fd)) is not None and _peer_of(fd) in {(address, port) for address in addresses}:
                return cls(fd, inode)
        return None

    def is_up(self) -> bool:
        """False once either side has closed it."""
        if _socket_inode(self.fd) != self.inode:
            return False  # closed here; the number may be another file by now
        poll = select.poll()
        poll.register(self.fd, select.POLLRDHUP)
        return not any(events & _DOWN for _, events in poll.poll(0))


def _socket_inode(fd: int) -> int | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _peer_of(fd: int) -> tuple[str, int] | None:
    """Address and port at the other end of a connected TCP socket."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            peer = copy.getpeername()
    except OSError:
        return None
    return (peer[0], peer[1]) if isinstance(peer, tuple) else None
