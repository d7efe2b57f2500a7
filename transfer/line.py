"""Messages between two processes of one machine, with deadlines."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("=Q")
_AT_ONCE = 1 << 16


class Line:
    """One end of a connection. A message is any object that can be pickled; both ends must trust each other.

    Each end is used by one thread at a time, which waits for an answer before it sends again. After an error the line
    is of no use any more.
    """

    __slots__ = ("_socket",)

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @staticmethod
    def pair() -> tuple[Line, Line]:
        """Both ends of a new one. Raises OSError."""
        ours, theirs = socket.socketpair()
        return Line(ours), Line(theirs)

    @staticmethod
    def inherited(descriptor: int) -> Line:
        """The end that the parent process has left open."""
        return Line(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object, *, until: float | None = None) -> None:
        """Raises TimeoutError at `until` (monotonic seconds), and OSError when the other end is closed."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._limit(until)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, *, until: float | None = None) -> Any:
        """The next message. Raises TimeoutError at `until` (monotonic seconds), EOFError and OSError when the other end
        is closed, and OSError when it sent something else.
        """
        data = bytearray(self._some(until))
        while len(data) < _LENGTH.size:
            data += self._some(until)
        (length,) = _LENGTH.unpack_from(data)
        while len(data) < _LENGTH.size + length:
            data += self._some(until)
        try:
            return pickle.loads(memoryview(data)[_LENGTH.size :])
        except Exception as error:
            raise OSError(f"what the other end sent is no message: {error}") from error

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _some(self, until: float | None) -> bytes:
        self._limit(until)
        if data := self._socket.recv(_AT_ONCE):
            return data
        raise EOFError("the other end of the line is closed")

    def _limit(self, until: float | None) -> None:
        if until is None:
            self._socket.settimeout(None)
        elif (seconds := until - time.monotonic()) > 0:
            self._socket.settimeout(seconds)
        else:
            raise TimeoutError("the time for this message is over")
