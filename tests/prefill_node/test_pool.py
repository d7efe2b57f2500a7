"""What prefill saves to the pool, what it reloads from it, and what happens when the pool fails."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest
import torch

from prefill_node import pool_saver, prefetch
from prefill_node.block_keys import block_keys
from prefill_node.outcome import PrefillResult
from prefill_node.plan import plan_layer_buffers
from prefill_node.prefetch import Prefetcher
from prefill_node.reuse_gate import Consumer, ReuseGate
from prefill_node.steps import Chunk
from tests.prefill_node.harness import settle
from transfer.mem_pool import PoolError, PoolFull


def prompt(tokens):
    return torch.randint(2, 320, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def chunk(request_id, start, tokens, total, first_block=0):
    blocks = tuple(range(first_block, first_block + -(-total // 16)))
    keys = tuple(f"{request_id}-{block}" for block in range((start + tokens) // 16))
    return Chunk(request_id, start, tuple(range(tokens)), total, blocks, blocks, keys=keys)


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("tokens", [75, 64])
def test_every_layer_of_every_full_block_is_saved_and_stays(make_rig, shared, tokens):
    """Field failure A9: also the last block of a prompt that ends where a block does."""
    rig = make_rig(budget=32, shared=shared)
    rig.submit("a", prompt(tokens))
    rig.run("a")
    rig.settle()
    keys = block_keys(rig.layout, prompt(tokens))
    assert rig.pool.finished == {f"{key}@0" for key in keys} and len(keys) == 4
    for layer in range(4):
        for kind, (offset, size) in zip(("ckv", "k_rope", "indexer"), rig.saver._layout.parts(layer), strict=True):
            for block, key in enumerate(keys):
                stored = bytes(rig.pool.objects[f"{key}@0"].raw)
                assert stored[offset : offset + size] == rig.reader.rows[layer, "a", kind][block].numpy().tobytes()
    assert rig.saver.counters().bytes_saved == 4 * rig.saver._layout.object_bytes


def test_reloads_cover_the_earlier_rows_of_reused_layers_only(make_rig):
    rig = make_rig(budget=32, shared=1)
    rig.submit("a", prompt(75))
    rig.run("a")
    per_block = sum(size for layer in (1, 2, 3) for _, size in rig.saver._layout.parts(layer))
    assert rig.loader.counters().bytes_loaded == (2 + 4) * per_block


def test_a_failed_save_opens_the_gate(make_rig):
    rig = make_rig()
    rig.pool.fail.add("save")
    rig.saver.begin_step([chunk("a", 0, 16, 40)])
    rig.saver.save(1, [chunk("a", 0, 16, 40)])
    failures = rig.gate.wait(rig.buffers.plan.slot_of_layer[1])
    assert [failure.consumer for failure in failures] == [Consumer("save", 1)]
    assert "save fails on demand" in failures[0].reason
    with pytest.raises(PoolError, match=r"not in the pool: layer 1 was not saved: save fails on demand"):
        rig.saver.hold("a", ["a-0"])()


def test_a_late_save_keeps_its_slot_closed_until_it_ends(make_rig):
    rig = make_rig(pool_timeout_s=0.1)
    release = threading.Event()
    save = rig.pool.save
    rig.pool.save = lambda *copy: (release.wait(5), save(*copy))[1]
    rig.saver.begin_step([chunk("a", 0, 16, 40)])
    rig.saver.save(1, [chunk("a", 0, 16, 40)])
    threading.Timer(0.4, release.set).start()
    started = time.monotonic()
    failures = rig.gate.wait(rig.buffers.plan.slot_of_layer[1])
    assert time.monotonic() - started > 0.25
    assert ["did not end before its deadline" in failure.reason for failure in failures] == [True]
    assert rig.saver.counters().bytes_saved > 0  # late, but complete


def test_a_request_dropped_before_its_objects_are_finished_leaves_none_of_these(make_rig):
    rig = make_rig()
    first = chunk("a", 0, 16, 40)
    rig.saver.begin_step([first])
    rig.saver.save(0, [first])
    rig.saver.end_step([first], ())
    rig.saver.begin_step([chunk("a", 16, 24, 40)])
    settle(rig.saver)
    assert rig.saver.counters().objects == 2
    rig.saver.release("a")
    settle(rig.saver)
    assert (rig.pool.objects.keys(), rig.pool.leased) == ({"a-0@0"}, set())
    assert (rig.saver.counters().objects, rig.saver.counters().object_bytes) == (0, 0)
    rig.saver.release("a")
    settle(rig.saver)


def test_rows_that_were_never_saved_are_not_found(make_rig):
    rig = make_rig()
    with pytest.raises(PoolError, match=r"only 0 of 2 blocks"):
        rig.saver.hold("unknown", ["x", "y"])()


def test_rows_of_a_failed_request_are_not_shared(make_rig):
    rig = make_rig()
    step = [chunk("good", 0, 16, 40), chunk("bad", 0, 16, 40)]
    rig.saver.begin_step(step)
    rig.saver.save(0, step)
    rig.saver.end_step(step, {"bad"})
    settle(rig.saver)
    assert rig.pool.objects.keys() == {"good-0@0"}


def test_who_does_not_fit_into_a_full_pool_is_computed_at_once(make_rig):
    rig = make_rig(budget=64, shared=1)
    alloc = rig.pool.alloc

    def full_at_four(keys, sizes, *, wait_s=0.0):
        if len(rig.pool.objects) >= 4:
            raise PoolFull("no room in the pool")
        return alloc(keys, sizes, wait_s=wait_s)

    rig.pool.alloc = full_at_four
    rig.submit("big", prompt(200))
    rig.submit("small", prompt(30))
    rig.run("big", "small")
    assert all(isinstance(rig.outcomes[name], PrefillResult) for name in ("big", "small"))
    assert rig.leader.snapshot().counters.started_over == 1
    assert not rig.guarded.down
    rig.settle()
    assert rig.pool.leased == set()


@pytest.mark.parametrize(("room", "calls"), [(8 << 20, [1, 3]), (30_000, [1, 2, 1])])
def test_layers_that_wait_are_saved_together_as_far_as_they_fit(make_rig, monkeypatch, room, calls):
    monkeypatch.setattr(pool_saver, "CALL_BYTES", room)
    rig = make_rig()
    release, saved = threading.Event(), []
    save = rig.pool.save

    def slow_save(pool, device, sizes):
        release.wait(5)
        saved.append(len(sizes) / 3)
        save(pool, device, sizes)

    rig.pool.save = slow_save
    step = [chunk("a", 0, 64, 80)]
    rig.saver.begin_step(step)
    rig.saver.save(0, step)
    time.sleep(0.1)
    for layer in (1, 2, 3):
        rig.saver.save(layer, step)
    rig.saver.end_step(step, ())
    other = [chunk("b", 0, 16, 20, first_block=4)]
    rig.saver.begin_step(other)
    rig.saver.save(0, other)
    rig.saver.end_step(other, ())
    release.set()
    settle(rig.saver)
    assert saved == [4 * each for each in calls] + [1], "never the layers of two steps in one call"
    assert rig.pool.finished == {"a-0@0", "a-1@0", "a-2@0", "a-3@0", "b-0@0"}
    for slot in range(rig.buffers.plan.num_slots):
        assert rig.gate.wait(slot) == []


def test_layers_that_are_saved_together_fail_together(make_rig):
    rig = make_rig()
    release = threading.Event()

    def failing_save(*copy):
        release.wait(5)
        raise PoolError("no")

    rig.pool.save = failing_save
    step = [chunk("a", 0, 16, 40)]
    rig.saver.begin_step(step)
    for layer in (0, 1):
        rig.saver.save(layer, step)
    rig.saver.end_step(step, ())
    release.set()
    settle(rig.saver)
    assert (rig.saver.counters().failed_requests, rig.pool.finished) == (1, set())


def test_rows_are_confirmed_after_every_load(make_rig, monkeypatch):
    """The load of a layer may outlast the one of the last layer."""
    monkeypatch.setattr(prefetch, "CALL_BYTES", 1)
    rig = make_rig()
    events, turn = [], itertools.count()
    load, locate = rig.pool.load, rig.pool.locate

    def slow_first_load(*copy):
        time.sleep(0 if next(turn) else 0.3)
        load(*copy)
        events.append("loaded")

    def note_locate(names):
        events.append("confirmed")
        return locate(names)

    step = [chunk("a", 0, 16, 40)]
    rig.saver.begin_step(step)
    rig.saver.end_step(step, ())
    held = rig.saver.hold("a", ["a-0"])
    rig.pool.load, rig.pool.locate = slow_first_load, note_locate
    plan = plan_layer_buffers(4, "all", 1)  # all layers are loaded ahead
    prefetcher = Prefetcher(plan, ReuseGate(4, rig.words, save_grace_s=1.0), rig.loader)
    prefetcher.begin([dataclasses.replace(chunk("a", 16, 16, 40), takes_prefix=True)], {"a": held})
    assert [prefetcher.ready(layer) for layer in range(4)] == [{}] * 4
    prefetcher.close()
    assert events == ["loaded"] * 4 + ["confirmed"]


def test_layers_that_wait_are_loaded_together_but_none_before_its_gate_opens(make_rig, monkeypatch):
    monkeypatch.setattr(prefetch, "LOADS_AT_ONCE", 1)
    rig = make_rig()
    step = [chunk("a", 0, 16, 40)]
    rig.saver.begin_step(step)
    rig.saver.end_step(step, ())
    held = rig.saver.hold("a", ["a-0"])
    release, calls = threading.Event(), []
    load = rig.pool.load

    def slow_load(*copy):
        release.wait(5)
        calls.append(len(copy[2]) // 3)
        load(*copy)

    rig.pool.load = slow_load
    gate = ReuseGate(4, rig.words, save_grace_s=1.0)
    gate.add(3, Consumer("save", 1), time.monotonic() + 5)
    prefetcher = Prefetcher(plan_layer_buffers(4, "all", 1), gate, rig.loader)
    prefetcher.begin([dataclasses.replace(chunk("a", 16, 16, 40), takes_prefix=True)], {"a": held})
    release.set()
    assert [prefetcher.ready(layer) for layer in range(3)] == [{}] * 3
    assert sum(calls) == 3 and len(calls) <= 2, "while the first is loaded, others wait"
    gate.done(3, Consumer("save", 1))
    assert prefetcher.ready(3) == {}
    assert calls[-1] == 1
    prefetcher.close()
