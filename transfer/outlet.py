"""Where the owner of a wire socket hands its messages over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq

from transfer.wire import Body, encode


class Outlet:
    """Sends at once. Used by the thread that owns the sockets only."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` makes that thread call `flush` soon; it may be called by any thread."""
        self._wake = wake

    def send(self, socket: zmq.Socket[Any], body: Body, to: Sequence[bytes] = ()) -> None:
        """`to`: the frames in front of the message, on a ROUTER its receiver's identity.

        Raises WireError when the message is too large, zmq.ZMQError when the socket does not take it.
        """
        socket.send_multipart([*to, encode(body)], zmq.NOBLOCK)

    def flush(self) -> None:
        """Sends what was held back until now: nothing, here."""


OutletFactory: TypeAlias = Callable[[Callable[[], None]], Outlet]  # takes `wake`
