"""A request may be given up at any moment: nothing stays behind, and nobody else is harmed."""

from __future__ import annotations

import time

import pytest
import torch

from prefill_node.block_keys import block_keys
from prefill_node.outcome import FailureKind, PrefillResult

STAGES = (
    "routing",
    "look-up",
    "no room",
    "first layer",
    "last layer",
    "save",
    "load",
    "lease",
    "between steps",
)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_nothing_left(rig):
    rig.settle()
    assert rig.used_blocks() == 0
    assert (rig.saver.counters().objects, rig.pool.leased, len(rig.routes)) == (0, set(), 0)
    assert rig.pool.objects.keys() == rig.pool.finished
    snapshot = rig.leader.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 0)


def on_call(target, name, action):
    """Does `action` once, at the beginning of the next call of a method."""
    method = getattr(target, name)

    def hooked(*args, **kwargs):
        setattr(target, name, method)
        action()
        return method(*args, **kwargs)

    setattr(target, name, hooked)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shared", [1, 4])
def test_cancel_at_every_stage_leaves_nothing_behind(make_rig, stage, shared):
    """Field failures B3 (abort during a load from the pool), B15 (in the final step)."""
    rig = make_rig(shared=shared, budget=32, blocks=16, max_requests=2)
    whole = prompt(100)
    rig.submit("before", whole[:64])
    rig.run("before")
    attempt = 0

    def cancel():
        rig.leader.cancel("victim", attempt)

    match stage:
        case "routing":
            on_call(rig.reader, "connect", cancel)
        case "look-up" | "lease":
            on_call(rig.pool, "exists" if stage == "look-up" else "lease", cancel)
        case "no room":
            rig.submit("big", prompt(250, seed=1))
            while not rig.leader.snapshot().running:
                rig.leader.run_once()
        case "first layer" | "last layer":
            publish, layer = rig.reader.publish, 0 if stage == "first layer" else 3
            rig.reader.publish = lambda index, *rest: (index == layer and cancel(), publish(index, *rest))[1]
        case "save" | "load":
            on_call(rig.pool, stage, cancel)
    attempt = rig.submit("victim", whole)
    if stage == "between steps":
        while not rig.leader.snapshot().running:
            rig.leader.run_once()
        cancel()
    if stage == "no room":
        for _ in range(3):
            rig.leader.run_once()
        assert rig.leader.snapshot().waiting == 1
        cancel()
    rig.submit("other", prompt(50, seed=2))
    rig.run("victim", "other")
    outcome = rig.outcomes["victim"]
    assert isinstance(outcome, PrefillResult) or outcome.kind is FailureKind.STOPPED
    assert isinstance(rig.outcomes["other"], PrefillResult)
    if stage == "no room":
        rig.run("big")
    assert_nothing_left(rig)
    del rig.outcomes["victim"]
    rig.submit("victim", whole)  # its id is free, and its rows in the pool are good
    rig.run("victim")
    assert isinstance(rig.outcomes["victim"], PrefillResult)
    assert_nothing_left(rig)


def test_an_id_comes_back_while_its_last_life_is_still_being_saved(make_rig):
    """Field failure B16: a preempted request is sent again when its stores are still under way."""
    rig = make_rig(shared=2, budget=48)
    rig.pool.delay_s = 0.01
    expected = make_rig(shared=2, budget=48)
    expected.submit("r", prompt(120))
    expected.run("r")
    for _ in range(2):
        attempt, steps = rig.submit("r", prompt(120)), rig.leader.snapshot().counters.steps
        while rig.leader.snapshot().counters.steps == steps:
            rig.leader.run_once()
        rig.leader.cancel("r", attempt)
        rig.run("r")
        del rig.outcomes["r"]
    rig.submit("r", prompt(120))
    rig.run("r")
    assert rig.outcomes["r"].first_token.token == expected.outcomes["r"].first_token.token
    assert_nothing_left(rig)


def test_blocks_freed_during_a_save_are_not_overwritten_before_it_ends(make_rig):
    """Field failure B17: another request takes the blocks, and its rows are stored under the old one's keys."""
    rig, well = (make_rig(shared=2, budget=48, blocks=8) for _ in range(2))
    save = rig.pool.save
    rig.pool.save = lambda *copy: (time.sleep(0.02), save(*copy))[1]
    attempt = rig.submit("old", prompt(96))
    while not rig.leader.snapshot().running:
        rig.leader.run_once()
    rig.leader.cancel("old", attempt)
    rig.submit("new", prompt(96, seed=1))  # in the same blocks: there are no others
    rig.run("old", "new")
    well.submit("old", prompt(96))
    well.run("old")
    for each in (rig, well):
        each.settle()
    stored = [f"{key}@0" for key in block_keys(rig.layout, prompt(96)) if f"{key}@0" in rig.pool.finished]
    for name in stored:
        assert bytes(rig.pool.objects[name]) == bytes(well.pool.objects[name])
    assert stored, "nothing of the old request was stored"
    assert_nothing_left(rig)
