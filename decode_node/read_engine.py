"""What the reader of batches needs of a transfer engine."""

from __future__ import annotations

from typing import Protocol

from transfer.memfabric import Copies, Meanwhile


class ReadStats(Protocol):
    """What one engine read did."""

    @property
    def bytes(self) -> int: ...
    @property
    def descriptors_before(self) -> int: ...
    @property
    def descriptors_after(self) -> int: ...


class ReadEngine(Protocol):
    """What the puller needs of MemFabricEngine."""

    def read(
        self,
        session_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        then: Copies | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> ReadStats:
        """Raises when not all bytes have arrived within ``deadline_s`` seconds.

        ``then``: what is read when all of the former has arrived; not in the statistics. ``meanwhile``: what this
        thread does while bytes move.
        """
        ...

    def idle(self, session_id: str) -> bool:
        """False while a read given up at its deadline may still write into local memory."""
        ...

    def forget(self, session_id: str) -> None:
        """The next read of this session opens a new link; one that missed a deadline refuses all reads until then."""
        ...
