"""Calls to a running deployment over its client API (gRPC), with errors meant for users."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from sluice.v1 import client_pb2, client_pb2_grpc

from engine.config import SluiceConfig
from engine.credentials import client_trust
from engine.trust import PLAIN, Trust

_MAX_MESSAGE = 64 << 20
_NOT_GRPC = ("Failed parsing HTTP/2", "missing selected ALPN")
"""In the details of a call to a server that answers, but in HTTP/1."""


class ClientError(Exception):
    """The deployment refused, failed, or cannot be reached; the text is for users."""


class Client:
    """One connection to a meta server. Every call has a deadline."""

    def __init__(self, address: str, trust: Trust = PLAIN) -> None:
        self.address = address
        self._trust = trust
        limits = [("grpc.max_receive_message_length", _MAX_MESSAGE), ("grpc.max_send_message_length", _MAX_MESSAGE)]
        self._channel = trust.channel(address, [*limits, ("grpc.enable_http_proxy", 0)])
        self._stub = client_pb2_grpc.SluiceServiceStub(self._channel)

    @classmethod
    def of(cls, config: SluiceConfig, address: str) -> Client:
        """A connection with the certificates and the key that section `security` names. Raises ConfigError."""
        return cls(address, client_trust(config.security))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def status(self, timeout_s: float = 10.0) -> client_pb2.GetStatusResponse:
        """A snapshot of the deployment. Raises ClientError."""
        try:
            request = client_pb2.GetStatusRequest()
            return self._stub.GetStatus(request, timeout=timeout_s, metadata=self._trust.metadata)
        except grpc.RpcError as error:
            raise self._explain(error) from None

    def generate(
        self, request: client_pb2.GenerateRequest, timeout_s: float = 600.0
    ) -> Iterator[client_pb2.GenerateResponse]:
        """Streams one completion; leaving the iterator early cancels the request. Raises ClientError."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._trust.metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._explain(error) from None
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def _explain(self, error: grpc.RpcError) -> ClientError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE and (failure := self._trust.failure(details)):
            return ClientError(f"no connection to {self.address}: {failure}")
        if code is grpc.StatusCode.UNAVAILABLE and any(mark in details for mark in _NOT_GRPC):
            return ClientError(f"what listens at {self.address} does not speak gRPC; is that the HTTP port?")
        if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
            return ClientError(f"no deployment answers at {self.address}; start one with: sluice up --config FILE")
        return ClientError(f"{code.name}: {details}")
