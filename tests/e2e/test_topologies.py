"""Several prefill groups and decode replicas, and bfloat16: every combination answers what the text says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.passkey import make_prompt
from tests.cluster import Cluster
from tests.e2e.conftest import BASE

pytestmark = pytest.mark.cluster


def test_two_groups_and_two_replicas_in_bfloat16(checkpoints: dict[str, Path]) -> None:
    fields = BASE | {"model.dtype": "bfloat16", "prefill.groups": 2, "decode.dp": 2}
    questions = [make_prompt(1500, depth / 8, seed=depth) for depth in range(8)]
    with Cluster(checkpoints["passkey"], fields) as cluster:
        answers = cluster.complete_all([text for text, _ in questions], 20, stop=["\n"])
        assert [key in answer.text for (_, key), answer in zip(questions, answers, strict=True)] == [True] * 8
        cluster.wait_idle()
        for worker in cluster.status().workers:
            assert worker.status.counters["tokens"] > 0, f"{worker.info.worker_id} had nothing to do"
