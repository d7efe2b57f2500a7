"""POST /v1/chat/completions over fake workers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.tokenizer import Tokenizer
from tests.meta_server.deployment import Deployment, deployed, joined
from tests.meta_server.fakes import FIRST

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the pass key?"}]


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def answer_with(deployment: Deployment, ids: list[int]) -> None:
    deployment.decode.decode.script.tokens, deployment.prefill.prefill.first_token = ids, ids[0]


async def test_chat_goes_through_the_template(tokenizer: Tokenizer) -> None:
    async with deployed() as deployment:
        answer_with(deployment, [*tokenizer.encode("The pass key is 12."), 2])
        body = (await deployment.http.post(PATH, json={"messages": MESSAGES, "return_token_ids": True})).json()
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "The pass key is 12."}
        assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] == 2
        assert body["prompt_token_ids"] == chat_ids(tokenizer, MESSAGES)
        assert list(deployment.decode.decode.admitted[0].prompt) == body["prompt_token_ids"]
        assert body["object"] == "chat.completion" and body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_length_fields_reach_the_workers(field: str) -> None:
    async with deployed() as deployment:
        await deployment.http.post(PATH, json={"messages": MESSAGES, field: 3})
        assert deployment.decode.decode.admitted[0].sampling.max_tokens == 3
        response = await deployment.http.post(PATH, json={"messages": MESSAGES, field: 99999})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


async def test_default_length_is_the_rest_of_what_decode_holds(tokenizer: Tokenizer) -> None:
    async with deployed(workers=False) as deployment:
        await deployment.add("prefill")
        await deployment.add("decode", max_request_tokens=300)
        await deployment.http.post(PATH, json={"messages": MESSAGES})
        (admit,) = deployment.decode.decode.admitted
        assert admit.sampling.max_tokens == 300 - len(chat_ids(tokenizer, MESSAGES))


async def test_stream_begins_with_the_role_and_ends_with_a_reason(tokenizer: Tokenizer) -> None:
    async with deployed() as deployment:
        ids = tokenizer.encode("The pass key")
        answer_with(deployment, ids)
        body = {
            "messages": MESSAGES,
            "max_tokens": len(ids),
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        first, *parts, usage = await deployment.stream(PATH, body)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "The pass key"
        assert joined(part["choices"][0]["token_ids"] for part in parts) == ids
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(ids)
        assert {chunk["object"] for chunk in [first, *parts, usage]} == {"chat.completion.chunk"}


async def test_logprobs(tokenizer: Tokenizer) -> None:
    async with deployed() as deployment:
        body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        (choice,) = (await deployment.http.post(PATH, json=body)).json()["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [tokenizer.token_text(one) for one in (FIRST, FIRST + 1)]
        assert content[0]["logprob"] == -0.5 and len(content[0]["top_logprobs"]) == 2
        assert bytes(content[1]["bytes"]).decode() == content[1]["token"]
        chunks = await deployment.stream(PATH, body)
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert joined(part["content"] for part in streamed) == content


async def test_content_parts_are_joined(tokenizer: Tokenizer) -> None:
    async with deployed() as deployment:
        parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the pass key?"}]
        await deployment.http.post(PATH, json={"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
        expected = chat_ids(tokenizer, [{"role": "user", "content": "What is\nthe pass key?"}])
        assert list(deployment.decode.decode.admitted[0].prompt) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [*MESSAGES, {"role": "system", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "messages"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_bad_input_names_the_field(shared: Deployment, body: dict[str, Any], param: str) -> None:
    response = await shared.post_json(PATH, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and param in error["message"]
    assert shared.decode.decode.admitted == []
