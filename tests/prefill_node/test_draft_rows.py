"""With drafting on, prefill also caches the draft layer's row of every prompt position, and publishes it last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.draft import DraftLayer
from engine.sampling_params import SamplingParams
from prefill_node.outcome import PrefillFailure, PrefillResult
from tests.checkpoints import random_checkpoint
from tests.model.dense_backend import DenseBackend
from tests.prefill_node.harness import Rig
from tests.prefill_node.test_backend import prompt

LENGTHS = [1, 15, 16, 17, 63, 64, 65, 150]
SAMPLED = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["full", "shared", "full", "shared"]
    folder = tmp_path_factory.mktemp("model")
    return random_checkpoint(folder, "glm_moe_dsa", num_nextn_predict_layers=1, indexer_types=kinds)


@pytest.mark.parametrize(("independent", "shared"), [([0], 1), ([0], 2), ([-1, 0], 1), ([], 5)])
@pytest.mark.parametrize("budget", [48, 1024])
def test_every_prompt_position_has_its_draft_row(model_dir: Path, independent, shared, budget) -> None:
    """Also at the ends of chunks, whose last row needs the next chunk's first token, and behind a sampled token."""
    rig = Rig(model_dir, independent=independent, shared=shared, budget=budget, drafts=True)
    for length in LENGTHS:
        rig.submit(f"r{length}", prompt(length), params=SAMPLED if length % 2 else None)
    rig.run(*(f"r{length}" for length in LENGTHS))
    rig.settle()
    decoder, draft = rig.rank._decoder, DraftLayer(rig.rank._decoder)
    for length in LENGTHS:
        name, reference = f"r{length}", DenseBackend(rig.config)
        outcome = rig.outcomes[name]
        assert isinstance(outcome, PrefillResult), outcome
        reference.begin([(name, length)])
        tokens, positions = torch.tensor([*prompt(length), outcome.first_token.token]), torch.arange(length)
        hidden = decoder.hidden(tokens[:-1], positions, reference)
        draft.hidden(hidden, tokens[1:], positions, reference)
        for layer in range(5):
            rows = torch.cat([rig.reader.pulled(layer, name, kind, length) for kind in ("ckv", "k_rope")], dim=-1)
            torch.testing.assert_close(rows, reference._main[layer, name], atol=2e-4, rtol=1e-4)
        keys = rig.reader.pulled(4, name, "indexer", length)
        torch.testing.assert_close(keys, reference._index[4, name], atol=2e-4, rtol=1e-4)
    assert sorted(rig.reader.finished) == sorted(f"r{length}" for length in LENGTHS)
    assert rig.used_blocks() == 0
    assert rig.pool.leased == set()
    rig.close()


def test_the_draft_layer_is_announced_last(model_dir: Path) -> None:
    rig = Rig(model_dir, drafts=True)
    rig.submit("r", prompt(40))
    rig.run("r")
    assert [layer for layer, _ in rig.reader.calls] == [0, 1, 2, 3, 4]
    rig.settle()
    assert rig.reader.finished == ["r"]
    rig.close()


def test_a_request_that_cannot_be_sampled_fails_alone(model_dir: Path) -> None:
    rig = Rig(model_dir, drafts=True, budget=1024)
    rig.submit("unseeded", prompt(30), params=SamplingParams(temperature=1.0))
    rig.submit("good", prompt(31))
    rig.run("unseeded", "good")
    assert isinstance(rig.outcomes["unseeded"], PrefillFailure)
    assert isinstance(rig.outcomes["good"], PrefillResult)
    rig.settle()
    rig.close()
