"""What prefill saves to the pool, what it reloads from it, and what happens when the pool fails."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from prefill_node.block_keys import block_keys
from prefill_node.outcome import PrefillResult
from prefill_node.pool_client import PoolStuck, PoolThread
from prefill_node.reuse_gate import Consumer
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


def test_every_wait_has_a_deadline():
    thread = PoolThread("test", timeout_s=0.1)
    release = threading.Event()
    thread.submit(lambda: release.wait(5) and None)
    started = time.monotonic()
    with pytest.raises(PoolStuck, match=r"did not load layer 3 within 0\.2 s"):
        thread.run("load layer 3", lambda: None)
    assert time.monotonic() - started < 2
    release.set()
    thread.close()


def test_a_pool_thread_that_dies_says_why():
    thread = PoolThread("test", timeout_s=0.1)
    thread.submit(lambda: {}["a defect"])
    with pytest.raises(PoolStuck, match="test ended: KeyError"):
        thread.run("answer", lambda: None)
    assert thread.failure.startswith("test ended: ")


def test_errors_of_a_call_reach_its_caller():
    thread = PoolThread("test", timeout_s=1.0)

    def fail():
        raise PoolError("no")

    with pytest.raises(PoolError, match="no"):
        thread.run("answer", fail)
    assert thread.run("answer", lambda: 7) == 7
    thread.close()
