"""Two TP ranks: both compute what rank 0 plans, with rows from the pool that rank 0 alone writes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from engine.tp_channel import TpFollower, TpLeader
from prefill_node.assembly import CALL_PATIENCE, TELL_PATIENCE
from prefill_node.follower import follow
from prefill_node.leader import RankLost
from prefill_node.outcome import PrefillResult
from prefill_node.saved_steps import saved_steps
from prefill_node.steps import RouteOpened, Stop
from tests.prefill_node.harness import MemoryPool
from tests.prefill_node.test_prefix_reuse import Dense, prompt
from transfer.mem_pool import PoolError


class SecondClient(MemoryPool):
    """Another rank's way to the objects of a pool: it may fail alone."""

    def __init__(self, pool: MemoryPool) -> None:
        super().__init__()
        self.objects, self.finished = pool.objects, pool.finished


class Group:
    """Two ranks that hold the whole model each: the protocol between them is real, the sums are not needed."""

    def __init__(self, make_rig, run_dir, timeout_s=5.0):
        self.channel = TpLeader(run_dir, "group", 2)
        self.stack = contextlib.ExitStack()
        tell, listen = (
            saved_steps(run_dir, "group", rank, 2, TELL_PATIENCE * timeout_s, self.stack) for rank in (0, 1)
        )
        self.rig = make_rig(channel=self.channel, tp_size=2, budget=32, pool_timeout_s=timeout_s, saved_steps=tell)
        self.other = make_rig(
            budget=32,
            pool=SecondClient(self.rig.pool),
            pool_timeout_s=timeout_s,
            writes=False,
            saved_steps=listen,
        )
        self.follower = TpFollower(run_dir, "group", 1)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=follow, args=(self.other.rank, self.follower, self.stopping))
        self.thread.start()
        self.channel.wait_ready(5)

    def assert_right(self, dense: Dense, prompts: dict[str, list[int]]) -> None:
        """Both ranks have the rows, and the group the first tokens, of a model that keeps everything."""
        for rig in (self.rig, self.other):
            rig.settle()
            rig.outcomes = self.rig.outcomes
            for name, tokens in prompts.items():
                dense.check(rig, name, tokens)

    @property
    def started_over(self) -> int:
        return self.rig.leader.snapshot().counters.started_over

    def close(self):
        self.stopping.set()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.follower.close()
        self.channel.close()
        for rig in (self.rig, self.other):
            rig.close()
        self.stack.close()


@pytest.fixture
def group(make_rig, tmp_path):
    group = Group(make_rig, tmp_path)
    yield group
    group.close()


@pytest.fixture(scope="module")
def dense(tiny_model):
    return Dense(tiny_model)


def test_followers_compute_and_publish_what_the_leader_plans(group):
    group.rig.submit("a", prompt(100))
    group.rig.submit("b", prompt(7))
    group.rig.run("a", "b")
    assert all(isinstance(group.rig.outcomes[name], PrefillResult) for name in "ab")
    group.rig.settle()
    group.other.settle()
    assert group.rig.reader.finished == group.other.reader.finished
    for layer in range(4):
        ours, theirs = (rig.reader.pulled(layer, "a", "ckv", 100) for rig in (group.rig, group.other))
        assert torch.equal(ours, theirs)


def test_a_step_begins_on_every_rank_while_the_one_before_is_still_being_saved(group, dense):
    begun, finish = threading.Event(), group.rig.pool.finish
    begin = group.other.backend.begin

    def note(batch):
        if batch.chunks[0].start:
            begun.set()
        begin(batch)

    def finish_late(keys: Sequence[str]) -> None:
        if not begun.wait(5):
            raise PoolError("rank 1 does not begin the second step before the first one is saved")
        finish(keys)

    group.other.backend.begin, group.rig.pool.finish = note, finish_late
    group.rig.submit("a", prompt(100))
    group.rig.run("a")
    group.assert_right(dense, {"a": prompt(100)})
    assert group.started_over == 0


def test_rows_that_are_saved_slowly_are_found_by_every_rank(group, dense):
    """Each a step before they are needed; the second prompt comes while the first one is still being saved."""
    group.rig.pool.delay_s = 0.02
    group.rig.submit("first", prompt(100))
    while group.rig.leader.snapshot().counters.steps < 2:
        group.rig.leader.run_once()
    group.rig.submit("second", prompt(100))
    group.rig.run("first", "second")
    group.rig.submit("third", prompt(100))
    group.rig.run("third")
    group.assert_right(dense, dict.fromkeys(("first", "second", "third"), prompt(100)))
    assert group.started_over == 0
    assert group.rig.outcomes["second"].cached_tokens >= 64
    assert group.rig.outcomes["third"].cached_tokens == 96


@pytest.mark.parametrize("call", ["exists", "alloc", "save", "finish", "lease", "load", "locate", "release"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pool_that_fails_on_one_rank_only_spoils_no_answer(group, dense, rank, call):
    group.rig.submit("well", prompt(100))
    group.rig.run("well")
    (group.rig, group.other)[rank].pool.fail.add(call)
    group.rig.submit("again", prompt(100))
    group.rig.submit("new", prompt(90, seed=1))
    group.rig.run("again", "new")
    group.assert_right(dense, {"again": prompt(100), "new": prompt(90, seed=1)})


@pytest.mark.parametrize("on_rank_0", [False, True])
def test_a_pool_that_hangs_ends_no_process(make_rig, tmp_path, dense, on_rank_0):
    """On rank 1, or on both; each call ends after one and a half `pool.timeout_s`."""
    with contextlib.closing(Group(make_rig, tmp_path, timeout_s=1.0)) as group:

        def hang(*arguments, **options):
            time.sleep(CALL_PATIENCE * 1.0)
            raise PoolError("the pool did not answer in time; its client was ended")

        group.other.pool.exists = group.other.pool.lease = hang
        if on_rank_0:
            group.rig.pool.finish = hang
        group.rig.submit("a", prompt(100))
        group.rig.run("a")
        group.assert_right(dense, {"a": prompt(100)})
        assert group.started_over == 1


def test_a_follower_waits_for_the_saves_of_earlier_steps_and_not_for_ever(tmp_path):
    with contextlib.ExitStack() as stack:
        tell, listen = (saved_steps(tmp_path, "group", rank, 2, 0.2, stack) for rank in (0, 1))
        threading.Timer(0.1, lambda: [tell(1), tell(3)]).start()
        began = time.monotonic()
        listen(2)
        assert time.monotonic() - began > 0.09
        listen(3)
        began = time.monotonic()
        listen(4)
        assert 0.19 < time.monotonic() - began < 2


def test_what_rank_0_tells_before_the_others_are_there_is_not_lost(tmp_path):
    with contextlib.ExitStack() as stack:
        tell = saved_steps(tmp_path, "group", 0, 2, 5.0, stack)
        tell(1)
        began = time.monotonic()
        saved_steps(tmp_path, "group", 1, 2, 5.0, stack)(1)
        assert time.monotonic() - began < 4


def test_a_followers_lost_destination_fails_the_request(group):
    group.other.request_errors.put(("a", "rank 1 lost decode-0"))
    group.rig.submit("a", prompt(100))
    group.rig.submit("b", prompt(50))
    group.rig.run("a", "b")
    assert "rank 1 lost decode-0" in group.rig.outcomes["a"].text
    assert isinstance(group.rig.outcomes["b"], PrefillResult)


def test_followers_end_with_the_leader(group):
    group.channel.broadcast(Stop())
    group.thread.join(5)
    assert not group.thread.is_alive()


def test_a_silent_follower_ends_the_process(make_rig, tmp_path):
    channel = TpLeader(tmp_path, "group", 2)
    rig = make_rig(channel=channel, tp_size=2)
    rig.leader._step_timeout_s = 0.2
    follower = TpFollower(tmp_path, "group", 1)
    follower.ready()
    channel.wait_ready(5)
    rig.submit("a", prompt(5))
    command = None
    while command is None:
        rig.leader.run_once()
        command = follower.next_command(0.01)
    follower.report(RouteOpened("a", command.attempt))
    with pytest.raises(RankLost, match=r"TP ranks \[1\] did not finish step 1"):
        rig.run("a")
    follower.close()
    channel.close()
