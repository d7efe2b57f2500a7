"""What a worker's error means to a request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from meta_server.channels import WorkerChannels
from meta_server.errors import FailureKind
from meta_server.worker_failure import explain


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", FailureKind.UNAVAILABLE),
        (grpc.StatusCode.INTERNAL, "a defect", FailureKind.INTERNAL),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "256 are waiting", FailureKind.BUSY),
        (grpc.StatusCode.INVALID_ARGUMENT, "too long", FailureKind.INVALID),
    ],
)
def test_a_call_that_ends_while_it_is_written_to_is_no_defect(
    code: grpc.StatusCode, details: str, kind: FailureKind
) -> None:
    """The request may run elsewhere then; a worker's own errors keep their meaning."""
    worker: Any = SimpleNamespace(info=SimpleNamespace(worker_id="decode-0/dp0/tp0"))
    failure = asyncio.run(explain(WorkerChannels(), worker, "decode", code, details)).failure
    assert failure.kind is kind
    assert failure.message.startswith("decode worker decode-0/dp0/tp0 ")
