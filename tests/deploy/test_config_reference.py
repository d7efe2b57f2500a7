"""docs/configuration.md says what the code accepts."""

from __future__ import annotations

from deploy.config_reference import FILE, reference


def test_the_configuration_page_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == reference(), "run: make docs"


def test_every_field_is_explained() -> None:
    bare = [line for line in reference().splitlines() if line.endswith("|  |")]
    assert not bare
