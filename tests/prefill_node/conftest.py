from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_checkpoint
from tests.prefill_node.harness import Rig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, each with an indexer; index_topk 64."""
    return random_checkpoint(tmp_path_factory.mktemp("tiny"), "glm_moe_dsa", seed=0)


@pytest.fixture
def make_rig(tiny_model: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(tiny_model, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
