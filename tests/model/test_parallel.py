"""Two ranks in two processes compute what one does, and neither waits for ever for the other."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.parallel import TensorParallelGroup
from engine.model.shard import Shard, TensorParallelError
from tests.checkpoints import random_checkpoint
from tests.model.runner import Runner, random_prompt
from tests.oracle import Oracle, assert_tokens_match

_DEADLINE_S = 120.0


def run_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(rank, *args)` in one new process per rank; what each returned, by rank."""
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[int, Any]] = context.Queue()
    processes = [
        context.Process(target=_report, args=(answers, rank, work, args), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        received = dict(answers.get(timeout=_DEADLINE_S) for _ in processes)
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()
    return [received[rank] for rank in range(ranks)]


def _report(answers: Queue[tuple[int, Any]], rank: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answers.put((rank, work(rank, *args)))
    except Exception as error:  # the test is to see it now, not after the deadline
        answers.put((rank, error))


def decode(rank: int, model_dir: Path, meeting: Path, prompts: list[list[int]]) -> tuple[list[list[int]], Any]:
    group = TensorParallelGroup(Shard(rank, 2), f"file://{meeting}", timeout_s=60.0)
    runner = Runner(model_dir, group=group)
    tokens = [runner.greedy(prompt, 10, chunk=100) for prompt in prompts]
    logits = runner.logits(prompts[-1]).numpy()
    group.close()
    return tokens, logits


@pytest.mark.parametrize(
    ("model_type", "seed", "overrides"),
    [("deepseek_v32", 8, {}), ("glm_moe_dsa", 0, {"indexer_types": ["full", "shared", "full", "shared"]})],
)
def test_two_ranks_equal_the_oracle(tmp_path: Path, model_type: str, seed: int, overrides: dict[str, Any]) -> None:
    model_dir = random_checkpoint(tmp_path / "model", model_type, seed, **overrides)
    prompts = [random_prompt(length) for length in (1, 65)]
    (tokens, logits), (other_tokens, other_logits) = run_ranks(2, decode, model_dir, tmp_path / "meeting", prompts)
    assert tokens == other_tokens
    assert (logits == other_logits).all(), "ranks must agree bit for bit, or they may sample different tokens"
    torch.testing.assert_close(torch.from_numpy(logits), Runner(model_dir).logits(prompts[-1]), atol=2e-4, rtol=0)
    oracle = Oracle(model_dir)
    for prompt, got in zip(prompts, tokens, strict=True):
        assert_tokens_match(got, oracle.greedy(prompt, 10))


def join_alone(rank: int, meeting: Path) -> str:
    try:
        TensorParallelGroup(Shard(rank, 2), f"file://{meeting}", timeout_s=1.0)
    except TensorParallelError as error:
        return str(error)
    return "joined"


def test_a_lone_rank_gives_up_after_the_timeout(tmp_path: Path) -> None:
    started = time.monotonic()
    (message,) = run_ranks(1, join_alone, tmp_path / "meeting")
    assert message.startswith("tensor parallel rank 0 of 2 failed at joining file://")
    assert "(timeout 1 s)" in message
    assert time.monotonic() - started < 30.0


def sum_once_then_rank_0_alone(rank: int, meeting: Path) -> str:
    group = TensorParallelGroup(Shard(rank, 2), f"file://{meeting}", timeout_s=20.0)
    group.all_reduce(torch.ones(4))
    try:
        if rank == 0:
            group.all_reduce(torch.ones(4))
    except TensorParallelError as error:
        return str(error)
    finally:
        group.close()
    return "left"


def test_a_lost_peer_is_an_error_not_a_hang(tmp_path: Path) -> None:
    message, peer = run_ranks(2, sum_once_then_rank_0_alone, tmp_path / "meeting")
    assert peer == "left"
    assert message.startswith("tensor parallel rank 0 of 2 failed at summing a [4] tensor (timeout 20 s): ")
