"""The reference itself: what it accepts, and that its answers do not depend on its cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import random_checkpoint
from tests.model.runner import random_prompt
from tests.oracle import Oracle, OracleResult, assert_tokens_match

SURE = OracleResult(tokens=[5, 6, 7], gaps=[1.0, 0.5, 0.2])
UNSURE = OracleResult(tokens=[5, 6, 7], gaps=[1.0, 0.0005, 0.2])


def test_equal_tokens_match() -> None:
    assert_tokens_match([5, 6, 7], SURE)


@pytest.mark.parametrize("got", [[5, 9, 7], [5, 6], [5, 6, 7, 8], []])
def test_differing_tokens_and_lengths_fail(got: list[int]) -> None:
    with pytest.raises(AssertionError):
        assert_tokens_match(got, SURE)


def test_nothing_is_compared_after_a_step_the_oracle_was_not_sure_of() -> None:
    assert_tokens_match([5, 9, 1, 2], UNSURE)
    with pytest.raises(AssertionError, match="step 0"):
        assert_tokens_match([4, 9, 1], UNSURE)


def test_second_answer_comes_from_disk_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.oracle.tempfile.gettempdir", lambda: str(tmp_path))
    model_dir = random_checkpoint(tmp_path / "model", "glm_moe_dsa")
    first = Oracle(model_dir).greedy(random_prompt(9), 4)
    (kept,) = tmp_path.glob("sluice-oracle-*/*.json")
    assert Oracle(model_dir).greedy(random_prompt(9), 4) == first
    kept.write_text(json.dumps({"tokens": [1], "gaps": [2.0]}))
    assert Oracle(model_dir).greedy(random_prompt(9), 4) == OracleResult([1], [2.0])
    assert Oracle(model_dir).greedy(random_prompt(9), 3).tokens == first.tokens[:3]


def test_end_of_sequence_ends_the_answer_when_asked_to(tmp_path: Path) -> None:
    prompt = random_prompt(30)
    plain = Oracle(random_checkpoint(tmp_path / "plain", "glm_moe_dsa")).greedy(prompt, 8)
    third = plain.tokens[2]
    stopping = Oracle(random_checkpoint(tmp_path / "stopping", "glm_moe_dsa", eos_token_id=[third]))
    assert stopping.greedy(prompt, 8).tokens == plain.tokens
    assert stopping.greedy(prompt, 8, eos=True).tokens == plain.tokens[: plain.tokens.index(third) + 1]
