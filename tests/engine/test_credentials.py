"""Section `security`: what it names is checked before anything is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from engine.config import ConfigError, build_config, load_config
from engine.credentials import Credentials, Keys, check_called, client_trust
from engine.security_section import SecuritySection
from tests.certificates import DAY, NAME, Authority

MODEL = {"model": {"path": "."}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an authority's files, those of a stranger, and good, expired and unreadable ones of servers."""
    folder = tmp_path_factory.mktemp("security")
    authority = Authority(folder, "ca")
    authority.issue("good")
    authority.issue("expired", -DAY)
    Authority(folder, "stranger")
    key = serialization.load_pem_private_key((folder / "good.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "locked.key").write_bytes(key.private_bytes(pem, pkcs8, locked))
    (folder / "text").write_text("no certificate\n")
    (folder / "empty").write_text("\n \n")
    (folder / "keys").write_text("first\nsecond\n")
    return folder


def security(folder: Path, **fields: str) -> SecuritySection:
    """`folder/` before every file's name."""
    no_files = {name: value for name, value in fields.items() if name == "server_name" or ":" in value}
    files = {name: str(folder / value) for name, value in fields.items()}
    return build_config({**MODEL, "security": files | no_files}).security


GOOD = {"certificate": "good.crt", "private_key": "good.key", "ca": "ca.crt"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"certificate": "absent"}, r"security\.certificate = '.*/absent': cannot be read: No such file"),
        ({"private_key": "absent"}, r"security\.private_key = '.*/absent': cannot be read: No such file"),
        ({"ca": "absent"}, r"security\.ca = '.*/absent': cannot be read: No such file"),
        ({"certificate": "text"}, r"security\.certificate = '.*/text': holds no PEM certificate"),
        ({"private_key": "text"}, r"security\.private_key = '.*/text': holds no PEM key"),
        ({"private_key": "locked.key"}, r"security\.private_key = '.*/locked\.key': has a password"),
        ({"ca": "text"}, r"security\.ca = '.*/text': holds no PEM certificate"),
        ({"private_key": "expired.key"}, r"security\.private_key = .*expired.key': is not the key of security\.cert"),
        (
            {"certificate": "expired.crt", "private_key": "expired.key"},
            r"security\.certificate = .*expired.crt': callers would refuse it by security\.ca: certificate has expired",
        ),
        ({"ca": "stranger.crt"}, r"callers would refuse it by security\.ca: unable to get local issuer certificate"),
        ({"server_name": "other"}, r"callers would refuse it by security\.ca: Hostname mismatch.*'other'"),
        ({"api_keys": "absent"}, r"security\.api_keys = '.*/absent': cannot be read: No such file"),
        ({"api_keys": "empty"}, r"security\.api_keys = '.*/empty': holds no key"),
        (
            {"worker_keys": "env:SLUICE_NO_SUCH"},
            r"security\.worker_keys = 'env:SLUICE_NO_SUCH': the variable SLUICE_NO_SUCH is not set",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_naming_the_file(folder: Path, fields: dict[str, str], message: str) -> None:
    Credentials.of(security(folder, **GOOD))
    Credentials.of(security(folder, **GOOD, server_name=NAME))
    with pytest.raises(ConfigError, match=message):
        Credentials.of(security(folder, **(GOOD | fields)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"certificate": "good.crt", "ca": "ca.crt"}, r"security\.certificate and security\.private_key: give both"),
        ({"certificate": "good.crt", "private_key": "good.key"}, r"security\.ca: required with security\.certificate"),
        ({"certificat": "good.crt"}, r"security\.certificat: unknown key; legal keys: api_keys, ca, certificate"),
    ],
)
def test_fields_that_need_each_other_come_together(folder: Path, fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        security(folder, **fields)


def test_without_a_server_name_the_certificate_has_what_callers_call(folder: Path) -> None:
    check_called(security(folder, **GOOD), {"grpc.host": "127.0.0.1"})
    check_called(security(folder, **GOOD, server_name=NAME), {"grpc.host": "127.0.0.2"})
    with pytest.raises(
        ConfigError, match=r"security\.certificate = .*good\.crt': callers of grpc\.host = '127\.0\.0\.2'"
    ):
        check_called(security(folder, **GOOD), {"runtime.host": "127.0.0.1", "grpc.host": "127.0.0.2"})
    with pytest.raises(ConfigError, match=r"security\.server_name = ''"):
        security(folder, **GOOD, server_name="")


def test_a_server_needs_a_certificate_where_callers_look_for_one(folder: Path) -> None:
    only_ca = security(folder, ca="ca.crt")
    assert client_trust(only_ca).ca
    with pytest.raises(ConfigError, match=r"security\.ca is given without security\.certificate"):
        Credentials.of(only_ca)


def test_keys_come_from_a_file_or_a_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_TEST_KEYS", "third fourth")
    found = Credentials.of(security(folder, api_keys="keys", worker_keys="env:SLUICE_TEST_KEYS"))
    assert found.clients and found.clients.values == ("first", "second")
    assert found.workers and found.workers.values == ("third", "fourth")
    client = client_trust(security(folder, api_keys="keys", worker_keys="absent"))
    assert client.metadata == (("authorization", "Bearer first"),)
    assert found.as_worker.metadata == (("authorization", "Bearer third"),)
    assert "first" not in repr((found, client)) and "third" not in repr(found), "keys do not get into logs"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("Bearer second", None),
        ("bearer  first ", None),
        (None, "no key: send the header 'Authorization: Bearer KEY'"),
        ("", "no key: send the header 'Authorization: Bearer KEY'"),
        ("Basic first", "the header Authorization must be 'Bearer KEY'"),
        ("Bearer", "not a valid one"),
        ("Bearer third", "not a valid one"),
        ("Bearer first second", "not a valid one"),
        ("Bearer fïrst", "not a valid one"),
    ],
)
def test_any_of_the_keys_opens(header: str | None, reason: str | None) -> None:
    refusal = Keys(("first", "second")).refusal(header)
    assert refusal is None if reason is None else reason in str(refusal)


def test_relative_files_are_beside_the_configuration(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text("model: {path: m}\nsecurity: {certificate: a.crt, private_key: k, ca: ca.crt, api_keys: 'env:K'}")
    found = load_config(file).security
    assert (found.certificate, found.ca, found.api_keys) == (str(tmp_path / "a.crt"), str(tmp_path / "ca.crt"), "env:K")
