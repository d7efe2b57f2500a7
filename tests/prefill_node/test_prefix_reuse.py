"""Prompts that begin alike share rows through the pool, and their answers stay those of a dense model."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sluice.v1 import registry_pb2

from prefill_node.block_keys import Writers, block_keys
from prefill_node.outcome import PrefillResult
from tests.model.dense_backend import DenseBackend
from tests.model.runner import Runner
from tests.prefill_node.harness import MemoryPool, Rig

BLOCK = 16
LAYOUT = registry_pb2.KvLayout(fingerprint="model", block_size=BLOCK)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 320, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


class Dense:
    """The answer and every row of a prompt by a model that keeps everything."""

    def __init__(self, model_dir: Path) -> None:
        self.runner = Runner(model_dir)

    def check(self, rig: Rig, name: str, tokens: list[int]) -> None:
        backend, outcome = DenseBackend(self.runner.config), rig.outcomes[name]
        backend.begin([(name, len(tokens))])
        logits = self.runner.decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), backend)
        assert isinstance(outcome, PrefillResult), outcome
        assert outcome.first_token.token == int(logits[-1].argmax())
        for layer in range(4):
            rows = [rig.reader.pulled(layer, name, kind, len(tokens)) for kind in ("ckv", "k_rope")]
            torch.testing.assert_close(torch.cat(rows, dim=-1), backend._main[layer, name], atol=2e-4, rtol=1e-4)
            keys = rig.reader.pulled(layer, name, "indexer", len(tokens))
            torch.testing.assert_close(keys, backend._index[layer, name], atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def dense(tiny_model: Path) -> Dense:
    return Dense(tiny_model)


def ask(rig: Rig, name: str, tokens: list[int]) -> int:
    """Runs one prompt to its end; its cached tokens."""
    rig.submit(name, tokens)
    rig.run(name)
    rig.settle()
    assert rig.pool.leased == set() and rig.saver.counters().objects == 0
    outcome = rig.outcomes[name]
    assert isinstance(outcome, PrefillResult), outcome
    return outcome.cached_tokens


@pytest.mark.parametrize("shared", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [32, 40, 1024])
@pytest.mark.parametrize(("common", "cached"), [(0, 0), (15, 0), (16, 16), (70, 64), (144, 144)])
def test_the_longest_cached_prefix_is_reused_by_the_block(make_rig, dense, shared, budget, common, cached):
    rig = make_rig(shared=shared, budget=budget)
    first = prompt(150)
    second = first[:common] + prompt(150 - common, seed=1)
    assert ask(rig, "first", first) == 0
    assert ask(rig, "second", second) == cached
    dense.check(rig, "first", first)
    dense.check(rig, "second", second)
    assert rig.leader.snapshot().counters.tokens == 300 - cached
    assert rig.leader.snapshot().counters.cached_tokens == cached


@pytest.mark.parametrize("length", [k * BLOCK + d for k in (1, 4, 9) for d in (-1, 0, 1)])
@pytest.mark.parametrize("shared", [1, 4])
def test_a_full_hit_still_computes_the_last_token(make_rig, dense, length, shared):
    rig = make_rig(shared=shared, budget=48)
    for name, cached in (("first", 0), ("second", (length - 1) // BLOCK * BLOCK)):
        assert ask(rig, name, prompt(length)) == cached
        dense.check(rig, name, prompt(length))


def test_every_prefill_group_reuses_what_another_one_saved(tiny_model, dense):
    pool = MemoryPool()
    writer, reader = (Rig(tiny_model, budget=48, pool=pool, group=group, groups=2) for group in (0, 1))
    assert ask(writer, "a", prompt(100)) == 0
    assert ask(reader, "b", prompt(120)) == 96
    dense.check(reader, "b", prompt(120))
    assert ask(writer, "c", prompt(120)) == 112
    dense.check(writer, "c", prompt(120))
    for rig in (writer, reader):
        rig.close()


@pytest.mark.parametrize("shared", [1, 4])
def test_identical_prompts_in_flight_together_share_only_what_is_finished(make_rig, dense, shared):
    rig = make_rig(shared=shared, budget=64)
    rig.pool.delay_s = 0.002
    for number in range(3):
        rig.submit(f"r{number}", prompt(130))
    rig.run("r0")
    rig.submit("late", prompt(130))
    rig.run("r1", "r2", "late")
    for name in ("r0", "r1", "r2", "late"):
        dense.check(rig, name, prompt(130))
    rig.settle()
    assert len(rig.pool.objects) == 8 and rig.saver.counters().objects_saved == 8


def test_a_second_request_while_the_first_is_saving_finds_no_half_written_object(make_rig, dense):
    rig = make_rig(shared=2, budget=48)
    rig.submit("first", prompt(150))
    while rig.leader.snapshot().counters.steps < 1:
        rig.leader.run_once()
    rig.submit("second", prompt(150))
    rig.run("first", "second")
    assert rig.outcomes["second"].cached_tokens in (0, 48, 96)
    dense.check(rig, "first", prompt(150))
    dense.check(rig, "second", prompt(150))


def test_an_object_in_use_is_leased(make_rig):
    rig = make_rig(shared=1, budget=32)
    ask(rig, "first", prompt(150))
    keys = {f"{key}@0" for key in block_keys(LAYOUT, prompt(150))}
    leased: list[set[str]] = []
    load = rig.pool.load
    rig.pool.load = lambda *copy: (leased.append(set(rig.pool.leased)), load(*copy))[1]
    assert ask(rig, "second", prompt(150)) == 144
    assert leased and all(held >= keys for held in leased)


def test_a_block_has_one_writer_at_a_time(make_rig, dense):
    rig = make_rig(shared=1, budget=64)
    allocated: list[str] = []
    alloc = rig.pool.alloc
    rig.pool.alloc = lambda keys, sizes, **more: (allocated.extend(keys), alloc(keys, sizes, **more))[1]
    for name in "abc":
        rig.submit(name, prompt(60))
    rig.run(*"abc")
    assert len(allocated) == len(set(allocated)) == 3


@pytest.mark.parametrize("moment", ["lease", "load", "locate"])
@pytest.mark.parametrize("shared", [1, 4])
def test_eviction_between_look_up_and_load_is_computed_again(make_rig, dense, moment, shared):
    rig = make_rig(shared=shared, budget=48)
    ask(rig, "first", prompt(150))
    call, fired = getattr(rig.pool, moment), []

    def evict_first(*arguments):
        if not fired and (moment != "lease" or "first" in rig.outcomes):
            fired.append(True)
            for item in rig.pool.objects.values():  # the memory holds other objects now
                item[:] = bytes(len(item))
            rig.pool.remove(list(rig.pool.objects))
            rig.pool.leased.clear()
        return call(*arguments)

    setattr(rig.pool, moment, evict_first)
    assert ask(rig, "second", prompt(150)) == 0
    assert fired
    dense.check(rig, "second", prompt(150))


def test_loads_that_take_almost_their_deadline_end_no_process(make_rig, dense):
    """Several layers wait for each other; a call is given up after one and a half of a pool operation's deadlines."""
    rig = make_rig(shared=3, budget=32, pool_timeout_s=0.3)
    load = rig.pool.load

    def slow(*copy: list[int]) -> None:
        time.sleep(0.4)
        load(*copy)

    rig.pool.load = slow
    ask(rig, "first", prompt(100))
    assert ask(rig, "second", prompt(100)) == 96
    dense.check(rig, "second", prompt(100))


def test_rows_are_not_used_after_their_lease(make_rig, dense):
    rig = make_rig(shared=1, budget=48, lease_s=0.0)
    ask(rig, "first", prompt(150))
    ask(rig, "second", prompt(150))
    dense.check(rig, "second", prompt(150))
    assert rig.leader.snapshot().counters.started_over == 2


@pytest.mark.parametrize("shared", [1, 4])
def test_a_corrupted_object_is_never_used(make_rig, dense, shared):
    rig = make_rig(shared=shared, budget=48, checksums=True)
    ask(rig, "first", prompt(150))
    assert ask(rig, "second", prompt(150)) == 144
    victim = rig.pool.objects[f"{block_keys(LAYOUT, prompt(150))[3]}@0"]
    victim[1000] = bytes([victim[1000][0] ^ 1])
    assert ask(rig, "third", prompt(150)) == 0
    assert rig.loader.counters().wrong_checksums == 1
    assert (rig.reader.beginnings["second"], rig.reader.beginnings["third"]) == (0, 1), "decode is told"
    assert ask(rig, "fourth", prompt(150)) == 0, "the corrupted object is still offered"
    assert ask(rig, "fifth", prompt(150)) == 144
    for name in ("first", "second", "third", "fourth", "fifth"):
        dense.check(rig, name, prompt(150))


def test_rows_of_another_block_are_never_used(make_rig, dense):
    """A writer from before a restart of the pool's service may write a whole object, with checksums, over another."""
    rig = make_rig(shared=1, budget=48, checksums=True)
    ask(rig, "first", prompt(150))
    names = [f"{key}@0" for key in block_keys(LAYOUT, prompt(150))]
    rig.pool.objects[names[3]].raw = rig.pool.objects[names[5]].raw
    assert ask(rig, "second", prompt(150)) == 0
    assert rig.loader.counters().wrong_checksums
    dense.check(rig, "second", prompt(150))


def test_keys_chain_over_all_tokens_before():
    whole = block_keys(LAYOUT, prompt(100))
    assert len(whole) == 6 and len(set(whole)) == 6
    assert block_keys(LAYOUT, prompt(100)[:47]) == whole[:2]
    changed = prompt(100)
    changed[0] += 1
    assert not set(block_keys(LAYOUT, changed)) & set(whole)
    same_block = prompt(100)[:16] * 2
    assert len(set(block_keys(LAYOUT, same_block))) == 2


def test_objects_with_checksums_have_names_of_their_own():
    """Their layers lie at other places, so a worker without checksums would take them for other rows."""
    assert not set(block_keys(LAYOUT, prompt(100), checksums=True)) & set(block_keys(LAYOUT, prompt(100)))


def test_with_a_draft_layer_keys_depend_on_the_token_behind():
    one, other = prompt(32), prompt(32)
    other[16] += 1
    assert block_keys(LAYOUT, one)[0] == block_keys(LAYOUT, other)[0]
    assert block_keys(LAYOUT, one, lookahead=1)[0] != block_keys(LAYOUT, other, lookahead=1)[0]
    assert [len(block_keys(LAYOUT, prompt(length), lookahead=1)) for length in (16, 17, 32, 33)] == [0, 1, 1, 2]


def test_keys_differ_by_model_and_layout():
    others = [
        registry_pb2.KvLayout(fingerprint="other", block_size=BLOCK),
        registry_pb2.KvLayout(fingerprint="model", block_size=BLOCK, dtype="bfloat16"),
        registry_pb2.KvLayout(fingerprint="model", block_size=BLOCK, num_layers=3),
    ]
    keys = [block_keys(layout, prompt(16)) for layout in (LAYOUT, *others)]
    assert len(set(keys)) == 4


def test_keys_are_the_same_in_every_process():
    code = f"""
from sluice.v1 import registry_pb2
from prefill_node.block_keys import block_keys
print(block_keys(registry_pb2.KvLayout(fingerprint="model", block_size={BLOCK}), {prompt(40)}))
"""
    for seed in ("0", "1"):
        answer = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert answer.stdout.strip() == str(block_keys(LAYOUT, prompt(40)))


def test_every_group_reads_all_names_and_writes_its_own():
    assert Writers(1, 3).names("k") == ["k@1", "k@0", "k@2"]
    assert [Writers(group, 3).own("k") for group in range(3)] == ["k@0", "k@1", "k@2"]


@pytest.mark.parametrize("cached", [16, 64, 144, 145])
def test_decode_that_has_the_beginning_is_told_the_end(make_rig, cached):
    """Field failures A4, A5: also when it needs no block at all, because it has them or there is none."""
    rig = make_rig(shared=1, budget=48)
    length = 145
    rig.submit("r", prompt(length), cached_tokens=cached)
    rig.run("r")
    rig.settle()
    assert isinstance(rig.outcomes["r"], PrefillResult)
    assert rig.reader.finished == ["r"]
    sent = {index for (_, _, kind), blocks in rig.reader.rows.items() if kind == "ckv" for index in blocks}
    assert sent == set(range(cached // BLOCK, -(-length // BLOCK)))


def test_the_pool_may_have_one_block_less_than_the_prompt(make_rig, dense):
    """Field failures A6, A7: 73 blocks, of which the store has 72; load length and prompt length are not the same."""
    rig = make_rig(shared=2, budget=96, blocks=100)
    tokens = prompt(73 * 2 + 6)  # nine blocks and a part
    ask(rig, "first", tokens)
    last = block_keys(LAYOUT, tokens)[-1]
    rig.pool.remove([f"{last}@0"])
    assert ask(rig, "second", tokens) == 128
    dense.check(rig, "second", tokens)


def test_warm_requests_leak_nothing(make_rig):
    """Field failure C20: pages leaked with each request whose prefix is cached, until none was left."""
    rig = make_rig(shared=2, budget=64, blocks=12)
    for number in range(40):
        assert ask(rig, f"r{number}", prompt(100)) == (96 if number else 0)
    assert len(rig.pool.objects) == 6
    assert rig.used_blocks() == 0 and len(rig.saver._objects._keys) == 0
