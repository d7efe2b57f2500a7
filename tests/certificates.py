"""Certificates for tests: an authority, and servers' certificates that it has signed."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

NAME = "sluice.test"  # in every server's certificate, with the address 127.0.0.1
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority whose files lie in `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._builder(self._name, self._key.public_key(), DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.file = self._written(name, certificate, self._key).certificate

    def issue(self, name: str, valid: datetime.timedelta = DAY, names: Sequence[str] = (NAME,)) -> Pair:
        """A server's certificate in files called `name`; `valid` from now on, negative: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        known = x509.SubjectAlternativeName([*map(x509.DNSName, names), address])
        builder = self._builder(subject, key.public_key(), valid).add_extension(known, critical=False)
        return self._written(name, builder, key)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, valid: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - 2 * DAY).not_valid_after(now + valid)

    def _written(self, name: str, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> Pair:
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pair


def section(authority: Authority, pair: Pair, **fields: object) -> dict[str, object]:
    """Section `security` of a deployment that shows this pair's certificate."""
    files = {"certificate": pair.certificate, "private_key": pair.key, "ca": authority.file}
    return {name: str(value) for name, value in {**files, **fields}.items()}
