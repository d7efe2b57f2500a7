import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache import CacheSpec, KVCacheManager
from prefill_node.outcome import FailureKind
from prefill_node.scheduler import Limits, Need, PrefillJob, PrefillScheduler, Refused, share_budget

BLOCK = 4


def make_scheduler(blocks=32, budget=16, max_requests=4, max_waiting=8, max_prompt=1000, reloads=False):
    spec = CacheSpec(BLOCK, blocks)
    cache = KVCacheManager({"main": spec, "indexer": spec})
    return PrefillScheduler(cache, Limits(BLOCK, budget, max_requests, max_waiting, max_prompt, reloads)), cache


def job(request_id, tokens, deadline=1000.0, start_by=1000.0):
    return PrefillJob(request_id, tuple(range(tokens)), deadline, start_by)


def submit(scheduler, request_id, tokens, **times):
    scheduler.submit(job(request_id, tokens, **times))
    scheduler.set_routed(request_id)


def used(cache):
    return {name: usage.used for name, usage in cache.usage().items()}


def run(scheduler):
    """Runs to the end; returns per step the (request, start, end) of its chunks."""
    steps = []
    while (plan := scheduler.schedule()) is not None:
        steps.append([(chunk.request_id, chunk.start, chunk.end) for chunk in plan.chunks])
        scheduler.complete(plan)
    return steps


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 16, 17, 31])
def test_a_prompt_is_computed_exactly_once_in_chunks_of_whole_blocks(tokens):
    scheduler, cache = make_scheduler()
    submit(scheduler, "a", tokens)
    chunks = [chunk for step in run(scheduler) for chunk in step]
    assert [start for _, start, _ in chunks] == [0, *(end for _, _, end in chunks[:-1])]
    assert chunks[-1][2] == tokens
    assert all(start % BLOCK == 0 for _, start, _ in chunks)
    assert used(cache) == {"main": 0, "indexer": 0}


def test_several_requests_share_a_step_fairly():
    scheduler, _ = make_scheduler(budget=16)
    submit(scheduler, "long", 100)
    submit(scheduler, "short", 5)
    assert run(scheduler)[0] == [("long", 0, 8), ("short", 0, 5)]


def shares_of(needs, budget=16):
    """Numbers can be divided, strings cannot."""
    return share_budget([Need(int(need), isinstance(need, int)) for need in needs], budget, BLOCK)


def test_what_fair_shares_leave_over_goes_to_the_first():
    assert shares_of([100, 3, 3]) == [8, 3, 3]
    assert shares_of([100, 100]) == [8, 8]
    assert shares_of([2, 100]) == [2, 12]
    assert shares_of([100] * 6) == [4, 4, 4, 4, 0, 0]
    assert shares_of([]) == []


def test_a_request_that_cannot_be_divided_gets_all_or_nothing():
    assert shares_of(["13", 100]) == [13, 0]
    assert shares_of([100, "7"]) == [8, 7]
    assert shares_of([100, "9", "8"]) == [4, 9, 0]
    assert shares_of(["40", 3, "4"]) == [40, 0, 0], "alone, whatever the budget"
    assert shares_of([3, "40", 3]) == [3, 0, 3], "it has its turn when it is the first"


@given(
    needs=st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=9), budget=st.integers(BLOCK, 64)
)
def test_shares_stay_within_the_budget_and_the_first_always_progresses(needs, budget):
    shares = share_budget([Need(*need) for need in needs], budget, BLOCK)
    assert shares[0] > 0
    assert sum(shares) <= budget or sum(map(bool, shares)) == 1
    for share, (tokens, divisible) in zip(shares, needs, strict=True):
        assert share == tokens or (share % BLOCK == 0 and share < tokens)
        assert divisible or share in (0, tokens)


@pytest.mark.parametrize("keys", [(), ("key",)], ids=["without the pool", "with the pool"])
@pytest.mark.parametrize("tokens", [5, 30])
def test_a_stream_of_newcomers_starves_nobody(keys, tokens):
    """An old long prompt ends although new ones never cease, and these end in the order in which they came."""
    scheduler, _ = make_scheduler(blocks=64, max_waiting=1000, reloads=True)
    scheduler.submit(dataclasses.replace(job("old", 100), keys=("key",)))
    ended = []
    for step in range(60):
        scheduler.submit(dataclasses.replace(job(str(step), tokens), keys=keys))
        for name in ("old", str(step)):
            scheduler.set_routed(name)
        for looked_up in scheduler.to_look_up():
            scheduler.set_prefix(looked_up.request_id, 0)
        ended += scheduler.complete(scheduler.schedule())
    assert ended.index("old") < 60
    new = [int(name) for name in ended if name != "old"]
    assert len(new) > 10 and new == sorted(new)


def test_a_short_prompt_is_not_held_up_by_long_ones_before_it():
    scheduler, _ = make_scheduler(blocks=256, budget=16)
    for name in ("long", "longer"):
        submit(scheduler, name, 400)
    submit(scheduler, "short", 4)
    assert "short" in scheduler.complete(scheduler.schedule())


def test_without_the_pool_a_prompt_is_never_cut_where_buffers_are_shared():
    """Its earlier rows could not be had again; so it waits until all of it fits."""
    scheduler, _ = make_scheduler(blocks=64, budget=16, reloads=True)
    for number, tokens in enumerate((12, 9, 40, 3)):
        submit(scheduler, str(number), tokens)  # no keys: the pool is not used
    chunks = [chunk for step in run(scheduler) for chunk in step]
    assert chunks == [("0", 0, 12), ("3", 0, 3), ("1", 0, 9), ("2", 0, 40)]


def test_all_or_nothing_allocation():
    scheduler, cache = make_scheduler(blocks=8)
    submit(scheduler, "a", 20)  # 5 blocks
    submit(scheduler, "b", 16)  # 4 blocks: 3 are free
    plan = scheduler.schedule()
    assert [chunk.request_id for chunk in plan.chunks] == ["a"]
    assert used(cache) == {"main": 5, "indexer": 5}
    scheduler.complete(plan)
    assert run(scheduler)[-1][-1] == ("b", 0, 16)


def test_requests_waiting_for_blocks_are_not_overtaken():
    scheduler, _ = make_scheduler(blocks=8)
    submit(scheduler, "a", 20)
    submit(scheduler, "b", 32)
    submit(scheduler, "c", 4)
    order = [chunk[0] for step in run(scheduler) for chunk in step]
    assert order.index("b") < order.index("c")


def test_a_request_runs_only_when_its_routes_are_open():
    scheduler, _ = make_scheduler()
    scheduler.submit(job("a", 4))
    assert scheduler.schedule() is None
    submit(scheduler, "b", 4)
    plan = scheduler.schedule()
    assert [chunk.request_id for chunk in plan.chunks] == ["b"]
    scheduler.complete(plan)
    scheduler.set_routed("a")
    assert [chunk[0] for chunk in run(scheduler)[0]] == ["a"]


def test_no_more_requests_run_together_than_allowed():
    scheduler, _ = make_scheduler(max_requests=2)
    for name in "abc":
        submit(scheduler, name, 4)
    assert len(scheduler.schedule().chunks) == 2


def test_a_prompt_that_can_never_fit_is_refused_at_once():
    scheduler, cache = make_scheduler(blocks=8)
    with pytest.raises(Refused, match=r"33 prompt tokens need 9 blocks.*main: 8") as refused:
        scheduler.submit(job("a", 33))
    assert refused.value.kind is FailureKind.TOO_LONG
    assert used(cache) == {"main": 0, "indexer": 0}
    assert "a" not in scheduler


def test_a_prompt_beyond_the_model_length_is_refused():
    scheduler, _ = make_scheduler(max_prompt=10)
    with pytest.raises(Refused, match=r"11 prompt tokens.*at most 10"):
        scheduler.submit(job("a", 11))


def test_a_full_queue_refuses():
    scheduler, _ = make_scheduler(max_waiting=1)
    scheduler.submit(job("a", 4))
    with pytest.raises(Refused, match=r"prefill\.max_waiting") as refused:
        scheduler.submit(job("b", 4))
    assert refused.value.kind is FailureKind.QUEUE_FULL


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    scheduler, _ = make_scheduler()
    submit(scheduler, "a", 4)
    with pytest.raises(Refused) as refused:
        scheduler.submit(job("a", 4))
    assert refused.value.kind is FailureKind.DUPLICATE
    run(scheduler)
    submit(scheduler, "a", 4)
    assert run(scheduler) == [[("a", 0, 4)]]


def test_cancel_in_every_state_returns_pools_to_zero():
    scheduler, cache = make_scheduler()
    scheduler.submit(job("unrouted", 4))
    assert scheduler.cancel("unrouted")
    submit(scheduler, "waiting", 4)
    assert scheduler.cancel("waiting")
    submit(scheduler, "scheduled", 40)
    plan = scheduler.schedule()
    assert scheduler.cancel("scheduled")
    assert scheduler.complete(plan) == []
    submit(scheduler, "between chunks", 40)
    scheduler.complete(scheduler.schedule())
    assert scheduler.cancel("between chunks")
    assert not scheduler.cancel("between chunks")
    assert used(cache) == {"main": 0, "indexer": 0}
    assert scheduler.schedule() is None


def test_waiting_requests_expire_with_their_destination():
    scheduler, _ = make_scheduler()
    scheduler.submit(job("routing", 4, start_by=5.0))
    submit(scheduler, "queued", 4, start_by=9.0)
    assert scheduler.expire(4.9) == {}
    assert "routes to its destination" in scheduler.expire(5.0)["routing"]
    assert "for its turn" in scheduler.expire(9.0)["queued"]
    assert scheduler.num_waiting == 0


def test_running_requests_expire_at_their_deadline_only():
    scheduler, cache = make_scheduler()
    submit(scheduler, "a", 40, start_by=5.0, deadline=50.0)
    scheduler.complete(scheduler.schedule())
    assert scheduler.expire(49.0) == {}
    assert "after 16 of 40 tokens" in scheduler.expire(50.0)["a"]
    assert used(cache) == {"main": 0, "indexer": 0}


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=12))
def test_accounting_returns_to_zero(requests):
    scheduler, cache = make_scheduler(blocks=16, max_waiting=100)
    for number, (tokens, _) in enumerate(requests):
        submit(scheduler, str(number), tokens)
    for number, (_, cancelled) in enumerate(requests):
        if cancelled:
            scheduler.cancel(str(number))
        if (plan := scheduler.schedule()) is not None:
            scheduler.complete(plan)
    run(scheduler)
    assert used(cache) == {"main": 0, "indexer": 0}
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)


def test_written_blocks_cover_the_prompt_once():
    scheduler, _ = make_scheduler(budget=8)
    submit(scheduler, "a", 18)
    written = []
    while (plan := scheduler.schedule()) is not None:
        for chunk in plan.chunks:
            assert len(chunk.main_blocks) == len(chunk.indexer_blocks) == 5
            written.extend(chunk.written_blocks(BLOCK))
        scheduler.complete(plan)
    assert written == list(range(5))


def test_resumed_requests_go_ahead_of_new_ones_and_are_never_refused():
    scheduler, _ = make_scheduler(max_requests=1, max_waiting=1)
    submit(scheduler, "first", 4)
    scheduler.schedule()
    submit(scheduler, "new", 4)
    for name in ("again", "again too"):
        scheduler.submit(dataclasses.replace(job(name, 4), resumed=True))
        scheduler.set_routed(name)
    order = [chunk[0] for step in run(scheduler) for chunk in step]
    assert list(dict.fromkeys(order)) == ["first", "again", "again too", "new"]
