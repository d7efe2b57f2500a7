"""When the memory of a layer-buffer slot may be overwritten."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

log = logging.getLogger(__name__)


class Generations(Protocol):
    """What the gate needs of GenerationWords."""

    def bump(self, slot: int) -> int: ...


class Consumer(NamedTuple):
    """Somebody who still needs the contents of a slot: a pool save, or a decode rank's read of one batch."""

    kind: Literal["save", "read"]
    ident: int  # of a read: the batch's sequence number; of a save: any number the saver keeps unique


@dataclass(frozen=True, slots=True)
class GateFailure:
    """A consumer which did not get, or may not have got, what the slot held."""

    slot: int
    consumer: Consumer
    reason: str


class GateStuck(RuntimeError):
    """A pool save did not end even in its time of grace: the slot can never be reused, so the process must end."""


@dataclass(frozen=True, slots=True)
class GateCounters:
    waits: int = 0
    wait_seconds: float = 0.0
    fenced: int = 0  # reads given up: lease over, endpoint lost, request cancelled
    late: int = 0  # ends reported for a consumer that is not, or no longer, waited for
    bumps: int = 0  # generations changed


@dataclass(slots=True)
class _Use:
    deadline: float
    fenced: bool = False
    overdue: bool = False  # a save past its deadline, reported already


class ReuseGate:
    """Keeps every slot closed while a consumer of its contents may still read them.

    Invariants:

    * Reuse: ``wait`` returns only when each consumer added to the slot since the last ``wait`` has ended, or is a read
      that has been fenced.
    * Fencing: if a fenced read has not ended when ``wait`` returns, the slot's generation was changed before, so that
      the reader will notice. Fencing one reader does not disturb the others: the generation changes only when nobody
      valid is left.
    * No endless wait: a read is waited for until its deadline at the longest (then it is fenced), a save until its
      deadline plus ``save_grace_s``. A save reads memory of this process and cannot be fenced; when it misses its
      deadline it is reported as failed, but the slot stays closed until it really ends, and GateStuck is raised if it
      never does.

    Thread safe. Deadlines are ``time.monotonic()`` seconds.

    A gate that is not ``closes`` (``faults.reuse_gate_off``) keeps only the second invariant: it gives every consumer
    up at once. It is there to prove that tests notice what the gate prevents.
    """

    def __init__(self, num_slots: int, words: Generations, *, save_grace_s: float, closes: bool = True) -> None:
        self._closes = closes
        if not closes:
            log.critical("THE REUSE GATE IS OFF (faults.reuse_gate_off): layer buffers are overwritten while in use")
        self._words = words
        self._save_grace_s = save_grace_s
        self._changed = threading.Condition()
        self._uses: list[dict[Consumer, _Use]] = [{} for _ in range(num_slots)]
        self._failures: list[list[GateFailure]] = [[] for _ in range(num_slots)]
        self._waits = self._fenced = self._late = self._bumps = 0
        self._wait_seconds = 0.0

    def add(self, slot: int, consumer: Consumer, deadline: float) -> None:
        """From now on ``wait(slot)`` waits for this consumer. Raises ValueError if it is there already."""
        with self._changed:
            if consumer in self._uses[slot]:
                raise ValueError(f"slot {slot}: consumer {consumer.kind} {consumer.ident} was added twice")
            self._uses[slot][consumer] = _Use(deadline)

    def done(self, slot: int, consumer: Consumer, error: str | None = None) -> bool:
        """The consumer has ended and will not touch the slot again; an error is reported by the next ``wait``.

        False, and nothing but a count, when nobody waits for it any more: late, duplicate or unknown.
        """
        with self._changed:
            use = self._uses[slot].pop(consumer, None)
            if use is None or use.fenced:
                self._late += 1
                return False
            if error is not None and not use.overdue:
                self._fail(slot, consumer, error)
            if all(other.fenced for other in self._uses[slot].values()):  # else nobody's wait is over
                self._changed.notify_all()
            return True

    def fence(self, predicate: Callable[[Consumer], bool], reason: str) -> list[GateFailure]:
        """Stops waiting for the reads which match (saves cannot be fenced). The next ``wait`` reports them, too."""
        with self._changed:
            failures = [
                self._fence(slot, consumer, use, reason)
                for slot, uses in enumerate(self._uses)
                for consumer, use in uses.items()
                if consumer.kind == "read" and not use.fenced and predicate(consumer)
            ]
            self._changed.notify_all()
            return failures

    def wait(self, slot: int) -> list[GateFailure]:
        """Blocks until the slot may be overwritten; returns what failed since the last call.

        Raises GateStuck, see the class. Only one thread may wait for, add to and write into a slot.
        """
        started = time.monotonic()
        with self._changed:
            while self._closes and (wake := self._next_deadline(slot, time.monotonic())) is not None:
                self._changed.wait(max(0.0, wake - time.monotonic()))
            uses = self._uses[slot]
            if uses:  # given up, and perhaps copying at this moment
                self._words.bump(slot)
                self._bumps += 1
                uses.clear()
            failures, self._failures[slot] = self._failures[slot], []
            self._waits += 1
            self._wait_seconds += time.monotonic() - started
            return failures

    def is_open(self, slot: int) -> bool:
        """Whether `wait` would return at once; false also for a read that is about to be fenced."""
        with self._changed:
            return not self._closes or all(use.fenced for use in self._uses[slot].values())

    def idle(self) -> bool:
        """True when no slot has a consumer that is still waited for."""
        with self._changed:
            return all(use.fenced for uses in self._uses for use in uses.values())

    def counters(self) -> GateCounters:
        with self._changed:
            return GateCounters(self._waits, self._wait_seconds, self._fenced, self._late, self._bumps)

    def _next_deadline(self, slot: int, now: float) -> float | None:
        """When to look again at the slot's consumers; None when none is left to wait for."""
        wake: float | None = None
        for consumer, use in self._uses[slot].items():
            if use.fenced:
                continue
            until = use.deadline
            if now >= until and consumer.kind == "read":
                self._fence(slot, consumer, use, "the reader did not acknowledge before its lease ended")
                continue
            if now >= until:
                until += self._save_grace_s
                if now >= until:
                    raise GateStuck(
                        f"slot {slot}: pool save {consumer.ident} has not ended {now - use.deadline:.1f} s "
                        f"after its deadline; the slot cannot be reused"
                    )
                if not use.overdue:
                    use.overdue = True
                    self._fail(slot, consumer, "the pool save did not end before its deadline")
            wake = until if wake is None else min(wake, until)
        return wake

    def _fence(self, slot: int, consumer: Consumer, use: _Use, reason: str) -> GateFailure:
        use.fenced = True
        self._fenced += 1
        return self._fail(slot, consumer, reason)

    def _fail(self, slot: int, consumer: Consumer, reason: str) -> GateFailure:
        failure = GateFailure(slot, consumer, reason)
        self._failures[slot].append(failure)
        return failure
