"""What TP rank 0 tells the other ranks, and what they report. Pickled over `engine.tp_channel`."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.events import Grown, Released, Reserved
from engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class StepRow:
    """One request's part of a step: compute `tokens` at `position` and behind it."""

    request_id: str
    row: int  # hot row
    generation: int
    tokens: tuple[int, ...]  # the newest one, and what was drafted behind it
    position: int  # of the newest one
    last_position: int  # behind which nothing needs computing: the request ends
    sampling: SamplingParams


@dataclass(frozen=True)
class Join:
    """First command: load, map the host pool found through this store, report your `RankEndpoint`."""

    host_pool_url: str


@dataclass(frozen=True)
class Turn:
    """One turn of the loop, on every rank alike: take in, let go, then compute one step for `step`."""

    reserved: tuple[Reserved, ...] = ()
    grown: tuple[Grown, ...] = ()
    released: tuple[Released, ...] = ()
    step: tuple[StepRow, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reserved or self.grown or self.released or self.step)


@dataclass(frozen=True)
class RankEndpoint:
    """Where a rank's puller listens, and which process it is."""

    address: str
    epoch: str


@dataclass(frozen=True)
class PullEnded:
    """A rank's pulls for a request are terminal; `error` is None when everything arrived."""

    request_id: str
    generation: int
    error: str | None


@dataclass(frozen=True)
class Quiescent:
    """After a release: no read into the request's blocks is in flight on this rank."""

    request_id: str
    generation: int


Report = RankEndpoint | PullEnded | Quiescent
