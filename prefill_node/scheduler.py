"""Which prompts are computed in the next step. Pure: no torch, no clock, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv_cache import KVCacheManager, Usage
from prefill_node.outcome import FailureKind
from prefill_node.steps import Chunk, StepPlan

MAIN, INDEXER = "main", "indexer"  # cache types whose blocks a chunk writes; there may be others


class Refused(Exception):
    """The request was not taken; nothing is held for it."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Limits:
    block_size: int  # tokens
    max_tokens_per_step: int
    max_requests: int  # running together
    max_waiting: int
    max_prompt_tokens: int


@dataclass(frozen=True)
class PrefillJob:
    """A prompt to compute. Times are seconds of the caller's monotonic clock."""

    request_id: str
    prompt: tuple[int, ...]
    deadline: float  # the request's end, whatever it is doing
    start_by: float  # it must run by then: its destination is not reserved for longer
    resumed: bool = False  # it goes on with an interrupted request, ahead of new ones


@dataclass
class _Entry:
    job: PrefillJob
    routed: bool = False
    computed: int = 0  # leading prompt tokens whose KV is written
    blocks: dict[str, list[int]] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        return len(self.job.prompt) - self.computed


def share_budget(remaining: Sequence[int], budget: int, block_size: int) -> list[int]:
    """Tokens each request computes in a step of at most `budget` tokens, in the order given.

    Everyone gets an equal share first, so a long prompt cannot hold up the short ones behind it; what the shares leave
    over goes to the first ones. A share that does not end the prompt is a multiple of `block_size`.
    """
    if not remaining:
        return []
    quantum = max(block_size, budget // len(remaining))
    shares = []
    left = budget
    for need in remaining:
        shares.append(_whole_blocks(need, min(quantum, left), block_size))
        left -= shares[-1]
    for index, need in enumerate(remaining):
        more = _whole_blocks(need, shares[index] + left, block_size)
        left -= more - shares[index]
        shares[index] = more
    return shares


def _whole_blocks(need: int, room: int, block_size: int) -> int:
    return need if need <= room else room // block_size * block_size


class PrefillScheduler:
    """Requests from arrival to the last chunk of their prompt.

    First come, first served into `running`, resumed requests before new ones, then fair shares of every step. A
    request holds blocks from the moment it runs until its last chunk is complete or it is cancelled; this class is the
    only one to free them.

    Invariants: all or nothing allocation (a request holds blocks for its whole prompt in every cache type, or none);
    accounting returns to zero; a request that could never run is refused at once; no state cannot be cancelled.
    """

    def __init__(self, cache: KVCacheManager, limits: Limits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting: dict[str, _Entry] = {}  # in order of arrival
        self._running: dict[str, _Entry] = {}  # in order of admission
        self._steps = 0

    @property
    def block_size(self) -> int:
        return self._limits.block_size

    def usage(self) -> dict[str, Usage]:
        """Blocks held and in all, by cache type."""
        return self._cache.usage()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self._running

    def submit(self, job: PrefillJob) -> None:
        """Queues a job; it runs only after `set_routed`. Raises Refused."""
        limits, tokens = self._limits, len(job.prompt)
        if job.request_id in self:
            raise Refused(FailureKind.DUPLICATE, f"request {job.request_id!r} is already being prefilled")
        if tokens > limits.max_prompt_tokens:
            raise Refused(
                FailureKind.TOO_LONG,
                f"request {job.request_id!r}: {tokens} prompt tokens, this prefill group takes at most "
                f"{limits.max_prompt_tokens}",
            )
        if not self._cache.can_ever_allocate(tokens):
            held = ", ".join(f"{name}: {usage.total}" for name, usage in self._cache.usage().items())
            raise Refused(
                FailureKind.TOO_LONG,
                f"request {job.request_id!r}: {tokens} prompt tokens need {-(-tokens // limits.block_size)} blocks, "
                f"this prefill group has {held}",
            )
        if len(self._waiting) >= limits.max_waiting and not job.resumed:
            raise Refused(
                FailureKind.QUEUE_FULL,
                f"request {job.request_id!r}: {limits.max_waiting} requests are waiting already (prefill.max_waiting)",
            )
        self._waiting[job.request_id] = _Entry(job)
        if job.resumed:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: not item[1].job.resumed))

    def set_routed(self, request_id: str) -> None:
        """Every rank can reach the request's destination: it may run. No effect on a request that is gone."""
        if entry := self._waiting.get(request_id):
            entry.routed = True

    def cancel(self, request_id: str) -> bool:
        """Forgets the request, in any state, and frees what it holds; False if it is not here (any more)."""
        found = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        self._cache.free(request_id)
        return found is not None

    def expire(self, now: float) -> dict[str, str]:
        """Cancels what is past its deadline; returns each one's id and what it was waiting for."""
        late = {}
        for request_id, entry in self._waiting.items():
            if now >= min(entry.job.deadline, entry.job.start_by):
                behind = "for its turn" if entry.routed else "for the routes to its destination"
                late[request_id] = f"request {request_id!r} waited too long {behind}, its destination lapsed"
        for request_id, entry in self._running.items():
            if now >= entry.job.deadline:
                late[request_id] = (
                    f"request {request_id!r} ran out of time after {entry.computed} of {len(entry.job.prompt)} tokens"
                )
        for request_id in late:
            self.cancel(request_id)
        return late

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run. Call `complete` before the next `schedule`."""
        self._admit()
        chunks = self._cut_chunks()
        if not chunks:
            return None
        self._steps += 1
        return StepPlan(self._steps, chunks)

    def complete(self, plan: StepPlan) -> list[str]:
        """The step has been computed: advances its requests, frees those whose prompt ended and returns their ids.

        A request cancelled in between stays forgotten.
        """
        ended = []
        for chunk in plan.chunks:
            entry = self._running.get(chunk.request_id)
            if entry is None:
                continue
            entry.computed = chunk.end
            if chunk.is_last:
                ended.append(chunk.request_id)
                self.cancel(chunk.request_id)
        return ended

    def _admit(self) -> None:
        """Phase 1: move requests into `running`, in order of arrival, while blocks and places last.

        A request whose routes are still being opened lets others pass; one that waits for blocks does not, so that long
        prompts are not overtaken for ever.
        """
        for request_id, entry in [item for item in self._waiting.items() if item[1].routed]:
            tokens = len(entry.job.prompt)
            if len(self._running) >= self._limits.max_requests or not self._cache.can_allocate(request_id, tokens):
                return
            self._cache.allocate(request_id, tokens)
            entry.blocks = self._cache.blocks(request_id)
            self._running[request_id] = self._waiting.pop(request_id)

    def _cut_chunks(self) -> tuple[Chunk, ...]:
        """Phase 2: share the step's token budget among the running requests."""
        entries = list(self._running.values())
        shares = share_budget([e.remaining for e in entries], self._limits.max_tokens_per_step, self._limits.block_size)
        return tuple(self._chunk(entry, share) for entry, share in zip(entries, shares, strict=True) if share)

    def _chunk(self, entry: _Entry, tokens: int) -> Chunk:
        job, start = entry.job, entry.computed
        end = start + tokens
        return Chunk(
            request_id=job.request_id,
            start=start,
            tokens=job.prompt[start:end],
            prompt_tokens=len(job.prompt),
            main_blocks=tuple(entry.blocks[MAIN]),
            indexer_blocks=tuple(entry.blocks[INDEXER]),
            next_token=job.prompt[end] if end < len(job.prompt) else None,
        )
