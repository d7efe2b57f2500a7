"""What rank 0 of a prefill group tells its ranks, and what they report back. Plain data: pickled between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.v1 import worker_pb2

from engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Chunk:
    """The part of one prompt computed in one step.

    Invariants: `start` is a multiple of the block size, and so is `end` unless it ends the prompt; hence a block
    is written in exactly one step. `main_blocks` and `indexer_blocks` cover the whole prompt, in position order.
    """

    request_id: str
    start: int  # first position computed in this step
    tokens: tuple[int, ...]  # token ids of positions [start, end)
    prompt_tokens: int
    main_blocks: tuple[int, ...]
    indexer_blocks: tuple[int, ...]
    next_token: int | None = None  # of position `end`; None at the end of the prompt, where it is yet to be sampled
    keys: tuple[str, ...] = ()  # in the pool, of the full blocks up to `end`; empty = the pool is not used
    takes_prefix: bool = False  # positions [0, start) were not computed here: every layer gets them from the pool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with this chunk."""
        return self.end == self.prompt_tokens

    def written_blocks(self, block_size: int) -> range:
        """Indices, within the request, of the blocks this chunk writes."""
        return range(self.start // block_size, -(-self.end // block_size))

    def published_blocks(self, block_size: int) -> range:
        """Indices of the blocks decode gets in this step: the written ones, and a prefix from the pool."""
        written = self.written_blocks(block_size)
        return range(0 if self.takes_prefix else written.start, written.stop)


@dataclass(frozen=True)
class StepPlan:
    """One forward pass over several requests' chunks, packed in this order."""

    number: int  # ascending, from 1
    chunks: tuple[Chunk, ...]
    sampling: Mapping[str, SamplingParams] = field(default_factory=dict)  # of the requests whose prompt ends

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True)
class OpenRoute:
    """Open this rank's route to the request's destination; answered by `RouteOpened`."""

    request_id: str
    attempt: int  # tells a request from an earlier one of the same id
    destination: worker_pb2.Destination


@dataclass(frozen=True)
class Drop:
    """Forget these requests: nothing more is computed or sent for them."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class StartOver:
    """These requests begin again without the pool: give back what they hold there, keep their routes."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """End the process."""


Command = StepPlan | OpenRoute | Drop | StartOver | Stop


@dataclass(frozen=True)
class RouteOpened:
    request_id: str
    attempt: int
    error: str = ""  # empty = open


@dataclass(frozen=True)
class PrefixFound:
    """The pool holds the leading `blocks` blocks of the request's prompt; None: it does not answer."""

    request_id: str
    attempt: int
    blocks: int | None


@dataclass(frozen=True)
class StepDone:
    """The rank has run step `number`; `errors` (request id -> cause) are of requests that cannot go on.

    `pool_errors` are of requests whose rows the pool did not return: they can be computed without it.
    """

    number: int
    errors: Mapping[str, str] = field(default_factory=dict)
    pool_errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestErrors:
    """Errors found outside a step, for example a destination that was lost afterwards."""

    errors: Mapping[str, str]


Report = RouteOpened | PrefixFound | StepDone | RequestErrors
