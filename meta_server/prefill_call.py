"""The meta server's call of a prefill worker."""

from __future__ import annotations

import grpc
from sluice.v1 import worker_pb2, worker_pb2_grpc

from meta_server.channels import WorkerChannels
from meta_server.registry import Worker
from meta_server.request import GenerationRequest
from meta_server.worker_failure import explain


async def call_prefill(
    channels: WorkerChannels,
    worker: Worker,
    request: GenerationRequest,
    destination: worker_pb2.Destination,
    timeout_s: float,
) -> worker_pb2.PrefillResponse:
    """Runs the prompt towards `destination`; cancelling the task cancels the request on prefill.

    Raises:
        RequestFailed: naming the worker and the cause.
    """
    stub: worker_pb2_grpc.PrefillServiceAsyncStub = worker_pb2_grpc.PrefillServiceStub(channels.get(worker))
    message = worker_pb2.PrefillRequest(
        request_id=request.wire_id,
        prompt=request.prompt,
        sampling=request.sampling_message(),
        destination=destination,
        resumed=request.resumed,
    )
    try:
        return await stub.Prefill(message, timeout=timeout_s, metadata=channels.metadata)
    except grpc.aio.AioRpcError as error:
        raise await explain(channels, worker, "prefill", error.code(), error.details() or "") from None
