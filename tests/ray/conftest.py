"""Tests with a real Ray cluster. `make ray-test` runs them; they are collected only when asked for by path.

They need a network namespace of their own with nothing but a loopback interface: Ray's ports and processes then meet
nobody else's.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in named) else True


@pytest.fixture(scope="session", autouse=True)
def alone() -> None:
    """Refuses to run where Ray would listen beside others."""
    interfaces = [name for _, name in socket.if_nameindex()]
    if interfaces != ["lo"]:
        pytest.exit(f"network interfaces {interfaces}: run these tests by `make ray-test`", returncode=2)
