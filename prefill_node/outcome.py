"""How a prefill ends, in the words its caller hears."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sampling import Sampled


class FailureKind(enum.Enum):
    TOO_LONG = "too long"  # can never run here
    DUPLICATE = "duplicate"  # its id is in use
    QUEUE_FULL = "queue full"
    EXPIRED = "expired"  # out of time
    LOST = "lost"  # destination or pool
    MODEL = "model"  # its logits cannot be sampled
    STOPPED = "stopped"  # this process ends


@dataclass(frozen=True)
class PrefillFailure:
    kind: FailureKind
    text: str


@dataclass(frozen=True)
class PrefillResult:
    first_token: Sampled
    queue_seconds: float  # arrival to first step
    compute_seconds: float  # first step to first token
    cached_tokens: int = 0  # prompt tokens whose KV came from the pool


Outcome = PrefillResult | PrefillFailure
