"""Signal handlers that stay ours while a library is at work that sets its own."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator

_SIGACTION_BYTES = 256  # more than the C library's struct sigaction on any Linux


@contextlib.contextmanager
def handlers_kept(*signals: signal.Signals) -> Iterator[None]:
    """On exit these signals have the handlers they had before, as the C library sees them; from any thread.

    Python's own `signal.signal` works in the main thread only. Raises OSError for a signal that has no handler.
    """
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    kept = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in signals}
    for number, action in kept.items():
        if sigaction(int(number), None, action):
            raise OSError(ctypes.get_errno(), f"the handler of {number.name} cannot be read")
    try:
        yield
    finally:
        for number, action in kept.items():
            sigaction(int(number), action, None)
