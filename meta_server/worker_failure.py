"""What to tell a client when a worker ended its request with an error."""

from __future__ import annotations

import grpc

from meta_server.channels import WorkerChannels
from meta_server.errors import Failure, FailureKind, RequestFailed
from meta_server.registry import Worker

_ENDED_WHILE_SENDING = "Internal error from Core"
"""What grpc.aio says, as INTERNAL, when a call ends while a message is being sent; how it ended is then not told."""


async def explain(
    channels: WorkerChannels, worker: Worker, role: str, code: grpc.StatusCode, details: str
) -> RequestFailed:
    """The failure for status `code` of a "prefill" or "decode" worker; its text names the worker and the cause.

    A worker whose connection is down becomes suspect: nothing new is sent to it until its next heartbeat.
    """
    kind = FailureKind.from_worker(code)
    name = f"{role} worker {worker.info.worker_id}"
    if code is grpc.StatusCode.INTERNAL and details == _ENDED_WHILE_SENDING:
        return RequestFailed(Failure(FailureKind.UNAVAILABLE, f"{name} ended the call while it was being written to"))
    if code is grpc.StatusCode.UNAVAILABLE and await channels.is_broken(worker):
        worker.suspect = True
        return RequestFailed(Failure(kind, f"{name} was lost: the connection broke ({details})"))
    verb = "refused the request" if kind in (FailureKind.INVALID, FailureKind.BUSY) else "failed"
    return RequestFailed(Failure(kind, f"{name} {verb}: {details or code.name}"))
