"""How a process calls others over gRPC: in the clear or with TLS, and with which key. Light, for probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True)
class Trust:
    """By which certificates (PEM) a caller knows a server, and the key it shows.

    Without `ca` connections are in the clear. `server_name` is looked for in the server's certificate instead of the
    address that is called.
    """

    ca: bytes | None = None
    server_name: str | None = None
    key: str | None = field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call: the key, if there is one."""
        return () if self.key is None else (("authorization", f"Bearer {self.key}"),)

    def channel(self, address: str, options: Options = ()) -> grpc.Channel:
        """A channel whose calls block."""
        if self.ca is None:
            return grpc.insecure_channel(address, options=list(options))
        return grpc.secure_channel(address, self._credentials(), options=self._options(options))

    def aio_channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel of the running event loop."""
        if self.ca is None:
            return grpc.aio.insecure_channel(address, options=list(options))
        return grpc.aio.secure_channel(address, self._credentials(), options=self._options(options))

    def failure(self, details: str) -> str | None:
        """What is wrong with certificates when a call has ended so (`details` of its error); None if it is not that."""
        if "failed to connect" not in details:
            return None
        if self.ca is None:
            return _IN_THE_CLEAR if any(mark in details for mark in _CLOSED) else None
        return next((text for mark, text in _FAILURES if mark in details), None)

    def _credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(root_certificates=self.ca)

    def _options(self, options: Options) -> list[tuple[str, int | str]]:
        name = [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]
        return [*options, *name]


_CLOSED = ("Socket closed", "reset by peer")
_IN_THE_CLEAR = "it closed the connection; if it speaks TLS, security.ca is missing"
_FAILURES = (
    *((mark, "security.ca is given, but it does not seem to speak TLS") for mark in ("WRONG_VERSION_NUMBER", *_CLOSED)),
    ("Hostname Verification", "its certificate is for another name than the one called; see security.server_name"),
    ("certificate has expired", "its certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not one that security.ca knows"),
)
PLAIN = Trust()
"""Nothing is encrypted, no key is shown."""
