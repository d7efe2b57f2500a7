"""docs/operations.md: its capacity table is what `sluice plan` says, its commands are tested ones or marked."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import ConfigError
from engine.credentials import Credentials
from engine.security_section import SecuritySection
from tests.cluster import REPOSITORY

PAGE = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
MODELS = {"DeepSeek-V3.2": "deepseek-v3.2", "GLM-5": "glm-5", "GLM-5.2": "glm-5.2"}
ROW = re.compile(r"^\| ([\w.-]+) \| (128K|1M) \| (.+) \|$", re.MULTILINE)
FILES = {"certificate": "tls.crt", "private_key": "tls.key", "ca": "ca.crt"}
SETTINGS = ("model.dtype=bfloat16", "prefill.tp=16", "decode.tp=16", "kv.block_size=128")


@pytest.mark.parametrize(("model", "context", "cells"), ROW.findall(PAGE))
def test_the_capacity_table_is_what_the_planner_says(model: str, context: str, cells: str) -> None:
    command = [sys.executable, "-m", "deploy.cli", "plan", "--json", "--context", context, "--concurrency", "1"]
    command += ["--model", str(REPOSITORY / "tests" / "full_size" / MODELS[model])]
    for setting in SETTINGS:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    plan = json.loads(done.stdout)
    prefill, decode = plan["prefill"], plan["decode"]
    sizes = (
        prefill["device_bytes"],
        prefill["pool_bytes"],
        decode["host_bytes"],
        decode["device_bytes"],
        decode["device_bytes_all_resident"],
    )
    assert cells == " | ".join(f"{size / (1 << 30):.1f} GiB" for size in sizes)


def test_the_capacity_table_has_all_models() -> None:
    assert {(model, context) for model, context, _ in ROW.findall(PAGE)} == {
        (model, context) for model in MODELS for context in ("128K", "1M")
    }


def test_the_command_for_sizing_runs() -> None:
    (line,) = re.findall(r"^sluice (plan .*)$", PAGE, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *line.split()], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert done.returncode in (0, 1), done.stderr  # 1: the load does not fit the defaults, and it says what would
    assert "32 requests of 131,072 tokens" in done.stdout


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_the_certificates_it_shows_how_to_make_are_accepted(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```\n(openssl req -x509.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    small = commands.replace("rsa:3072", "rsa:2048")  # sooner found
    subprocess.run(["bash", "-ec", small], check=True, capture_output=True, cwd=tmp_path, timeout=60)
    files = {name: str(tmp_path / file) for name, file in FILES.items()}
    for name in ("sluice", "sluice.example"):
        Credentials.of(SecuritySection(**files, server_name=name))
    with pytest.raises(ConfigError, match="would refuse it"):
        Credentials.of(SecuritySection(**files, server_name="other.example"))
