"""What to tell a client when a worker ended its request with an error."""

from __future__ import annotations

import grpc

from meta_server.channels import WorkerChannels
from meta_server.errors import Failure, FailureKind, RequestFailed
from meta_server.registry import Worker


async def explain(
    channels: WorkerChannels, worker: Worker, role: str, code: grpc.StatusCode, details: str
) -> RequestFailed:
    """The failure for status `code` of a "prefill" or "decode" worker; its text names the worker and the cause.

    A worker whose connection is down becomes suspect: nothing new is sent to it until its next heartbeat.
    """
    kind = FailureKind.from_worker(code)
    name = f"{role} worker {worker.info.worker_id}"
    if code is grpc.StatusCode.UNAVAILABLE and await channels.is_broken(worker):
        worker.suspect = True
        return RequestFailed(Failure(kind, f"{name} was lost: the connection broke ({details})"))
    verb = "refused the request" if kind in (FailureKind.INVALID, FailureKind.BUSY) else "failed"
    return RequestFailed(Failure(kind, f"{name} {verb}: {details or code.name}"))
