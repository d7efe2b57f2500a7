"""A deployment with TLS and keys serves those who have one, through all its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority, section
from tests.checkpoints import PASSKEY_GLM
from tests.cluster import REPOSITORY, Cluster
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster


def test_a_secured_deployment_answers_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_TEST_WORKER_KEY", "among-workers")
    (tmp_path / "keys").write_text("a-client\n")
    authority = Authority(tmp_path)
    keys = {"api_keys": tmp_path / "keys", "worker_keys": "env:SLUICE_TEST_WORKER_KEY"}
    security = {
        f"security.{name}": value for name, value in section(authority, authority.issue("pair"), **keys).items()
    }
    prompt = prompt_of(60)
    with Cluster(PASSKEY_GLM, security) as cluster:
        assert cluster.http_url.startswith("https://")
        expected = Oracle(PASSKEY_GLM).greedy(prompt, 8)
        assert_tokens_match(cluster.complete(prompt, 8, ignore_eos=True).tokens, expected)
        assert_tokens_match(cluster.generate(prompt, 8), expected)
        body = {"prompt": prompt, "max_tokens": 1}
        unknown = httpx.post(f"{cluster.http_url}/v1/completions", json=body, verify=False, timeout=60)
        assert unknown.status_code == 401
        command = [sys.executable, "-m", "deploy.cli", "status", "--address", cluster.grpc_address]
        status = {}
        for key in ("a-client", "nobody"):
            monkeypatch.setenv("SLUICE_TEST_API_KEY", key)
            own = ["--set", f"security.ca={authority.file}", "--set", "security.api_keys=env:SLUICE_TEST_API_KEY"]
            status[key] = subprocess.run([*command, *own], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert status["a-client"].returncode == 0 and "decode-0/dp0/tp0" in status["a-client"].stdout
        assert status["nobody"].returncode == 1
        assert "UNAUTHENTICATED: the key in the header Authorization" in status["nobody"].stderr
