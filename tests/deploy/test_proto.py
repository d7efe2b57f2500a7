"""proto/: in good style, and compatible with what has been released."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster import REPOSITORY

BUF = Path(sys.executable).parent / "buf"
RELEASED = "proto/released.binpb"


def buf(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([str(BUF), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_lint() -> None:
    assert buf(REPOSITORY, "lint") == (0, "")


def test_nothing_that_was_released_is_broken() -> None:
    assert buf(REPOSITORY, "breaking", "--against", RELEASED) == (0, "")


def test_a_broken_message_is_found(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "buf.yaml", tmp_path)
    shutil.copytree(REPOSITORY / "proto" / "sluice", tmp_path / "proto" / "sluice")
    shutil.copy(REPOSITORY / RELEASED, tmp_path / RELEASED)
    common = tmp_path / "proto" / "sluice" / "v1" / "common.proto"
    text = common.read_text(encoding="utf-8")
    assert "uint32 top_k = 3;" in text
    common.write_text(text.replace("uint32 top_k = 3;", "string top_k = 3;"), encoding="utf-8")
    status, said = buf(tmp_path, "breaking", "--against", RELEASED)
    assert status != 0
    assert 'Field "3" with name "top_k" on message "SamplingParams" changed type' in said
