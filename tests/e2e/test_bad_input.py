"""Every mistake of a client is a clear 4xx and leaves nothing behind."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster

pytestmark = pytest.mark.cluster

GOOD: dict[str, object] = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}

BAD = [
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [5] * 70000}, 400, "70000"),
    ({"prompt": [5, 713]}, 400, "713"),
    ({"prompt": [5, -1]}, 400, "-1"),
    ({"prompt": [[5], [2**40]]}, 400, str(2**40)),
    ({"prompt": {"text": "x"}}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 10**9}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"model": "no-such-model"}, 404, "no-such-model"),
    ({"temperature": -1}, 400, "temperature"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"stop": 7}, 400, "stop"),
    ({"stop_token_ids": [99999]}, 400, "stop_token_ids"),
    ({"logprobs": -2}, 400, "logprobs"),
]


@pytest.mark.parametrize(("fields", "status", "named"), BAD, ids=lambda value: str(value)[:40])
def test_bad_completions_are_refused(
    passkey_cluster: Cluster, fields: dict[str, object], status: int, named: str
) -> None:
    response = passkey_cluster.post("/v1/completions", GOOD | fields)
    assert response.status_code == status, response.text
    assert named in response.json()["error"]["message"]


def test_broken_json_is_refused(passkey_cluster: Cluster) -> None:
    response = passkey_cluster.post_raw("/v1/completions", b'{"prompt": [1, 2')
    assert response.status_code == 400, response.text
    assert "JSON" in response.json()["error"]["message"]


def test_good_requests_are_served_after_all_that(passkey_cluster: Cluster) -> None:
    for fields, _, _ in BAD:
        passkey_cluster.post("/v1/completions", GOOD | fields)
    answers = passkey_cluster.complete_all([[5, 6, 7]] * 4, 4, ignore_eos=True)
    assert all(len(answer.tokens) == 4 and answer.tokens == answers[0].tokens for answer in answers)
    passkey_cluster.wait_idle()
