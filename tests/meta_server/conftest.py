from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from engine.tokenizer import Tokenizer
from tests.meta_server.deployment import MODEL_DIR, Deployment, deployed


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, those of a module in one loop."""
    return "asyncio"


@pytest.fixture(scope="module")
async def shared(anyio_backend: str) -> AsyncIterator[Deployment]:
    """One deployment for the tests of a module whose requests never reach a worker."""
    async with deployed() as deployment:
        yield deployment


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The demo model's tokenizer."""
    found = Tokenizer.from_dir(MODEL_DIR)
    assert found is not None
    return found
