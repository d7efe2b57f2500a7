"""What section `security` says, read and checked: what a process shows to others and asks of those who call it.

Every gRPC server, gRPC channel and HTTP server of a deployment is made with it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from engine.config import ConfigError
from engine.security_section import VARIABLE, SecuritySection
from engine.trust import Trust

_CLIENT_API = "/sluice.v1.SluiceService/"
_OPEN = ("/grpc.health.v1.", "/grpc.reflection.")
"""Tell nothing about requests; probes and tools ask them without a key."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]


@dataclass(frozen=True)
class Keys:
    """Keys of which a caller must show one."""

    values: tuple[str, ...] = field(repr=False)

    def refusal(self, authorization: str | None) -> str | None:
        """Why a caller with this `Authorization` header is refused; None if it is not. Takes the same time for every
        wrong key."""
        if not authorization:
            return "no key: send the header 'Authorization: Bearer KEY'"
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return "the header Authorization must be 'Bearer KEY'"
        shown = key.strip().encode("utf-8", "surrogateescape")
        right = [hmac.compare_digest(shown, value.encode()) for value in self.values]
        return None if any(right) else "the key in the header Authorization is not a valid one"


@dataclass(frozen=True)
class Credentials:
    """A process's certificate and key, what it trusts, and the keys it knows.

    Invariant: with keys, no call of a service of ours is served without one of them, over gRPC or HTTP
    (test_nothing_is_served_without_a_key). Clients' keys open nothing but the client API.
    """

    server: grpc.ServerCredentials | None
    clients: Keys | None
    workers: Keys | None
    as_worker: Trust

    @classmethod
    def of(cls, section: SecuritySection) -> Credentials:
        """Reads what `section` names.

        Raises ConfigError, naming the field and the file: cannot be read, is not what it should be, key and
        certificate do not belong together, callers would not accept the certificate (now: it may have expired).
        """
        if section.ca is not None and section.certificate is None:
            raise ConfigError("security.ca is given without security.certificate: callers would expect TLS")
        workers = _keys("worker_keys", section.worker_keys)
        trust = _trust(section, workers)
        server = None
        if section.certificate is not None and section.private_key is not None:
            pair = (_read("private_key", section.private_key), _read("certificate", section.certificate))
            _check_certificate(section)
            server = grpc.ssl_server_credentials([pair])
        return cls(server, _keys("api_keys", section.api_keys), workers, trust)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Adds a port to `server` and returns it. Raises RuntimeError when it is taken."""
        if self.server is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self.server)

    @property
    def interceptors(self) -> Sequence[Interceptor]:
        """For the constructor of a gRPC server."""
        return [KeyCheck(self)] if self.clients or self.workers else []


def check_called(section: SecuritySection, called: Mapping[str, str]) -> None:
    """Where callers look for the address they call, for want of `security.server_name`: does the certificate have it?

    `called` has each address by the field that names it. Raises ConfigError.
    """
    if section.certificate is None or section.server_name is not None:
        return
    for field_, address in called.items():
        if refusal := _refusal(section, address):
            raise ConfigError(
                f"security.certificate = {section.certificate!r}: callers of {field_} = {address!r} would refuse it: "
                f"{refusal}; name it in the certificate (subjectAltName), or give in security.server_name one that is"
            )


def client_trust(section: SecuritySection) -> Trust:
    """What a client of the deployment needs of `section`: the authority and an API key. Raises ConfigError."""
    return _trust(section, _keys("api_keys", section.api_keys))


class KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers UNAUTHENTICATED to calls without one of the keys that their service asks for."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        keys = self._credentials.clients if method.startswith(_CLIENT_API) else self._credentials.workers
        if keys is None or method.startswith(_OPEN):
            return await continuation(handler_call_details)
        shown = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        refusal = keys.refusal(shown if isinstance(shown, str) else None)
        return await continuation(handler_call_details) if refusal is None else _refusing(refusal)


def _refusing(reason: str) -> Handler:
    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.stream_stream_rpc_method_handler(refuse)  # serves calls of every kind, and reads nothing


def _read(name: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"security.{name} = {file!r}: cannot be read: {error.strerror}") from None


def _keys(name: str, source: str | None) -> Keys | None:
    """Keys are separated by white space: one per line of a file, or several in one variable."""
    if source is None:
        return None
    if source.startswith(VARIABLE):
        variable = source.removeprefix(VARIABLE)
        if (text := os.environ.get(variable)) is None:
            raise ConfigError(f"security.{name} = {source!r}: the variable {variable} is not set")
    else:
        text = _read(name, source).decode("utf-8", "replace")
    keys = tuple(text.split())
    if not keys:
        raise ConfigError(f"security.{name} = {source!r}: holds no key")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigError(f"security.{name} = {source!r}: a key may hold printable ASCII characters only")
    return Keys(keys)


def _trust(section: SecuritySection, keys: Keys | None) -> Trust:
    ca = None
    if section.ca is not None:
        ca = _read("ca", section.ca)
        _load_ca(section)
    return Trust(ca, section.server_name, keys.values[0] if keys else None)


def _load_ca(section: SecuritySection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(section.ca)
    except ssl.SSLError:
        raise ConfigError(f"security.ca = {section.ca!r}: holds no PEM certificate") from None
    return context


def _check_certificate(section: SecuritySection) -> None:
    """Raises ConfigError: certificate and key are not what they should be, or callers would refuse them."""
    if refusal := _refusal(section, section.server_name):
        raise ConfigError(
            f"security.certificate = {section.certificate!r}: callers would refuse it by security.ca: {refusal}"
        )


def _refusal(section: SecuritySection, name: str | None) -> str | None:
    """What a caller who looks for `name` (None: for any) says of the certificate: a hand-shake with ourselves, in
    memory. None if it accepts it. Raises ConfigError."""
    serving, calling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), _load_ca(section)
    calling.check_hostname = name is not None
    try:
        serving.load_cert_chain(str(section.certificate), section.private_key, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(_wrong_pair(section, error)) from None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = calling.wrap_bio(back, there, server_hostname=name)
    server = serving.wrap_bio(there, back, server_side=True)
    try:
        for side in (caller, server) * 2:  # a hand-shake is three messages long, from TLS 1.3 on
            _step(side)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    return None


def _wrong_pair(section: SecuritySection, error: ssl.SSLError) -> str:
    """Which of the two files cannot be used, and why."""
    certificate, key = f"security.certificate = {section.certificate!r}", str(section.private_key)
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"security.private_key = {key!r}: is not the key of {certificate}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(section.certificate)
    except ssl.SSLError:
        return f"{certificate}: holds no PEM certificate"
    if b"ENCRYPTED" in _read("private_key", key):
        return f"security.private_key = {key!r}: has a password; give one without (openssl pkey -in FILE -out FILE)"
    return f"security.private_key = {key!r}: holds no PEM key"


def _step(side: ssl.SSLObject) -> None:
    """As far as this side gets with what the other one has sent."""
    with contextlib.suppress(ssl.SSLWantReadError):
        side.do_handshake()
