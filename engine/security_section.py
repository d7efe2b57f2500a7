"""Section `security` of ``sluice.yaml``; what its fields refer to is read by engine/credentials.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from engine.config_fields import Section

VARIABLE = "env:"


def _absolute(name: str) -> str:
    return name if name.startswith(VARIABLE) else str(Path(name).absolute())


def _file_or_variable(value: object) -> object:
    """YAML reads `env:` and `env: NAME` as mappings."""
    if value == VARIABLE or (isinstance(value, dict) and list(value) == [VARIABLE.removesuffix(":")]):
        raise ValueError("write a file's name, or env:NAME with the name of a variable and no space before it")
    return value


File = Annotated[str, Field(min_length=1), BeforeValidator(_file_or_variable), AfterValidator(_absolute)]


class SecuritySection(Section):
    """TLS and keys of HTTP and gRPC; all off by default. What the names refer to is read when a process starts."""

    FILES: ClassVar[list[str]] = ["certificate", "private_key", "ca", "api_keys", "worker_keys"]

    certificate: File | None = Field(
        None, description="PEM file with the certificate (chain) that every process shows; turns TLS on"
    )
    private_key: File | None = Field(None, description="PEM file with the certificate's key, without a password")
    ca: File | None = Field(
        None, description="PEM file with the certificates by which callers know a process's; all that a client needs"
    )
    server_name: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="name in the certificate that callers look for; what they call (an address) if absent",
    )
    api_keys: File | None = Field(
        None,
        description="file, or `env:NAME` for a variable, with keys of which a client must have one; `sluice` shows the "
        "first",
    )
    worker_keys: File | None = Field(
        None, description="likewise for the processes among themselves; the first is shown, each is taken"
    )

    @property
    def http_scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    @property
    def grpc_scheme(self) -> str:
        return "grpc" if self.certificate is None else "grpcs"

    def missing(self) -> str | None:
        """What has to be given too; None if nothing."""
        if (self.certificate is None) != (self.private_key is None):
            return "security.certificate and security.private_key: give both or none"
        if self.certificate is not None and self.ca is None:
            return "security.ca: required with security.certificate, which the processes verify by it"
        return None
