"""LIM in the decode loop (`decode.selection: lim`) selects what residency does, whatever a request lives through."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.model.attention import IndexerQuery
from tests.checkpoints import drafting_checkpoint, random_checkpoint
from tests.decode_node.local_node import LocalNode
from tests.decode_node.test_backend import BLOCK, TOPK, Caches
from tests.decode_node.test_decode_exact import greedy, prompt_of
from tests.oracle import Oracle, assert_tokens_match

REUSE = ["full", "shared", "full", "shared"]


def lives() -> tuple[Caches, Caches]:
    """The same random rows under both selections; hot rows of three top-k."""
    both = []
    for selection in ("lim", "residency"):
        caches = Caches(hot=3 * TOPK, selection=selection)
        for row, first in ((0, 1), (2, 30)):
            blocks = list(range(first, first + 26))
            caches.tables.bind(row, blocks, blocks)
            caches.fill(blocks)
        both.append(caches)
    return both[0], both[1]


@pytest.mark.parametrize("seed", range(3))
def test_attention_equals_that_of_residency(seed: int) -> None:
    """Two requests of other lengths, passes of one to three tokens of which some prove wrong, steps left out, and rows
    handed on: from below the top-k to far past the hot row. Cache slots nothing was written to hold NaN."""
    lim, residency = lives()
    rng = random.Random(seed)
    positions, generations = {0: 5 + 90 * seed, 2: 60 + 70 * seed}, {0: 1, 2: 2}
    farthest = 0
    for step in range(130):
        rows = [row for row in positions if rng.random() < 0.9] or [0]
        counts = [rng.randint(1, 3) for _ in rows]
        if step in (50, 90):  # another request takes the row
            generations[rows[0]], positions[rows[0]] = 10 + step, rng.choice([3, 70, 200])
        new = lim.new_rows(sum(counts))
        outputs = []
        for caches in (lim, residency):
            starts = torch.tensor([positions[row] for row in rows])
            held = torch.tensor([generations[row] for row in rows])
            caches.backend.begin(torch.tensor(rows), held, starts, torch.tensor(counts))
            outputs.append(caches.backend.attend(0, *new[:4], IndexerQuery(*new[4:])))
        assert torch.allclose(*outputs, atol=1e-5), f"step {step} at {positions}"
        for row, count in zip(rows, counts, strict=True):
            positions[row] = min(positions[row] + rng.randint(1, count), 26 * BLOCK - 3)
        farthest = max(farthest, *positions.values())
    assert farthest > 3 * TOPK + 2 * BLOCK


def test_a_short_request_is_fetched_once() -> None:
    """All of it is resident at its own slots, and new rows are written there."""
    caches = Caches(selection="lim")
    caches.tables.bind(0, [3, 4], [3, 4])
    caches.fill([3, 4])
    assert caches.step(row=0, generation=1, position=10) == (0, 10)
    assert caches.step(row=0, generation=1, position=11) == (11, 0)
    assert caches.step(row=0, generation=1, position=12) == (12, 0)
    assert caches.step(row=0, generation=2, position=12) == (0, 12)


@pytest.mark.parametrize(
    ("family", "drafts", "options"),
    [
        ("deepseek_v32", 0, {}),
        ("glm_moe_dsa", 2, {"indexer_types": REUSE}),
        ("glm_moe_dsa", 3, {"index_share_for_mtp_iteration": True}),
    ],
)
def test_equals_transformers(tmp_path: Path, family: str, drafts: int, options: dict[str, object]) -> None:
    """At the smallest hot buffer, below and above it and past it; more requests than hot rows."""
    make = drafting_checkpoint if drafts else random_checkpoint
    checkpoint = make(tmp_path / "m", family, seed=3, **options)
    node = LocalNode(
        checkpoint,
        tmp_path,
        selection="lim",
        speculative_tokens=drafts,
        hot_tokens=(1 + drafts) * TOPK,
        max_requests=3,
    )
    sessions = [node.start(f"r{length}", prompt_of(length), greedy(80)) for length in (1, 17, 63, 200, 300)]
    node.finish(*sessions)
    for session in sessions:
        assert_tokens_match(session.tokens, Oracle(checkpoint).greedy(session.prompt, 80))
    assert node.backend.counters.misses > 0 and node.backend.counters.hits > 0
    if drafts:
        assert node.rank.counters.accepted_tokens > 0


def test_int8_keys_and_drafts_answer_as_with_residency(tmp_path: Path) -> None:
    checkpoint = drafting_checkpoint(tmp_path / "m", "deepseek_v32", seed=3)
    answers = []
    for selection in ("lim", "residency"):
        node = LocalNode(
            checkpoint,
            tmp_path,
            selection=selection,
            indexer_dtype="int8",
            speculative_tokens=1,
            hot_tokens=2 * TOPK,
        )
        sessions = [node.start(f"r{length}", prompt_of(length), greedy(40)) for length in (40, 150, 260)]
        node.finish(*sessions)
        answers.append(([session.tokens for session in sessions], node.rank.counters.accepted_tokens))
    assert answers[0] == answers[1]
