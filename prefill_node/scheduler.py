"""Which prompts are computed in the next step. Pure: no torch, no clock, no threads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    reloads: bool = False  # later chunks of a prompt need its earlier rows from the pool
    max_whole_tokens: int = 1 << 62  # longest prompt computed in one step when they do and there is no pool


@dataclass(frozen=True)
class PrefillJob:
    """A prompt to compute. Times are seconds of the caller's monotonic clock."""

    request_id: str
    prompt: tuple[int, ...]
    deadline: float  # the request's end, whatever it is doing
    start_by: float  # it must run by then: its destination is not reserved for longer
    resumed: bool = False  # it goes on with an interrupted request, ahead of new ones
    keys: tuple[str, ...] = ()  # in the pool, of its full blocks


@dataclass
class _Entry:
    job: PrefillJob
    routed: bool = False
    looked_up: bool | None = None  # None: nobody has asked the pool yet; False: asked, no answer yet
    computed: int = 0  # leading prompt tokens whose KV is written, here or in the pool
    cached: int = 0  # of them, those taken from the pool
    poolless: bool = False  # the pool is not used for it
    blocks: dict[str, list[int]] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return self.routed and self.looked_up is True

    @property
    def remaining(self) -> int:
        return len(self.job.prompt) - self.computed


class Need(NamedTuple):
    """What a request still has to compute."""

    tokens: int
    divisible: bool = True  # its later chunks can have the rows of its earlier ones


def share_budget(needs: Sequence[Need], budget: int, block_size: int) -> list[int]:
    """Tokens each request computes in a step of at most `budget` tokens, in the order given.

    Everyone gets an equal share first, so a long prompt cannot hold up the short ones behind it; what the shares leave
    over goes to the first ones. A share that does not end the prompt is a multiple of `block_size`. A request that
    cannot be divided gets all or nothing. The first one always gets something, even if that is more than the budget;
    it is then alone.
    """
    if not needs:
        return []
    if not needs[0].divisible and needs[0].tokens > budget:
        return [needs[0].tokens] + [0] * (len(needs) - 1)
    quantum = max(block_size, budget // len(needs))
    shares = []
    left = budget
    for need in needs:
        shares.append(_share(need, min(quantum, left) if need.divisible else left, block_size))
        left -= shares[-1]
    for index, need in enumerate(needs):
        more = _share(need, shares[index] + left, block_size)
        left -= more - shares[index]
        shares[index] = more
    return shares


def _share(need: Need, room: int, block_size: int) -> int:
    if need.tokens <= room:
        return need.tokens
    return room // block_size * block_size if need.divisible else 0


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
        """Queues a job; it runs only after `set_routed` and, if it has keys, `set_prefix`. Raises Refused."""
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
        self._waiting[job.request_id] = _Entry(job, looked_up=None if job.keys else True, poolless=not job.keys)
        if job.resumed:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: not item[1].job.resumed))

    def set_routed(self, request_id: str) -> None:
        """Every rank can reach the request's destination: it may run. No effect on a request that is gone."""
        if entry := self._waiting.get(request_id):
            entry.routed = True

    def to_look_up(self) -> list[PrefillJob]:
        """Requests which could run now and whose prompts nobody has looked up in the pool; each is told once."""
        places = self._limits.max_requests - len(self._running)
        first = [entry for entry in self._waiting.values() if entry.routed][: max(places, 0)]
        asked = [entry for entry in first if entry.looked_up is None]
        for entry in asked:
            entry.looked_up = False
        return [entry.job for entry in asked]

    def set_prefix(self, request_id: str, blocks: int | None) -> None:
        """The pool holds the leading `blocks` blocks of a request that waits; None: the pool does not answer.

        The last token is computed in any case, because it gives the first one of the answer. Only the first call for a
        request has an effect.
        """
        entry = self._waiting.get(request_id)
        if entry is None or entry.looked_up is not False:
            return
        entry.looked_up, size = True, self._limits.block_size
        entry.poolless = blocks is None
        entry.cached = entry.computed = min(blocks or 0, (len(entry.job.prompt) - 1) // size) * size

    def cached_tokens(self, request_id: str) -> int:
        """Prompt tokens taken from the pool instead of being computed."""
        entry = self._running.get(request_id)
        return entry.cached if entry else 0

    def start_over(self, request_id: str) -> bool:
        """Begins a running request again, now without the pool; False if that was done before, or it is not running."""
        entry = self._running.get(request_id)
        if entry is None or entry.poolless:
            return False
        entry.computed, entry.cached, entry.poolless = 0, 0, True
        return True

    def stranded(self) -> dict[str, str]:
        """Cancels running requests that can be computed neither in chunks nor at once; id and cause of each."""
        limits = self._limits
        longest = max(limits.max_whole_tokens, limits.max_tokens_per_step)
        causes = {
            request_id: f"request {request_id!r}: its {len(entry.job.prompt)} tokens need the pool, which does not "
            f"answer; without it a prompt may have {longest} (prefill.max_whole_tokens)"
            for request_id, entry in self._running.items()
            if self._needs_whole(entry) and entry.remaining > longest
        }
        for request_id in causes:
            self.cancel(request_id)
        return causes

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

    def complete(self, plan: StepPlan, started_over: Collection[str] = ()) -> list[str]:
        """The step has been computed: advances its requests, frees those whose prompt ended and returns their ids.

        A request cancelled in between stays forgotten, and one that has started over is not advanced.
        """
        ended = []
        for chunk in plan.chunks:
            entry = self._running.get(chunk.request_id)
            if entry is None or chunk.request_id in started_over:
                continue
            entry.computed = chunk.end
            if chunk.is_last:
                ended.append(chunk.request_id)
                self.cancel(chunk.request_id)
        return ended

    def _admit(self) -> None:
        """Phase 1: move requests into `running`, in order of arrival, while blocks and places last.

        A request whose routes or prefix are still unknown lets others pass; one that waits for blocks does not, so that
        long prompts are not overtaken for ever.
        """
        for request_id, entry in [item for item in self._waiting.items() if item[1].is_ready]:
            tokens = len(entry.job.prompt)
            if len(self._running) >= self._limits.max_requests or not self._cache.can_allocate(request_id, tokens):
                return
            self._cache.allocate(request_id, tokens)
            entry.blocks = self._cache.blocks(request_id)
            self._running[request_id] = self._waiting.pop(request_id)

    def _cut_chunks(self) -> tuple[Chunk, ...]:
        """Phase 2: share the step's token budget among the running requests, in order of admission.

        So the oldest always advances, and everyone becomes the oldest: nobody starves.
        """
        entries = list(self._running.values())
        needs = [Need(entry.remaining, not self._needs_whole(entry)) for entry in entries]
        shares = share_budget(needs, self._limits.max_tokens_per_step, self._limits.block_size)
        return tuple(self._chunk(entry, share) for entry, share in zip(entries, shares, strict=True) if share)

    def _needs_whole(self, entry: _Entry) -> bool:
        """Whether its rows would be lost between chunks."""
        return self._limits.reloads and entry.poolless

    def _chunk(self, entry: _Entry, tokens: int) -> Chunk:
        job, start = entry.job, entry.computed
        end = start + tokens
        keys = () if entry.poolless else job.keys[: end // self._limits.block_size]
        return Chunk(
            request_id=job.request_id,
            start=start,
            tokens=job.prompt[start:end],
            prompt_tokens=len(job.prompt),
            main_blocks=tuple(entry.blocks[MAIN]),
            indexer_blocks=tuple(entry.blocks[INDEXER]),
            next_token=job.prompt[end] if end < len(job.prompt) else None,
            keys=keys,
            takes_prefix=0 < start == entry.cached,
        )
