"""Which batches of a source have been seen."""

from __future__ import annotations

_REMEMBERED = 4096


class Sequences:
    """Sequence numbers of one source's batches.

    Invariant, Read once: no number is new twice. A batch that has been answered must not be read again: prefill may
    have overwritten its buffer since without a new generation, as nobody seemed to need the old contents any more.
    Numbers may come in any order, but one that is more than 4096 numbers late counts as known.
    """

    def __init__(self) -> None:
        self._floor = 0  # this one and all below are known
        self._above: set[int] = set()

    def is_new(self, sequence: int) -> bool:
        """True the first time."""
        if sequence <= self._floor or sequence in self._above:
            return False
        self._above.add(sequence)
        if len(self._above) > _REMEMBERED:
            self._floor = sorted(self._above)[_REMEMBERED // 2]
            self._above = {known for known in self._above if known > self._floor}
        return True
