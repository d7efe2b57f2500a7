"""Reads that damage bytes: without checksums the answers change, with them they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.e2e.conftest import BASE
from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

pytestmark = pytest.mark.cluster


def test_checksums_keep_damaged_reads_out_of_answers(checkpoints: dict[str, Path], oracles: dict[str, Oracle]) -> None:
    fields = {"transfer.checksum": "all", "transfer.read_retries": 6, "faults.read_corrupt": 0.1}
    with Cluster(checkpoints["glm_moe_dsa"], BASE | fields) as cluster:
        for length in (100, 700, 1500):
            answer = cluster.complete(prompt_of(length), 8, ignore_eos=True)
            assert_tokens_match(answer.tokens, oracles["glm_moe_dsa"].greedy(prompt_of(length), 8))
        cluster.wait_idle()
        assert cluster.worker("decode-0/dp0/tp0").status.counters["pull_wrong_checksums"] > 0
