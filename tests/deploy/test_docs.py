"""The documents name files and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_PATH = re.compile(r"`([\w.-]+/[\w./-]*)`")
_TEST = re.compile(r"`(test_\w+)` in `([\w/]+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page: Path) -> None:
    named = _PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_named_exist(page: Path) -> None:
    for test, file in _TEST.findall(page.read_text(encoding="utf-8")):
        assert f"def {test}(" in (REPOSITORY / file).read_text(encoding="utf-8"), f"{test} is not in {file}"
