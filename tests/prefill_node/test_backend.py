"""Prefill over layer buffers computes, publishes and saves what a dense model that keeps everything computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefill_node.outcome import PrefillResult
from tests.checkpoints import random_checkpoint
from tests.model.dense_backend import DenseBackend
from tests.model.runner import Runner
from tests.prefill_node.harness import Rig

PROMPTS = {"long": 150, "aligned": 64, "short": 37, "one": 1}


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=["glm_moe_dsa", "glm-shared-index"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = {"indexer_types": ["full", "shared", "full", "shared"]} if request.param == "glm-shared-index" else {}
    return random_checkpoint(tmp_path_factory.mktemp("model"), "glm_moe_dsa", seed=0, **shared)


@pytest.fixture(scope="module")
def dense(model_dir: Path) -> tuple[Runner, DenseBackend, dict[str, int]]:
    """The dense model with every row of every prompt, and the greedy first tokens."""
    runner, backend, tokens = Runner(model_dir), DenseBackend(Runner(model_dir).config), {}
    for name, length in PROMPTS.items():
        backend.begin([(name, length)])
        logits = runner.decoder.forward(torch.tensor(prompt(length)), torch.arange(length), backend)
        tokens[name] = int(logits[-1].argmax())
    return runner, backend, tokens


@pytest.mark.parametrize(("independent", "shared"), [([0], 1), ([0], 2), ([], 1), ([0], 3), ([-1, 0], 1)])
@pytest.mark.parametrize(("budget", "block_size"), [(48, 16), (1024, 16), (50, 8)])
def test_tokens_and_published_rows_equal_a_dense_model(model_dir, dense, independent, shared, budget, block_size):
    runner, reference, tokens = dense
    rig = Rig(model_dir, independent=independent, shared=shared, budget=budget, block_size=block_size)
    rig.reader.delay_s = 0.002
    for name, length in PROMPTS.items():
        rig.submit(name, prompt(length))
    rig.run(*PROMPTS)
    rig.settle()
    for name, length in PROMPTS.items():
        outcome = rig.outcomes[name]
        assert isinstance(outcome, PrefillResult), outcome
        assert outcome.first_token.token == tokens[name]
        for layer in range(4):
            rows = torch.cat([rig.reader.pulled(layer, name, kind, length) for kind in ("ckv", "k_rope")], dim=-1)
            torch.testing.assert_close(rows, reference._main[layer, name], atol=2e-4, rtol=1e-4)
            if runner.config.has_indexer(layer):
                keys = rig.reader.pulled(layer, name, "indexer", length)
                torch.testing.assert_close(keys, reference._index[layer, name], atol=2e-4, rtol=1e-4)
            else:
                assert not rig.reader.rows[layer, name, "indexer"]
    assert sorted(rig.reader.finished) == sorted(PROMPTS)
    assert rig.reader.repeated == 0
    assert rig.used_blocks() == 0
    assert rig.pool.leased == set()
    assert rig.saver.counters().objects == 0
    rig.close()
