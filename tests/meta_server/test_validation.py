"""Every refusal names the field, its value and what is legal."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from engine.model.config import ModelConfig
from engine.tokenizer import Tokenizer
from meta_server.errors import FailureKind, RequestFailed
from meta_server.validation import Capacity, RequestValidator, SamplingFields, check_request_id
from tests.meta_server.deployment import MODEL_DIR


@pytest.fixture(scope="module")
def validator() -> RequestValidator:
    return RequestValidator("passkey", ModelConfig.from_dir(MODEL_DIR), 1000, Tokenizer.from_dir(MODEL_DIR))


def refusal(
    validator: RequestValidator, prompt: list[int], capacity: Capacity | None = None, **fields: Any
) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        validator.request(prompt, SamplingFields(**{"max_tokens": 4, **fields}), capacity or Capacity())
    assert caught.value.failure.kind is FailureKind.INVALID
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "parts"),
    [
        ([], {}, "prompt", ("is empty",)),
        ([1] * 1000, {}, "prompt", ("has 1000 tokens", "at most 999")),
        ([1, 713], {}, "prompt", ("token id 713 at position 1", "0 to 712")),
        ([-1], {}, "prompt", ("token id -1", "0 to 712")),
        ([1] * 990, {"max_tokens": 11}, "max_tokens", ("1000 tokens", "1001 were requested", "at most 10")),
        ([1], {"max_tokens": 0}, "max_tokens", ("is 0", "at least 1")),
        ([1], {"max_tokens": -5}, "max_tokens", ("is -5", "at least 1")),
        ([1], {"temperature": -0.1}, "temperature", ("-0.1",)),
        ([1], {"temperature": float("nan")}, "temperature", ("nan", "finite")),
        ([1], {"top_p": 0.0}, "top_p", ("0.0", "above 0")),
        ([1], {"top_p": 1.5}, "top_p", ("1.5", "at most 1")),
        ([1], {"temperature": 1e308}, "temperature", ("1e+308", "finite")),
        ([1], {"top_p": 1e-60}, "top_p", ("1e-60", "above 0")),
        ([1], {"top_k": -2}, "top_k", ("-2",)),
        ([1], {"top_k": 2**32}, "top_k", ("4294967296", "0 to 4294967295")),
        ([1], {"seed": -1}, "seed", ("-1",)),
        ([1], {"logprobs": 21}, "logprobs", ("21", "0 to 20")),
        ([1], {"stop": ("",)}, "stop", ("not empty",)),
        ([1], {"stop": ("\ud800",)}, "stop", ("surrogate",)),
        ([1], {"stop": ("x",) * 65}, "stop", ("65", "at most 64")),
        ([1], {"stop_token_ids": (713,)}, "stop_token_ids", ("713", "0 to 712")),
        ([1], {"min_tokens": 5}, "min_tokens", ("5", "0 to 4")),
    ],
)
def test_refusals_name_field_value_and_legal(
    validator: RequestValidator, prompt: list[int], fields: dict[str, Any], param: str, parts: tuple[str, ...]
) -> None:
    failure = refusal(validator, prompt, **fields).failure
    assert failure.param == param and failure.message.startswith(f"{param}: ")
    for part in parts:
        assert part in failure.message


def test_a_request_that_can_never_fit_the_workers_is_refused(validator: RequestValidator) -> None:
    capacity = Capacity(prompt_tokens=800, total_tokens=500)
    assert "at most 500 tokens" in str(refusal(validator, [1] * 500, capacity))
    assert "at most 800" in str(refusal(validator, [1] * 801, capacity))
    text = str(refusal(validator, [1] * 490, capacity, max_tokens=11))
    assert "decode.host_pool_bytes" in text and "at most 10" in text
    assert validator.request([1] * 490, SamplingFields(max_tokens=10), capacity).total_tokens == 500


@pytest.mark.parametrize(
    ("prompt", "default", "capacity", "expected"),
    [
        (10, 16, Capacity(), 16),
        (990, 16, Capacity(), 10),
        (10, None, Capacity(), 990),
        (10, None, Capacity(total_tokens=300), 290),
    ],
)
def test_absent_length_takes_the_default_or_what_fits(
    validator: RequestValidator, prompt: int, default: int | None, capacity: Capacity, expected: int
) -> None:
    request = validator.request([1] * prompt, SamplingFields(default_max_tokens=default), capacity)
    assert request.sampling.max_tokens == expected


def test_seed_is_chosen_once_and_kept_when_given(validator: RequestValidator) -> None:
    fields = SamplingFields(max_tokens=1)
    seeds = {validator.request([1], fields, Capacity()).sampling_message().seed for _ in range(8)}
    assert len(seeds) == 8
    given = dataclasses.replace(fields, seed=2**64 - 1)
    assert validator.request([1], given, Capacity()).sampling_message().seed == 2**64 - 1


def test_unknown_model_is_not_found(validator: RequestValidator) -> None:
    validator.check_model(None)
    validator.check_model("passkey")
    with pytest.raises(RequestFailed) as caught:
        validator.check_model("gpt-\ud800")
    assert caught.value.failure.kind is FailureKind.UNKNOWN_MODEL
    assert "'passkey'" in str(caught.value)


@pytest.mark.parametrize("request_id", ["", "a" * 65, "a b", "a/b", "-a", "é", "a\n"])
def test_request_ids_are_short_and_plain(request_id: str) -> None:
    with pytest.raises(RequestFailed, match="request_id"):
        check_request_id(request_id)
    check_request_id("Order-7:b.c_d")


def test_without_a_tokenizer_text_is_refused() -> None:
    bare = RequestValidator("passkey", ModelConfig.from_dir(MODEL_DIR), 1000, None)
    with pytest.raises(RequestFailed, match="no tokenizer"):
        asyncio.run(bare.encode("hello"))
    with pytest.raises(RequestFailed, match="no tokenizer"):
        asyncio.run(bare.encode_chat([{"role": "user", "content": "hello"}]))
    assert "stop_token_ids" in str(refusal(bare, [1], stop=("x",)))


def test_long_text_is_tokenized_like_short_text() -> None:
    tokenizer = Tokenizer.from_dir(MODEL_DIR)
    assert tokenizer is not None
    validator = RequestValidator("passkey", ModelConfig.from_dir(MODEL_DIR), 100_000, tokenizer)
    text = "the pass key is 7. " * 1000
    assert asyncio.run(validator.encode(text)) == tokenizer.encode(text)


def test_text_that_can_never_fit_is_refused_before_it_is_tokenized(
    validator: RequestValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten megabytes would keep a tokenizer busy for most of a minute."""
    assert validator.tokenizer is not None
    monkeypatch.setattr(validator.tokenizer, "encode", None)
    for encoding in (
        validator.encode("key " * 2_500_000),
        validator.encode_chat([{"role": "user", "content": "é" * 10**6}]),
    ):
        with pytest.raises(RequestFailed, match=r"has at least \d+ tokens.*legal: at most 999"):
            asyncio.run(encoding)
