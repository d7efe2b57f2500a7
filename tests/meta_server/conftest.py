from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from engine.tokenizer import Tokenizer
from tests.meta_server.deployment import MODEL_DIR, Deployment, deployed


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps one event loop for all tests: gRPC objects that are freed after their loop is closed complain or hang."""
    yield
    gc.collect()
    await asyncio.sleep(0.1)


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
