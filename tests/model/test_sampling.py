"""Tokens are drawn from the right distribution, and from the same stream on every node."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from engine.sampling import SampleRow, SamplingError, sample, uniform
from engine.sampling_params import SamplingParams, SamplingParamsError

LOGITS = torch.tensor([2.0, 0.5, 1.0, -1.0, 1.5])


def draw(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    """Tokens at `count` successive positions, all from the same logits."""
    settings = SamplingParams(**{"seed": 7, **params})
    rows = [SampleRow("r", settings, position) for position in range(count)]
    return [sampled.token for sampled in sample(logits.expand(count, -1), rows)]


def test_temperature_zero_takes_the_best_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    rows = [SampleRow("a", SamplingParams(temperature=0), 3), SampleRow("b", SamplingParams(temperature=0), 9)]
    assert [sampled.token for sampled in sample(logits, rows)] == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    count = 4000
    seen = Counter(draw(count, temperature=temperature))
    expected = (LOGITS / temperature).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert seen[token] / count == pytest.approx(probability, abs=0.03)


def test_top_k_keeps_the_best_k() -> None:
    assert set(draw(500, temperature=5.0, top_k=2)) == {0, 4}


def test_top_p_keeps_the_fewest_tokens_that_reach_p() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert set(draw(500, probabilities.log(), top_p=0.79)) == {0, 1}
    assert set(draw(500, probabilities.log(), top_p=0.81)) == {0, 1, 2}
    assert set(draw(500, probabilities.log(), top_p=0.01)) == {0}


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    assert set(draw(50, temperature=1e-30)) == {0}


def test_tokens_depend_on_seed_and_position_not_on_the_batch() -> None:
    """Row by row, in one batch, and in reverse order: the same stream."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(f"r{i}", SamplingParams(seed=i % 2, temperature=2.0), 10 + i) for i in range(6)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(6)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards
    assert draw(50, seed=1) != draw(50, seed=2)


def test_uniform_is_fixed_for_ever_and_fills_the_interval() -> None:
    """Pinned, as a rolling update mixes versions within one request."""
    assert uniform(1234, 56) == uniform(1234, 56)
    assert uniform(1234, 56) == pytest.approx(0.10190804971551137, abs=0)
    values = sorted(uniform(5, position) for position in range(1000))
    assert values[0] >= 0.0
    assert values[-1] < 1.0
    assert all(abs(value - rank / 1000) < 0.06 for rank, value in enumerate(values))


def test_logprobs_are_those_of_the_model_before_temperature() -> None:
    params = SamplingParams(temperature=3.0, seed=1, top_k=1, logprobs=2)
    (sampled,) = sample(LOGITS[None], [SampleRow("r", params, 0)])
    expected = LOGITS.log_softmax(-1)
    assert sampled.token == 0
    assert sampled.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in sampled.top_logprobs] == [0, 4]
    assert [value for _, value in sampled.top_logprobs] == pytest.approx([float(expected[0]), float(expected[4])])


def test_logprobs_zero_reports_the_token_alone_and_none_nothing() -> None:
    zero, none = SamplingParams(temperature=0, logprobs=0), SamplingParams(temperature=0)
    first, second = sample(LOGITS.expand(2, -1), [SampleRow("a", zero, 0), SampleRow("b", none, 0)])
    assert first.logprob is not None
    assert first.top_logprobs == ()
    assert second.logprob is None


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_damaged_logits_name_the_request_and_spare_the_others(damage: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = damage
    rows = [SampleRow(name, SamplingParams(temperature=0), 0) for name in ("a", "b", "c")]
    with pytest.raises(SamplingError, match="not finite numbers") as caught:
        sample(logits, rows)
    assert caught.value.request_ids == ("b",)
    assert str(caught.value).startswith("request b: ")
    assert [sampled.token for sampled in sample(logits[[0, 2]], [rows[0], rows[2]])] == [0, 0]


def test_a_temperature_needs_a_seed() -> None:
    with pytest.raises(SamplingError, match="request r: seed is None"):
        sample(LOGITS[None], [SampleRow("r", SamplingParams(), 0)])


def test_stop_tokens_count_from_min_tokens_on() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(4,), min_tokens=3)
    assert [params.stops_at(4, generated, ()) for generated in (1, 2, 3, 4)] == [False, False, True, True]
    assert params.stops_at(2, 3, eos_token_ids=(2,))
    assert not params.stops_at(5, 3, eos_token_ids=(2,))


def test_ignore_eos_leaves_explicit_stop_tokens() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(4,))
    assert not params.stops_at(2, 1, eos_token_ids=(2,))
    assert params.stops_at(4, 1, eos_token_ids=(2,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logprobs", True),
    ],
)
def test_illegal_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SamplingParamsError, match=f"^{field} is .*; legal: ") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
