"""Two decode ranks in two processes: one host pool, one sequence of turns, one answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode_node.commands import Join, RankEndpoint, Report
from decode_node.follower import FollowerLoop
from decode_node.joining import await_join, call_followers, gather_endpoints
from engine.model.parallel import TensorParallelGroup
from engine.model.shard import Shard
from engine.sampling_params import SamplingParams
from engine.tp_channel import TpFollower, TpLeader
from tests.checkpoints import drafting_checkpoint, random_checkpoint
from tests.decode_node.local_node import LocalNode, LocalRank
from tests.model.test_parallel import run_ranks
from tests.oracle import Oracle, assert_tokens_match

LENGTHS = (3, 70, 150)
TOKENS = 12
HOT = 64
PATIENCE_S = 60.0


class FileMemory:
    """Host memory that both processes map."""

    address = 0

    def __init__(self, path: Path) -> None:
        self._bytes = torch.from_file(str(path), shared=True, size=16 << 20, dtype=torch.uint8)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[offset : offset + count].view(dtype).view(*shape)


def prompt_of(length: int) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def decode(rank: int, model_dir: Path, run_dir: Path, drafts: int) -> object:
    group = TensorParallelGroup(Shard(rank, 2), f"file://{run_dir}/meeting", timeout_s=PATIENCE_S)
    host = FileMemory(run_dir / "host")
    try:
        return (follow if rank else lead)(model_dir, run_dir, drafts, group=group, host=host)
    finally:
        group.close()


def options(drafts: int) -> dict[str, int]:
    return {"speculative_tokens": drafts, "hot_tokens": (1 + drafts) * HOT}


def lead(model_dir: Path, run_dir: Path, drafts: int, *, group: TensorParallelGroup, host: FileMemory) -> object:
    channel = TpLeader(run_dir, "decode", 2)
    call_followers(channel, Join("tcp://store"), PATIENCE_S)
    node = LocalNode(model_dir, run_dir, channel=channel, group=group, host=host, **options(drafts))
    endpoints = gather_endpoints(channel, RankEndpoint("zero", "e0"), 2, PATIENCE_S)
    sessions = []
    for length in LENGTHS:
        sessions.append(node.start(f"r{length}", prompt_of(length), SamplingParams(TOKENS, 0, ignore_eos=True)))
        node.loop.turn(0.001)
    node.finish(*sessions)
    return [session.tokens for session in sessions], endpoints


def follow(model_dir: Path, run_dir: Path, drafts: int, *, group: TensorParallelGroup, host: FileMemory) -> object:
    channel = TpFollower(run_dir, "decode", 1)
    join = await_join(channel, PATIENCE_S)
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    follower = LocalRank(model_dir, reports.put, group=group, host=host, **options(drafts))
    for length in LENGTHS:
        follower.prefill(f"r{length}", prompt_of(length))
    channel.report(RankEndpoint("one", "e1"))
    loop = FollowerLoop(follower.rank, channel, reports)
    thread = threading.Thread(target=loop.run)
    thread.start()
    steps = (TOKENS - 1) * len(LENGTHS)
    while follower.rank.counters.tokens < steps and thread.is_alive():
        thread.join(0.05)
    thread.join(1.0)  # time to report the last release
    loop.stop()
    thread.join(PATIENCE_S)
    return join, follower.rank.counters.tokens


@pytest.mark.parametrize("drafts", [0, 2])
def test_two_ranks_share_one_host_pool_and_answer_as_one(tmp_path: Path, drafts: int) -> None:
    make = drafting_checkpoint if drafts else random_checkpoint
    model_dir = make(tmp_path / "model", "deepseek_v32")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "host").write_bytes(bytes(16 << 20))
    (answers, endpoints), (join, followed) = run_ranks(2, decode, model_dir, run_dir, drafts)
    assert endpoints == [RankEndpoint("zero", "e0"), RankEndpoint("one", "e1")]
    assert join == Join("tcp://store")
    assert followed == (TOKENS - 1) * len(LENGTHS)
    for length, tokens in zip(LENGTHS, answers, strict=True):
        assert_tokens_match(tokens, Oracle(model_dir).greedy(prompt_of(length), TOKENS))
