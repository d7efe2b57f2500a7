"""The reuse gate: closed while anybody reads, never for ever, and never silently open under a reader."""

import threading
import time

import pytest
import torch

from prefill_node.generation import GenerationWords
from prefill_node.reuse_gate import Consumer, GateStuck, ReuseGate

SLOT = 1


def read(sequence: int) -> Consumer:
    return Consumer("read", sequence)


def save(ticket: int) -> Consumer:
    return Consumer("save", ticket)


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def words() -> GenerationWords:
    return GenerationWords(torch.zeros(3, dtype=torch.int64))


@pytest.fixture
def gate(words: GenerationWords) -> ReuseGate:
    return ReuseGate(3, words, save_grace_s=0.2)


def test_reuse_waits_for_every_consumer(gate: ReuseGate, words: GenerationWords) -> None:
    consumers = [read(1), read(2), save(1)]
    for consumer in consumers:
        gate.add(SLOT, consumer, soon(10))
    generation, opened = words[SLOT], threading.Event()
    waiter = threading.Thread(target=lambda: (gate.wait(SLOT), opened.set()))
    waiter.start()
    for consumer in consumers:
        assert not opened.wait(0.05)
        assert gate.done(SLOT, consumer)
    assert opened.wait(5)
    waiter.join()
    assert words[SLOT] == generation  # nobody was fenced, so no reader needs to be told
    assert gate.idle()


def test_a_slot_is_open_when_nobody_is_waited_for(gate: ReuseGate) -> None:
    assert gate.is_open(SLOT)
    gate.add(SLOT, read(1), soon(10))
    gate.add(SLOT, save(1), soon(10))
    assert not gate.is_open(SLOT) and gate.is_open(0)
    gate.done(SLOT, save(1))
    assert not gate.is_open(SLOT)
    gate.fence(lambda consumer: True, "cancelled")
    assert gate.is_open(SLOT)


def test_slots_are_independent_and_empty_ones_open(gate: ReuseGate) -> None:
    gate.add(0, read(1), soon(10))
    started = time.monotonic()
    assert gate.wait(SLOT) == []
    assert time.monotonic() - started < 1
    assert not gate.idle()


def test_a_reader_past_its_lease_is_fenced_by_a_new_generation_before_the_slot_opens(
    gate: ReuseGate, words: GenerationWords
) -> None:
    tensor, generation = words._device, words[SLOT]
    gate.add(SLOT, read(7), soon(0.1))
    (failure,) = gate.wait(SLOT)
    assert (failure.slot, failure.consumer) == (SLOT, read(7))
    assert "lease" in failure.reason
    assert tensor[SLOT].item() == words[SLOT] != generation
    assert not gate.done(SLOT, read(7))
    assert gate.counters().late == gate.counters().fenced == gate.counters().bumps == 1
    assert gate.wait(SLOT) == []  # reported once


def test_fencing_one_reader_leaves_the_others_their_time(gate: ReuseGate, words: GenerationWords) -> None:
    generation = words[SLOT]
    gate.add(SLOT, read(1), soon(10))
    gate.add(SLOT, read(2), soon(10))
    assert [failure.consumer for failure in gate.fence(lambda consumer: consumer.ident == 1, "endpoint lost")] == [
        read(1)
    ]
    seen: list[int] = []
    waiter = threading.Thread(target=lambda: (gate.wait(SLOT), seen.append(words[SLOT])))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    assert words[SLOT] == generation  # reader 2 may still check its copy
    gate.done(SLOT, read(2))
    waiter.join(5)
    assert seen == [generation + 1]


def test_a_fenced_reader_that_ended_needs_no_new_generation(gate: ReuseGate, words: GenerationWords) -> None:
    generation = words[SLOT]
    gate.add(SLOT, read(1), soon(10))
    gate.fence(lambda consumer: True, "request cancelled")
    assert not gate.done(SLOT, read(1))
    assert [failure.reason for failure in gate.wait(SLOT)] == ["request cancelled"]
    assert words[SLOT] == generation


def test_duplicate_and_unknown_ends_are_counted_and_ignored(gate: ReuseGate) -> None:
    gate.add(SLOT, read(1), soon(10))
    assert gate.done(SLOT, read(1))
    assert not gate.done(SLOT, read(1))
    assert not gate.done(SLOT, read(99))
    assert not gate.done(0, read(1))
    assert gate.counters().late == 3
    with pytest.raises(ValueError, match="twice"):
        for _ in range(2):
            gate.add(SLOT, read(5), soon(1))


def test_a_failed_save_is_reported_by_the_next_wait_even_after_others_close_the_slot(gate: ReuseGate) -> None:
    gate.add(SLOT, save(1), soon(10))
    gate.done(SLOT, save(1), error="pool is full")
    gate.add(SLOT, read(1), soon(10))
    gate.done(SLOT, read(1))
    assert [(failure.consumer, failure.reason) for failure in gate.wait(SLOT)] == [(save(1), "pool is full")]


def test_a_late_save_keeps_the_slot_closed_until_it_ends(gate: ReuseGate, words: GenerationWords) -> None:
    generation = words[SLOT]
    gate.add(SLOT, save(1), soon(0.05))
    assert gate.fence(lambda consumer: True, "nothing to fence here") == []
    timer = threading.Timer(0.15, gate.done, (SLOT, save(1), "late as well"))
    started = time.monotonic()
    timer.start()
    failures = gate.wait(SLOT)
    assert time.monotonic() - started >= 0.14
    assert [failure.reason for failure in failures] == ["the pool save did not end before its deadline"]
    assert words[SLOT] == generation


def test_a_save_that_never_ends_is_fatal_after_its_grace(gate: ReuseGate) -> None:
    gate.add(SLOT, save(4), soon(0.05))
    with pytest.raises(GateStuck, match=r"slot 1.*save 4"):
        gate.wait(SLOT)


def test_no_wait_is_longer_than_the_latest_deadline(gate: ReuseGate) -> None:
    for sequence in range(5):
        gate.add(SLOT, read(sequence), soon(0.05 * sequence))
    started = time.monotonic()
    assert len(gate.wait(SLOT)) == 5
    assert time.monotonic() - started < 1
    assert gate.counters().bumps == 1


def test_generation_words_are_checked() -> None:
    with pytest.raises(ValueError, match="int64"):
        GenerationWords(torch.zeros(3, dtype=torch.int32))
    tensor = torch.zeros(2, dtype=torch.int64)
    words = GenerationWords(tensor)
    assert words.address == tensor.data_ptr()
    assert len(words) == 2
    assert words[0] == tensor[0].item() != 0
    assert words.bump(1) == tensor[1].item()


def test_a_gate_that_is_off_waits_for_nobody_and_says_so(
    words: GenerationWords, caplog: pytest.LogCaptureFixture
) -> None:
    gate = ReuseGate(3, words, save_grace_s=0.2, closes=False)
    assert "THE REUSE GATE IS OFF" in caplog.text
    before = words[SLOT]
    gate.add(SLOT, read(1), soon(60))
    gate.add(SLOT, save(1), soon(60))
    started = time.monotonic()
    gate.wait(SLOT)
    assert time.monotonic() - started < 1.0
    assert words[SLOT] != before, "readers are not told"
    assert not gate.done(SLOT, read(1))
