from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.pool_service import Service, started_service


@pytest.fixture
def service() -> Iterator[Service]:
    """A meta service of its own, so that an earlier test's killed members do not disturb."""
    with started_service() as service:
        yield service
