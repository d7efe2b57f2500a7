"""A request ends exactly once, for a reason its caller is told, and takes no other request down with it."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from sluice.v1 import worker_pb2

from engine.sampling_params import SamplingParams
from prefill_node.link import TransferRefused
from prefill_node.outcome import FailureKind, PrefillResult
from prefill_node.rank import RankFailed
from prefill_node.scheduler import PrefillJob


def prompt(tokens: int) -> list[int]:
    return torch.randint(2, 320, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def assert_nothing_held(rig):
    assert_nothing_left(rig)
    assert rig.pool.leased == set()
    assert rig.pool.objects.keys() == rig.pool.finished


def assert_nothing_left(rig):
    """Of this process's own: a pool that fails may have kept leases, which end by themselves."""
    rig.settle()
    assert rig.used_blocks() == 0
    assert rig.saver.counters().objects == 0
    assert len(rig.routes) == 0
    snapshot = rig.leader.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 0)


def test_a_prompt_ends_with_its_first_token_and_its_times(make_rig):
    rig = make_rig(budget=32)
    rig.submit("a", prompt(70))
    rig.run("a")
    outcome = rig.outcomes["a"]
    assert isinstance(outcome, PrefillResult)
    assert outcome.queue_seconds >= 0 < outcome.compute_seconds
    counters = rig.leader.snapshot().counters
    assert (counters.prompts, counters.failed, counters.tokens, counters.steps) == (1, 0, 70, 3)
    assert_nothing_held(rig)


def test_cancel_between_chunks_frees_everything(make_rig):
    rig = make_rig(budget=32)
    attempt = rig.submit("a", prompt(100))
    while not rig.leader.snapshot().running:
        rig.leader.run_once()
    rig.leader.cancel("a", attempt)
    rig.run("a")
    assert rig.outcomes["a"].kind is FailureKind.STOPPED
    assert "a" not in rig.reader.finished
    assert_nothing_held(rig)


def test_cancelling_an_ended_request_leaves_its_successor_alone(make_rig):
    rig = make_rig()
    first = rig.submit("a", prompt(5))
    rig.run("a")
    rig.settle()
    rig.reader.rows.clear()
    del rig.outcomes["a"]
    rig.submit("a", prompt(5))
    rig.leader.cancel("a", first)
    rig.run("a")
    assert isinstance(rig.outcomes["a"], PrefillResult)


def test_a_refused_destination_fails_its_request_only(make_rig):
    rig = make_rig()
    connect = rig.reader.connect

    def refuse(destination):
        if destination.request_id == "refused":
            raise TransferRefused("layouts differ: block_size 16 and 32")
        return connect(destination)

    rig.reader.connect = refuse
    rig.submit("refused", prompt(5))
    rig.submit("b", prompt(5))
    rig.run("refused", "b")
    assert rig.outcomes["refused"].kind is FailureKind.LOST
    assert "block_size 16 and 32" in rig.outcomes["refused"].text
    assert isinstance(rig.outcomes["b"], PrefillResult)
    assert_nothing_held(rig)


def test_a_destination_lost_in_a_step_fails_its_request_only(make_rig):
    rig = make_rig(budget=64)
    publish = rig.reader.publish

    def lose(layer, slot, endpoint, entries, finished=()):
        for entry in entries:
            if layer == 2 and entry.request_id == "lost":
                rig.request_errors.put(("lost", "connection to decode-0 is lost"))
        return publish(layer, slot, endpoint, entries, finished)

    rig.reader.publish = lose
    rig.submit("lost", prompt(100))
    rig.submit("b", prompt(20))
    rig.run("lost", "b")
    assert rig.outcomes["lost"].kind is FailureKind.LOST
    assert "request 'lost': connection to decode-0 is lost" in rig.outcomes["lost"].text
    assert isinstance(rig.outcomes["b"], PrefillResult)
    assert_nothing_held(rig)


@pytest.mark.parametrize("call", ["exists", "alloc", "save", "finish", "lease", "load", "locate", "release"])
def test_prefill_goes_on_without_a_pool_that_fails(make_rig, call):
    well, rig = make_rig(budget=32, shared=1), make_rig(budget=32, shared=1)
    rig.pool.fail.add(call)
    for each in (well, rig):
        each.submit("one chunk", prompt(10))
        each.submit("many chunks", prompt(100))
        each.run("one chunk", "many chunks")
    for name in ("one chunk", "many chunks"):
        assert isinstance(rig.outcomes[name], PrefillResult), rig.outcomes[name]
        assert rig.outcomes[name].first_token.token == well.outcomes[name].first_token.token
    assert_nothing_left(rig)
    rig.pool.fail.clear()
    time.sleep(0.06)  # longer than the pool is left alone
    rig.submit("again", prompt(100))
    rig.run("again")
    assert isinstance(rig.outcomes["again"], PrefillResult)
    rig.settle()
    assert not rig.guarded.down
    assert rig.guarded.counters().outages == 1


def test_a_prompt_too_long_for_one_step_fails_clearly_without_the_pool(make_rig):
    rig = make_rig(budget=32, shared=1, max_whole_tokens=64)
    rig.pool.fail.add("load")
    rig.submit("long", prompt(100))
    rig.submit("short", prompt(64))
    rig.run("long", "short")
    assert rig.outcomes["long"].kind is FailureKind.LOST
    assert "its 100 tokens need the pool" in rig.outcomes["long"].text
    assert "prefill.max_whole_tokens" in rig.outcomes["long"].text
    assert isinstance(rig.outcomes["short"], PrefillResult)


def test_without_layer_reuse_no_request_depends_on_the_pool(make_rig):
    rig = make_rig(budget=32, shared=3)
    rig.pool.fail.update(("alloc", "load"))
    rig.submit("a", prompt(100))
    rig.run("a")
    assert isinstance(rig.outcomes["a"], PrefillResult)
    assert rig.saver.counters().failed_requests == 1


def test_a_request_whose_objects_are_lost_is_computed_again(make_rig):
    rig = make_rig(budget=64, shared=1)
    locate = rig.pool.locate

    def lose_one(keys):
        """The first request that looks loses an object; no other one has it, as their prompts differ."""
        rig.pool.locate = locate
        rig.pool.finished.discard(keys[0])
        return locate(keys)

    rig.pool.locate = lose_one
    rig.submit("a", prompt(100))
    rig.submit("b", prompt(90))
    rig.run("a", "b")
    assert all(isinstance(rig.outcomes[name], PrefillResult) for name in "ab")
    assert rig.leader.snapshot().counters.started_over == 1


def test_logits_that_are_no_numbers_fail_their_request_only(make_rig):
    rig = make_rig()
    compute = rig.rank._decoder.logits

    def damage(*args, **kwargs):
        logits = compute(*args, **kwargs)
        logits[0] = float("nan")
        return logits

    rig.rank._decoder.logits = damage
    together = threading.Barrier(2)  # so that both run in the first step
    connect = rig.reader.connect
    rig.reader.connect = lambda destination: (together.wait(5), connect(destination))[1]
    rig.submit("a", prompt(5))
    rig.submit("b", prompt(6))
    rig.leader._take_inbox()
    deadline = time.monotonic() + 5
    while rig.rank._opened.qsize() < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    rig.run("a", "b")
    assert rig.leader.snapshot().counters.steps == 1
    kinds = [getattr(rig.outcomes[name], "kind", None) for name in "ab"]
    assert kinds == [FailureKind.MODEL, None]
    assert_nothing_held(rig)


def test_sampling_follows_the_requests_parameters(make_rig):
    rig = make_rig()
    params = SamplingParams(temperature=1.0, seed=5, logprobs=3)
    rig.submit("a", prompt(9), params=params)
    rig.run("a")
    rig.submit("b", prompt(9), params=params)
    rig.run("b")
    first, second = rig.outcomes["a"].first_token, rig.outcomes["b"].first_token
    assert first == second
    assert first.logprob is not None
    assert len(first.top_logprobs) == 3


def test_a_request_whose_destination_lapses_ends(make_rig):
    rig = make_rig()
    rig.submit("a", prompt(5), start_by=time.monotonic() - 1)
    rig.run("a")
    assert rig.outcomes["a"].kind is FailureKind.EXPIRED
    assert_nothing_held(rig)


def test_an_id_in_use_is_refused(make_rig):
    rig = make_rig(budget=16)
    refusals = []
    rig.submit("a", prompt(60))
    again = PrefillJob("a", (1, 2), math.inf, math.inf)
    rig.leader.submit(again, SamplingParams(temperature=0.0), worker_pb2.Destination(), refusals.append)
    rig.run("a")
    assert [refusal.kind for refusal in refusals] == [FailureKind.DUPLICATE]
    assert isinstance(rig.outcomes["a"], PrefillResult)


def test_stop_answers_every_request(make_rig):
    rig = make_rig(budget=16, max_requests=1)
    rig.submit("running", prompt(300))
    rig.submit("waiting", prompt(300))
    engine = threading.Thread(target=rig.leader.run)
    engine.start()
    while rig.leader.snapshot().counters.steps < 2:
        time.sleep(0.001)
    rig.leader.stop()
    engine.join(10)
    assert not engine.is_alive()
    assert [rig.outcomes[name].kind for name in ("running", "waiting")] == [FailureKind.STOPPED] * 2
    assert_nothing_held(rig)


def test_a_dead_publisher_ends_the_process(make_rig):
    rig = make_rig()
    rig.reader.failure = "publisher failed"
    with pytest.raises(RankFailed, match="publisher failed"):
        rig.leader.run_once()
