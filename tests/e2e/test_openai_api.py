"""The OpenAI API of a running deployment: streams, chats, log-probabilities, disconnects, health."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from benchmarks.passkey import make_prompt
from tests.cluster import Cluster
from tests.e2e.test_equal_to_transformers import prompt_of

pytestmark = pytest.mark.cluster

TEXT, ANSWER = make_prompt(900, 0.6, 5)
QUESTION: dict[str, Any] = {"prompt": TEXT, "max_tokens": 40, "temperature": 0, "stop": ["\n"]}


def test_streamed_answer_equals_the_whole_one(passkey_cluster: Cluster) -> None:
    whole = passkey_cluster.complete(TEXT, 40, stop=["\n"])
    events = list(
        passkey_cluster.stream(
            "/v1/completions", QUESTION | {"return_token_ids": True, "stream_options": {"include_usage": True}}
        )
    )
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole.text
    assert whole.text.endswith(f"is {ANSWER}.")
    assert [token for choice in choices for token in choice["token_ids"] or []] == whole.tokens
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    usage, first = events[-1]["usage"], whole.body["usage"]
    assert usage.pop("prompt_tokens_details")["cached_tokens"] >= first.pop("prompt_tokens_details")["cached_tokens"]
    assert usage == first


def test_several_prompts_and_choices(passkey_cluster: Cluster) -> None:
    prompts = [prompt_of(20), prompt_of(33)]
    body = {"prompt": prompts, "n": 2, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choices = passkey_cluster.post("/v1/completions", body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    expected = [passkey_cluster.complete(prompt, 5, ignore_eos=True).tokens for prompt in prompts]
    assert [choice["token_ids"] for choice in choices] == [expected[0]] * 2 + [expected[1]] * 2


def test_chat_is_answered_and_streamed(passkey_cluster: Cluster) -> None:
    content = "The pass key for otter is 48151. Rain falls on the roof.\nWhat is the pass key for otter?"
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_completion_tokens": 30}
    answer = passkey_cluster.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert "48151" in answer
    deltas = [event["choices"][0]["delta"] for event in passkey_cluster.stream("/v1/chat/completions", body)]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer


def test_logprobs_are_those_of_the_chosen_tokens(passkey_cluster: Cluster) -> None:
    answer = passkey_cluster.complete(prompt_of(30), 6, ignore_eos=True, logprobs=3)
    logprobs = answer.body["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(answer.tokens) == len(logprobs["top_logprobs"])
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert math.isclose(chosen, max(top.values()), abs_tol=1e-4), "greedy tokens are the most likely ones"
        assert sum(map(math.exp, top.values())) <= 1 + 1e-4


def test_a_seed_fixes_a_sampled_text(passkey_cluster: Cluster) -> None:
    def sampled(seed: int) -> list[int]:
        fields = {"temperature": 1.5, "seed": seed, "ignore_eos": True}
        return passkey_cluster.complete(prompt_of(30), 24, **fields).tokens

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize("events", [0, 3])
def test_a_client_that_leaves_frees_everything(passkey_cluster: Cluster, events: int) -> None:
    body = {"prompt": prompt_of(6000), "max_tokens": 5000, "temperature": 0, "ignore_eos": True}
    if events:
        stream = passkey_cluster.stream("/v1/completions", body)
        for _ in range(events):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    else:
        passkey_cluster.post_and_leave("/v1/completions", body, after_s=0.3)
    passkey_cluster.wait_idle(10)


def test_models_health_and_metrics(passkey_cluster: Cluster) -> None:
    model = passkey_cluster.get("/v1/models").json()["data"][0]
    assert model["id"] == "passkey-glm"
    assert passkey_cluster.get("/health").status_code == 200
    metrics = passkey_cluster.get("/metrics")
    assert metrics.status_code == 200 and "# TYPE" in metrics.text


def test_every_process_serves_health_and_reflection(passkey_cluster: Cluster) -> None:
    addresses = [worker.info.grpc_address for worker in passkey_cluster.status().workers]
    for address in [passkey_cluster.grpc_address, *addresses]:
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            reply = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
            names = {service.name for service in reply.list_services_response.service}
            assert "grpc.health.v1.Health" in names and any(name.startswith("sluice.v1.") for name in names)
