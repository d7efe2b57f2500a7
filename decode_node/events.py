"""What the scheduler decides and others carry out: to the sessions (tokens, ends), to the ranks (reserve, release)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from decode_node.finish import FinishReason


class FailureKind(enum.Enum):
    """Why a request ended badly; the sessions translate it into a gRPC status."""

    INVALID = "invalid"  # it can never be served as it is
    DUPLICATE = "duplicate"  # a request with this id is still here
    QUEUE_FULL = "queue full"
    TRANSFER = "transfer"  # its KV did not arrive
    TIMEOUT = "timeout"  # a lease or its deadline ran out
    INTERNAL = "internal"  # its computation failed
    STOPPING = "stopping"  # this process is going away


@dataclass(frozen=True)
class Failure:
    """A bad end; `text` names the request and the cause, for the client to read."""

    kind: FailureKind
    text: str


class Refused(Exception):
    """The scheduler does not take the request; nothing was allocated."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@dataclass(frozen=True)
class GeneratedToken:
    """One token of an answer."""

    id: int
    logprob: float | None = None  # natural logarithm; None when not asked for
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True)
class Reserved:
    """Every region of the request is set aside; its KV may arrive."""

    request_id: str
    generation: int
    row: int  # hot row
    main_blocks: tuple[int, ...]
    indexer_blocks: tuple[int, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class Grown:
    """The request on hot row `row` got blocks for its next positions: its `start`-th block and the following."""

    request_id: str
    row: int
    start: int
    main_blocks: tuple[int, ...]
    indexer_blocks: tuple[int, ...]


@dataclass(frozen=True)
class Delivered:
    """`token` is the request's next one."""

    request_id: str
    token: GeneratedToken


@dataclass(frozen=True)
class Ended:
    """The last event of a request's session."""

    request_id: str
    outcome: FinishReason | Failure


@dataclass(frozen=True)
class Released:
    """Every rank shall stop reading into the request's blocks and confirm it when no read is in flight."""

    request_id: str
    generation: int


Event = Reserved | Grown | Delivered | Ended | Released
