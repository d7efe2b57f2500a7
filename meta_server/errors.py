"""Why a request was not served, in one type that gRPC and HTTP both translate."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import grpc


class FailureKind(enum.Enum):
    """The cause in terms of who has to act; fixes the gRPC code, the HTTP status and the OpenAI error type."""

    INVALID = (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error")
    UNKNOWN_MODEL = (grpc.StatusCode.NOT_FOUND, 404, "not_found_error")
    BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error")
    UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error")
    DEADLINE = (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error")
    INTERNAL = (grpc.StatusCode.INTERNAL, 500, "internal_error")

    @property
    def grpc_code(self) -> grpc.StatusCode:
        return self.value[0]

    @property
    def http_status(self) -> int:
        return self.value[1]

    @property
    def openai_type(self) -> str:
        return self.value[2]

    @classmethod
    def from_worker(cls, code: grpc.StatusCode) -> FailureKind:
        """What a worker's status code means to the client; UNAVAILABLE unless the code says more."""
        return _FROM_WORKER.get(code, cls.UNAVAILABLE)


_FROM_WORKER = {
    grpc.StatusCode.INVALID_ARGUMENT: FailureKind.INVALID,
    grpc.StatusCode.RESOURCE_EXHAUSTED: FailureKind.BUSY,
    grpc.StatusCode.DEADLINE_EXCEEDED: FailureKind.DEADLINE,
    grpc.StatusCode.INTERNAL: FailureKind.INTERNAL,
    grpc.StatusCode.UNKNOWN: FailureKind.INTERNAL,
}


@dataclass(frozen=True)
class Failure:
    """`message` is for the user: what was wrong, where and what is legal. `param` is the field at fault, if one is."""

    kind: FailureKind
    message: str
    param: str | None = None


class RequestFailed(Exception):
    """Carries a `Failure` to whoever answers the client."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid(param: str, message: str) -> RequestFailed:
    """The client's field `param` cannot be used; the text starts with the field's name."""
    return RequestFailed(Failure(FailureKind.INVALID, f"{param}: {message}", param))


def unavailable(message: str) -> RequestFailed:
    return RequestFailed(Failure(FailureKind.UNAVAILABLE, message))


def shown(value: object, limit: int = 80) -> str:
    """`value` for an error text: ASCII (a lone surrogate of a client cannot be encoded), cut at `limit` characters."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
