"""Checkpoints and deployments shared by the end-to-end tests; each deployment starts once and serves many tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import PASSKEY_GLM, YARN, passkey_with_shared_index, random_checkpoint
from tests.cluster import Cluster
from tests.oracle import Oracle

BASE: dict[str, object] = {
    "prefill.max_tokens_per_step": 256,
    "decode.host_pool_bytes": "64MiB",
    "pool.dram_bytes": "64MiB",
    "hostcann.hbm_bytes": "256MiB",
}
"""Small chunks, so that prompts of a few hundred tokens already take several steps and reload shared layers."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights of both families (no tokenizer), and the trained model with index reuse."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "deepseek_v32": random_checkpoint(folder / "deepseek", "deepseek_v32", seed=1, rope_parameters=YARN),
        "glm_moe_dsa": random_checkpoint(folder / "glm", "glm_moe_dsa", seed=2),
        "index_reuse": passkey_with_shared_index(folder / "index-reuse"),
        "passkey": PASSKEY_GLM,
    }


@pytest.fixture(scope="session")
def oracles(checkpoints: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(folder) for name, folder in checkpoints.items()}


@pytest.fixture(scope="session")
def passkey_cluster(checkpoints: dict[str, Path]) -> Iterator[Cluster]:
    """The trained model with its tokenizer, one prefill and one decode worker."""
    with Cluster(checkpoints["passkey"], BASE) as cluster:
        yield cluster
