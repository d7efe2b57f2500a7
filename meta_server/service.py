"""The meta server's gRPC services."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import grpc
from sluice.v1 import client_pb2, client_pb2_grpc, common_pb2, registry_pb2, registry_pb2_grpc

from meta_server.answers import Answers
from meta_server.compatibility import RegistrationRefused
from meta_server.errors import RequestFailed
from meta_server.frontend import Frontend
from meta_server.registry import Registry
from meta_server.request import Done, GenerationRequest
from meta_server.validation import SamplingFields, check_request_id

log = logging.getLogger(__name__)
SLUICE_SERVICE = "sluice.v1.SluiceService"
REGISTRY_SERVICE = "sluice.v1.RegistryService"


class SluiceService(client_pb2_grpc.SluiceServiceServicer):
    """Generation and status, for clients."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def Generate(
        self,
        request: client_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[client_pb2.GenerateRequest, client_pb2.GenerateResponse],
    ) -> AsyncIterator[client_pb2.GenerateResponse]:
        try:
            prepared = await self._prepare(request)
        except RequestFailed as error:
            self._frontend.metrics.refused()
            await context.abort(error.failure.kind.grpc_code, error.failure.message)
        try:
            async with Answers(self._frontend, [prepared]) as answers:
                async for _, event in answers.events():
                    response = client_pb2.GenerateResponse(request_id=prepared.request_id, text=event.text)
                    if isinstance(event, Done):
                        response.finish_reason = event.reason
                        response.usage.CopyFrom(event.usage)
                    else:
                        response.tokens.extend(event.tokens)
                    yield response
        except RequestFailed as error:
            await context.abort(error.failure.kind.grpc_code, error.failure.message)

    async def GetStatus(self, request: client_pb2.GetStatusRequest, context: object) -> client_pb2.GetStatusResponse:
        return self._frontend.status()

    async def _prepare(self, request: client_pb2.GenerateRequest) -> GenerationRequest:
        validator = self._frontend.validator
        validator.check_model(request.model)
        if request.request_id:
            check_request_id(request.request_id)
        if request.WhichOneof("prompt") == "text":
            prompt = await validator.encode(request.text, "text")
        else:
            prompt = list(request.tokens.ids)
        return validator.request(
            prompt, sampling_fields(request.sampling), self._frontend.capacity(), request.request_id
        )


def sampling_fields(message: common_pb2.SamplingParams) -> SamplingFields:
    """The client's message, unchecked: zero means "off", except that `max_tokens` must be given."""
    return SamplingFields(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


class RegistryService(registry_pb2_grpc.RegistryServiceServicer):
    """Registration and heartbeats, for workers."""

    def __init__(self, registry: Registry, heartbeat_s: float) -> None:
        self._registry = registry
        self._heartbeat_ms = round(heartbeat_s * 1000)

    async def Register(
        self,
        request: registry_pb2.RegisterRequest,
        context: grpc.aio.ServicerContext[registry_pb2.RegisterRequest, registry_pb2.RegisterResponse],
    ) -> registry_pb2.RegisterResponse:
        info = request.info
        try:
            self._registry.register(info)
        except RegistrationRefused as refusal:
            log.warning("refused: %s", refusal)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
        log.info("registered %s at %s (epoch %s)", info.worker_id, info.grpc_address, info.epoch)
        return registry_pb2.RegisterResponse(heartbeat_interval_ms=self._heartbeat_ms)

    async def Heartbeat(
        self, request: registry_pb2.HeartbeatRequest, context: object
    ) -> registry_pb2.HeartbeatResponse:
        known = self._registry.heartbeat(request.worker_id, request.epoch, request.status)
        return registry_pb2.HeartbeatResponse(known=known)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: object) -> registry_pb2.LeaveResponse:
        self._registry.leave(request.worker_id, request.epoch)
        log.info("%s left", request.worker_id)
        return registry_pb2.LeaveResponse()
