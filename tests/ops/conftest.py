from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.ops import BACKENDS, Backend, backend


@pytest.fixture(params=BACKENDS)
def each_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Runs the test once per back end, inside it."""
    with backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
