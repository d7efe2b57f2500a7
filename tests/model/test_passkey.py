"""Prompts and training text of the pass-key model are what they claim to be."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.passkey import MODEL_DIR, make_prompt
from benchmarks.train_passkey.data import PasskeyData
from engine.tokenizer import Tokenizer

_TOKENIZER = Tokenizer.from_dir(MODEL_DIR)
assert _TOKENIZER is not None
TOKENIZER = _TOKENIZER


@pytest.mark.parametrize("tokens", [40, 64, 500, 4096])
def test_prompt_fills_its_length_without_exceeding_it(tokens: int) -> None:
    for seed in range(5):
        prompt, _ = make_prompt(tokens, depth=0.5, seed=seed)
        assert tokens - 25 < len(TOKENIZER.encode(prompt)) <= tokens


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_key_stands_at_its_depth_and_is_asked_for(depth: float) -> None:
    prompt, key = make_prompt(3000, depth, seed=3)
    (name,) = re.findall(r"What is the pass key for (\w+)\?$", prompt)
    statement = f" The pass key for {name} is {key}."
    assert prompt.count(statement) == 1
    assert len(re.findall(r"The pass key for \w+ is \d{5}\.", prompt)) == 6
    text = prompt.rsplit("\n", 1)[0]
    assert text.index(statement) / (len(text) - len(statement)) == pytest.approx(depth, abs=0.02)


def test_same_seed_gives_the_same_prompt() -> None:
    assert make_prompt(300, 0.5, seed=1) == make_prompt(300, 0.5, seed=1)
    assert make_prompt(300, 0.5, seed=1) != make_prompt(300, 0.5, seed=2)


@pytest.mark.parametrize(("tokens", "depth"), [(10, 0.5), (300, 1.5), (300, -0.1)])
def test_impossible_prompts_are_refused(tokens: int, depth: float) -> None:
    with pytest.raises(ValueError, match="legal: "):
        make_prompt(tokens, depth, seed=0)


def test_training_text_weighs_the_answers_digits_and_not_the_random_ones() -> None:
    tokens, weights = PasskeyData(TOKENIZER, seed=0).batch(size=2, length=256, needles=4)
    assert tokens.shape == weights.shape == (2, 257)
    for row, row_weights in zip(tokens.tolist(), weights.tolist(), strict=True):
        text = TOKENIZER.decode(row)
        answers = re.findall(r"What is the pass key for (\w+)\? The pass key for \w+ is (\d{5})\.", text)
        assert len(answers) == 4
        for name, key in answers:
            assert text.index(f"The pass key for {name} is {key}.") < text.index("What is")
        heavy = [TOKENIZER.decode([token]) for token, weight in zip(row, row_weights, strict=True) if weight >= 2]
        assert "".join(heavy) == "".join(key for _, key in answers)
        unweighted = [TOKENIZER.decode([token]) for token, weight in zip(row, row_weights, strict=True) if weight == 0]
        assert re.fullmatch(r"\d{20}", "".join(unweighted))


def test_positions_rise_and_stay_within_the_span() -> None:
    positions = PasskeyData(TOKENIZER, seed=0).positions(size=20, length=64, span=1000)
    assert (positions.diff(dim=1) >= 1).all()
    assert positions.min() == 0
    assert positions.max() < 1000
    assert positions.max() > 64
    same = PasskeyData(TOKENIZER, seed=0).positions(size=2, length=64, span=64)
    assert torch.equal(same, torch.arange(64).expand(2, -1))
