"""Shared by the tests of a puller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.decode_node.pull_rig import Node


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    assert node.puller.failure is None
    node.puller.close()
    node.context.destroy(0)
