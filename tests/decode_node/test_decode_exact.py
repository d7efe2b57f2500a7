"""Decode from a hot buffer attends exactly the indexer's top-k: greedy tokens equal transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.passkey import make_prompt
from decode_node.finish import FinishReason
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.checkpoints import PASSKEY_GLM, random_checkpoint
from tests.decode_node.local_node import LocalNode
from tests.oracle import Oracle, assert_tokens_match

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 300)
SMALLEST_HOT = 64  # = index_topk of the tiny models


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model") / "m", request.param)


@pytest.fixture(scope="module")
def shared_index_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["full", "shared", "full", "shared"]
    return random_checkpoint(tmp_path_factory.mktemp("model") / "m", "glm_moe_dsa", indexer_types=kinds)


def test_equals_transformers_at_the_smallest_hot_buffer(checkpoint: Path, tmp_path: Path) -> None:
    """One at a time: below, at and above the block size, index_topk and the hot buffer."""
    node, oracle = LocalNode(checkpoint, tmp_path, hot_tokens=SMALLEST_HOT), Oracle(checkpoint)
    for length in LENGTHS:
        session = node.start(f"r{length}", prompt_of(length), greedy(24))
        node.finish(session)
        assert_tokens_match(session.tokens, oracle.greedy(session.prompt, 24))
    assert node.backend.counters.misses > 0
    assert node.backend.counters.hits > 0


def test_generating_past_the_hot_buffer_equals_transformers(checkpoint: Path, tmp_path: Path) -> None:
    """From one token to twice the hot buffer: rows decode itself wrote are evicted and fetched back from the host."""
    node = LocalNode(checkpoint, tmp_path, hot_tokens=SMALLEST_HOT)
    session = node.start("long", prompt_of(1), greedy(2 * SMALLEST_HOT + 20))
    node.finish(session)
    assert_tokens_match(session.tokens, Oracle(checkpoint).greedy(session.prompt, 2 * SMALLEST_HOT + 20))
    assert node.backend.counters.misses > 2 * SMALLEST_HOT * len(node.model.indexer_layers)


def test_index_reuse_equals_transformers(shared_index_checkpoint: Path, tmp_path: Path) -> None:
    node = LocalNode(shared_index_checkpoint, tmp_path, hot_tokens=SMALLEST_HOT)
    oracle = Oracle(shared_index_checkpoint)
    sessions = [node.start(f"r{length}", prompt_of(length), greedy(24)) for length in (3, 65, 300)]
    node.finish(*sessions)
    for session in sessions:
        assert_tokens_match(session.tokens, oracle.greedy(session.prompt, 24))


def test_requests_join_and_leave_a_running_batch(checkpoint: Path, tmp_path: Path) -> None:
    """More requests than hot rows, of many lengths and ends: each answer is the one it gets alone."""
    node, oracle = LocalNode(checkpoint, tmp_path, hot_tokens=96, max_requests=3), Oracle(checkpoint)
    wanted = {length: 5 + 7 * (index % 4) for index, length in enumerate(LENGTHS)}
    sessions = {}
    for length, tokens in wanted.items():
        sessions[length] = node.start(f"r{length}", prompt_of(length), greedy(tokens))
        for _ in range(3):
            node.loop.turn(0.0)
    node.finish(*sessions.values())
    for length, session in sessions.items():
        assert_tokens_match(session.tokens, oracle.greedy(session.prompt, wanted[length]))


def test_a_hot_row_is_handed_on_clean(checkpoint: Path, tmp_path: Path) -> None:
    """With one row, the second request meets the first one's slots, of equal positions and other contents."""
    node = LocalNode(checkpoint, tmp_path, hot_tokens=SMALLEST_HOT, max_requests=1)
    first, second = (node.start(name, prompt_of(130, seed), greedy(12)) for name, seed in (("a", 1), ("b", 2)))
    node.finish(first, second)
    for session in (first, second):
        assert_tokens_match(session.tokens, Oracle(checkpoint).greedy(session.prompt, 12))


@pytest.mark.parametrize("length", [12, 63, 300])
def test_an_answer_depends_on_the_host_pool(checkpoint: Path, tmp_path: Path, length: int) -> None:
    """Zero the host rows of one of two equal requests: its answer changes, the other one's does not."""
    node = LocalNode(checkpoint, tmp_path, erase="erase-me", hot_tokens=SMALLEST_HOT)
    kept, erased = (node.start(name, prompt_of(length), greedy(24)) for name in ("keep-me", "erase-me"))
    node.finish(kept, erased)
    assert_tokens_match(kept.tokens, Oracle(checkpoint).greedy(kept.prompt, 24))
    assert erased.tokens[0] == kept.tokens[0]  # prefill's
    assert erased.tokens != kept.tokens


def test_a_damaged_request_ends_alone(checkpoint: Path, tmp_path: Path) -> None:
    """Logits that are no numbers end their own request with an error that names it; the others go on."""
    node = LocalNode(checkpoint, tmp_path, hot_tokens=SMALLEST_HOT)
    good, bad = (node.start(name, prompt_of(40), greedy(20)) for name in ("good", "bad"))
    node.run_until(lambda: len(good.tokens) >= 3)
    damaged = next(state for state in node.scheduler.running() if state.request.request_id == "bad")
    blocks = node.tables.main[damaged.row, :2].long()
    node.memory.host_ckv[0][blocks] = float("nan")
    node.memory.hot_ckv[0][list(node.geometry.hot.blocks(damaged.row))] = float("nan")
    node.finish(good, bad)
    assert_tokens_match(good.tokens, Oracle(checkpoint).greedy(good.prompt, 20))
    assert good.ended is not None
    assert good.ended.outcome is FinishReason.LENGTH
    assert bad.ended is not None
    assert "request bad: the model's logits are not finite numbers" in str(bad.ended.outcome)


@pytest.mark.parametrize("max_model_len", [307, 320])
def test_the_last_token_of_the_context_is_reached(checkpoint: Path, tmp_path: Path, max_model_len: int) -> None:
    """Prompt + output fill the longest request exactly, also when it is no multiple of the block size."""
    node = LocalNode(checkpoint, tmp_path, max_model_len=max_model_len, hot_tokens=SMALLEST_HOT)
    assert node.geometry.max_request_tokens == max_model_len
    tokens = max_model_len - 290
    session = node.start("r", prompt_of(290), greedy(tokens))
    node.finish(session)
    assert_tokens_match(session.tokens, Oracle(checkpoint).greedy(session.prompt, tokens))


def test_bfloat16_answers_the_passkey(tmp_path: Path) -> None:
    """The trained model in bfloat16, over a context 16 times its index_topk."""
    text, answer = make_prompt(1024, 0.3, seed=5)
    tokenizer = Tokenizer.from_dir(PASSKEY_GLM)
    assert tokenizer is not None
    node = LocalNode(PASSKEY_GLM, tmp_path, dtype="bfloat16", hot_tokens=SMALLEST_HOT)
    session = node.start("passkey", tokenizer.encode(text), greedy(16))
    node.finish(session)
    assert answer in tokenizer.decode(session.tokens)
