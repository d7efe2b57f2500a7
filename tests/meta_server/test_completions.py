"""POST /v1/completions over fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from engine.tokenizer import Tokenizer
from meta_server.openai.body_limit import MAX_BODY_BYTES
from tests.meta_server.deployment import MODEL_DIR, Deployment, deployed, joined
from tests.meta_server.fakes import FIRST, until

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
FOUR = [FIRST, FIRST + 1, FIRST + 2, FIRST + 3]


async def test_token_ids_in_token_ids_out() -> None:
    async with deployed() as deployment:
        body = (await deployment.complete(max_tokens=4, return_token_ids=True, ignore_eos=True)).json()
        (choice,) = body["choices"]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (FOUR, [5, 6, 7])
        assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert (body["object"], body["model"]) == ("text_completion", "passkey")
        assert deployment.decode.decode.admitted[0].sampling.ignore_eos


async def test_text_prompt_and_text_answer(tokenizer: Tokenizer) -> None:
    async with deployed() as deployment:
        script = tokenizer.encode("The pass key is 12.")
        deployment.decode.decode.script.tokens, deployment.prefill.prefill.first_token = script, script[0]
        body = (await deployment.complete(prompt="What is the pass key?", max_tokens=len(script))).json()
        assert body["choices"][0]["text"] == "The pass key is 12."
        assert list(deployment.decode.decode.admitted[0].prompt) == tokenizer.encode("What is the pass key?")


async def test_defaults_are_openais() -> None:
    async with deployed() as deployment:
        body = (await deployment.complete()).json()
        assert body["usage"]["completion_tokens"] == 16
        sampling = deployment.decode.decode.admitted[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("prompt", "n", "prompts"),
    [
        ("a", 1, ["a"]),
        ([5, 6], 1, [[5, 6]]),
        (["a", "bc"], 1, ["a", "bc"]),
        ([[5], [6, 7]], 2, [[5], [5], [6, 7], [6, 7]]),
        ([5, 6], 3, [[5, 6]] * 3),
    ],
)
async def test_prompt_forms_and_choices(prompt: Any, n: int, prompts: list[Any], tokenizer: Tokenizer) -> None:
    expected = [tokenizer.encode(one) if isinstance(one, str) else one for one in prompts]
    async with deployed() as deployment:
        body = (await deployment.complete(prompt=prompt, n=n, return_token_ids=True, seed=4)).json()
        assert [choice["prompt_token_ids"] for choice in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        admitted = deployment.decode.decode.admitted
        assert sorted(list(admit.prompt) for admit in admitted) == sorted(expected)
        assert {admit.sampling.seed for admit in admitted} == set(range(4, 4 + n)), "choices differ, prompts do not"
        assert body["usage"]["prompt_tokens"] == sum(len(one) for one in expected) // n


async def test_stream_order_and_usage(tokenizer: Tokenizer) -> None:
    async with deployed() as deployment:
        script = tokenizer.encode("grün is 7")
        deployment.decode.decode.script.tokens, deployment.prefill.prefill.first_token = script, script[0]
        deployment.decode.decode.script.batch = 2
        chunks = await deployment.stream(
            PATH,
            {
                "prompt": [5, 6],
                "max_tokens": len(script),
                "return_token_ids": True,
                "stream_options": {"include_usage": True},
            },
        )
        *parts, last = chunks
        assert "".join(part["choices"][0]["text"] for part in parts) == "grün is 7"
        assert joined(part["choices"][0]["token_ids"] for part in parts) == script
        assert parts[0]["choices"][0]["prompt_token_ids"] == [5, 6]
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert all(part["usage"] is None for part in parts)
        assert last["choices"] == [] and last["usage"]["total_tokens"] == 2 + len(script)
        assert len({chunk["id"] for chunk in chunks}) == 1


async def test_streamed_choices_are_told_apart() -> None:
    async with deployed() as deployment:
        chunks = await deployment.stream(PATH, {"prompt": [5], "n": 3, "max_tokens": 4, "return_token_ids": True})
        for index in range(3):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert joined(choice["token_ids"] for choice in mine) == FOUR
            assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert all("usage" not in chunk for chunk in chunks)


async def test_stop_string_ends_the_answer_and_the_decode_session(tokenizer: Tokenizer) -> None:
    async with deployed() as deployment:
        script = tokenizer.encode("The pass key is 12. And more and more")
        deployment.decode.decode.script.tokens, deployment.prefill.prefill.first_token = script, script[0]
        deployment.decode.decode.script.delay_s = 0.01
        body = (await deployment.complete(max_tokens=50, stop=["12."])).json()
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The pass key is ", "stop", "12.")
        await until(deployment.idle, "idle after the stop string")
        assert deployment.decode.decode.cancelled == 1


async def test_stop_token_id() -> None:
    async with deployed() as deployment:
        body = (await deployment.complete(max_tokens=50, stop_token_ids=[FIRST + 2], return_token_ids=True)).json()
        (choice,) = body["choices"]
        assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (FOUR[:3], "stop", FIRST + 2)


async def test_logprobs_whole_and_streamed_agree(tokenizer: Tokenizer) -> None:
    async with deployed() as deployment:
        body = {"prompt": [5], "max_tokens": 3, "logprobs": 2}
        whole = (await deployment.http.post(PATH, json=body)).json()["choices"][0]["logprobs"]
        names = [tokenizer.token_text(one) for one in FOUR[:3]]
        assert whole["tokens"] == names
        assert whole["token_logprobs"] == [-0.5] * 3
        assert whole["text_offset"] == [0, len(names[0]), len(names[0] + names[1])]
        assert whole["top_logprobs"][0] == {names[0]: -0.5, names[1]: -1.5}
        chunks = await deployment.stream(PATH, body)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        for key, values in whole.items():
            assert joined(part[key] for part in parts) == values, key


@pytest.mark.parametrize(
    ("body", "status", "param", "part"),
    [
        ({"prompt": [1] * 4096}, 400, "prompt", "4096 tokens"),
        ({"prompt": [5], "max_tokens": 5000}, 400, "max_tokens", "at most 4095"),
        ({"prompt": [5], "max_tokens": -1}, 400, "max_tokens", "at least 1"),
        ({"prompt": [5], "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"prompt": [5], "max_tokens": "many"}, 400, "max_tokens", "integer"),
        ({"prompt": [5], "max_tokens": 1.5}, 400, "max_tokens", "integer"),
        ({"prompt": [5], "model": "gpt-4"}, 404, "model", "'passkey'"),
        ({"prompt": [713]}, 400, "prompt", "0 to 712"),
        ({"prompt": [2**70]}, 400, "prompt", "0 to 712"),
        ({"prompt": [-1]}, 400, "prompt", "0 to 712"),
        ({"prompt": ""}, 400, "prompt", "is empty"),
        ({"prompt": []}, 400, "prompt", "is empty"),
        ({"prompt": [[]]}, 400, "prompt", "is empty"),
        ({"prompt": ["a", ""]}, 400, "prompt", "is empty"),
        ({}, 400, "prompt", "is required"),
        ({"prompt": {"a": 1}}, 400, "prompt", "legal: a string"),
        ({"prompt": [5, "a"]}, 400, "prompt", "holds 'a'; legal: a string"),
        ({"prompt": [True]}, 400, "prompt", "legal: a string"),
        ({"prompt": "\ud800"}, 400, "prompt", "surrogate"),
        ({"prompt": [5], "model": "\ud800"}, 404, "model", "not served"),
        ({"prompt": [5], "temperature": -1}, 400, "temperature", "at least 0"),
        ({"prompt": [5], "temperature": "hot"}, 400, "temperature", "number"),
        ({"prompt": [5], "top_p": 0}, 400, "top_p", "above 0"),
        ({"prompt": [5], "seed": 2**65}, 400, "seed", "legal"),
        ({"prompt": [5], "stop": [1]}, 400, "stop", "string"),
        ({"prompt": [5], "stop": ""}, 400, "stop", "not empty"),
        ({"prompt": [5], "stop_token_ids": [-1]}, 400, "stop_token_ids", "0 to 712"),
        ({"prompt": [5], "logprobs": 100}, 400, "logprobs", "0 to 20"),
        ({"prompt": [5], "n": 0}, 400, "n", "greater than or equal to 1"),
        ({"prompt": [5], "stream_options": {"include_usage": True}}, 400, "stream_options", "stream = true"),
        ({"prompt": [5], "echo": True}, 400, "echo", "not supported"),
        ({"prompt": [5], "best_of": 3}, 400, "best_of", "not supported"),
        ({"prompt": [5], "prompt_logprobs": 1}, 400, "prompt_logprobs", "not supported"),
        ({"prompt": [5], "frequency_penalty": 0.5}, 400, "frequency_penalty", "not supported"),
        ({"prompt": [5], "request_id": "a b"}, 400, "request_id", "legal"),
    ],
)
async def test_bad_input_is_a_clear_4xx(
    shared: Deployment, body: dict[str, Any], status: int, param: str, part: str
) -> None:
    response = await shared.post_json(PATH, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, status)
    assert error["message"].startswith(f"{param}: ") and part in error["message"], error
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert shared.decode.decode.admitted == [] and shared.in_flight == 0


async def test_bad_input_of_a_stream_is_a_plain_error(shared: Deployment) -> None:
    response = await shared.post_json(PATH, {"prompt": [5], "stream": True, "max_tokens": -1})
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b'{"prompt": [1, 2', "not JSON"),
        (b"", "JSON object"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b'{"prompt": [5], "temperature": NaN}', "temperature"),
        (b"[" * 100_000, "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"prompt": "ab\xff"}', "not UTF-8: invalid start byte at byte 14"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "JSON"),
    ],
)
async def test_broken_json_is_400(shared: Deployment, content: bytes, part: str) -> None:
    response = await shared.http.post(PATH, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert part in response.json()["error"]["message"]


async def test_body_beyond_the_limit_is_413(shared: Deployment) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    response = await shared.http.post(PATH, content=endless(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]


async def test_unknown_fields_are_ignored_and_neutral_ones_accepted() -> None:
    async with deployed() as deployment:
        response = await deployment.complete(
            max_tokens=2, what_is_this=[1], user="me", echo=False, frequency_penalty=0, top_k=-1, seed=-5, suffix=None
        )
        assert response.status_code == 200
        assert deployment.decode.decode.admitted[0].sampling.seed == 2**64 - 5


async def test_no_workers_is_503_and_bad_input_still_4xx() -> None:
    async with deployed(workers=False) as deployment:
        response = await deployment.complete()
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, 503)
        assert "no complete prefill and decode group is ready" in error["message"]
        assert (await deployment.complete(max_tokens=-1)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_429_with_retry_after(stream: bool) -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.refuse = (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "decode.max_waiting = 2 are waiting",
        )
        response = await deployment.complete(stream=stream)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert error["type"] == "rate_limit_error" and "decode.max_waiting = 2" in error["message"]


async def test_failure_mid_stream_is_the_last_event() -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.break_after = 2
        *parts, last = await deployment.stream(PATH, {"prompt": [5], "return_token_ids": True})
        assert joined(part["choices"][0]["token_ids"] for part in parts) == FOUR[:2]
        assert last["error"]["code"] == 503
        assert "pull of layer 1 failed" in last["error"]["message"]
        whole = await deployment.complete()
        assert whole.status_code == 503 and "decode-0/dp0/tp0" in whole.json()["error"]["message"]
        await until(deployment.idle, "idle after the failures")


async def test_one_failed_choice_ends_the_others() -> None:
    async with deployed() as deployment:
        script = deployment.decode.decode.script
        script.break_after, script.delay_s = 3, 0.02
        response = await deployment.complete(n=4, max_tokens=9)
        assert response.status_code == 503
        await until(deployment.idle, "idle after the failure")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["destination", "prefilled", "finished"])
async def test_disconnect_cancels_the_request(stage: str, stream: bool) -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.hold = stage
        with pytest.raises(httpx.ReadTimeout):
            async with deployment.http.stream(
                "POST", PATH, json={"prompt": [5], "max_tokens": 2, "stream": stream}, timeout=0.3
            ) as response:
                await response.aread()
        await until(deployment.idle, "idle after the client went away")
        assert deployment.decode.decode.cancelled == 1


async def test_two_calls_with_one_id() -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.hold = "finished"
        first = asyncio.create_task(deployment.complete(request_id="mine"))
        await until(lambda: deployment.in_flight == 1, "the first runs")
        headers = {"X-Request-Id": "mine"}
        second = await deployment.http.post(PATH, json={"prompt": [5]}, headers=headers)
        assert second.status_code == 400
        assert second.json()["error"]["param"] == "request_id"
        first.cancel()
        await until(deployment.idle, "idle after the cancel")
        deployment.decode.decode.script.hold = ""
        third = await deployment.http.post(PATH, json={"prompt": [5], "n": 2}, headers=headers)
        assert third.json()["id"] == "cmpl-mine"


async def test_checkpoint_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODEL_DIR / "config.json").read_text())
    async with deployed(model_dir=tmp_path) as deployment:
        body = (await deployment.complete(max_tokens=2, return_token_ids=True, logprobs=1)).json()
        (choice,) = body["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", FOUR[:2])
        assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in FOUR[:2]]
        response = await deployment.complete(prompt="text")
        assert response.status_code == 400 and "no tokenizer" in response.json()["error"]["message"]
