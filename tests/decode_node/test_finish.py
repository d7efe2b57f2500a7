"""One rule decides for every token whether a request ends with it."""

from __future__ import annotations

from typing import Any

import pytest

from decode_node.finish import FinishReason, FinishRules
from engine.sampling_params import SamplingParams

EOS, OTHER_EOS, STOP_ID, WORD = 2, 3, 50, 7


def reason(token: int, generated: int, prompt: int = 10, context: int = 1000, **sampling: Any) -> FinishReason | None:
    params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": (STOP_ID,), **sampling})
    return FinishRules(params, frozenset({EOS, OTHER_EOS}), context).reason(token, generated, prompt)


def test_an_ordinary_token_goes_on() -> None:
    assert reason(WORD, 1) is None
    assert reason(WORD, 7) is None


@pytest.mark.parametrize("token", [EOS, OTHER_EOS, STOP_ID])
def test_every_stop_token_stops_even_as_the_first(token: int) -> None:
    assert reason(token, 1) is FinishReason.STOP
    assert reason(token, 5) is FinishReason.STOP


def test_ignore_eos_keeps_stop_token_ids() -> None:
    assert reason(EOS, 1, ignore_eos=True) is None
    assert reason(STOP_ID, 1, ignore_eos=True) is FinishReason.STOP


def test_no_stop_counts_before_min_tokens() -> None:
    assert reason(EOS, 3, min_tokens=4) is None
    assert reason(STOP_ID, 3, min_tokens=4) is None
    assert reason(EOS, 4, min_tokens=4) is FinishReason.STOP


def test_max_tokens_includes_one() -> None:
    assert reason(WORD, 1, max_tokens=1) is FinishReason.LENGTH
    assert reason(WORD, 7, max_tokens=8) is None
    assert reason(WORD, 8, max_tokens=8) is FinishReason.LENGTH


def test_the_context_ends() -> None:
    assert reason(WORD, 3, prompt=6, context=10) is None
    assert reason(WORD, 4, prompt=6, context=10) is FinishReason.LENGTH


def test_a_stop_wins_over_a_length() -> None:
    assert reason(EOS, 1, max_tokens=1) is FinishReason.STOP
