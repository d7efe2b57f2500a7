"""Readers and pools that are slow: layer buffers are not overwritten under them, and who is overwritten notices.

Two things stand between a slow consumer and wrong data: the reuse gate, which lets nobody overwrite what is still read,
and, where the gate gives a consumer up, something by which that one notices: the slot's generation for a reader, the
checksum for an object in the pool. Each run of a seed is a few prompts, some with a common beginning, over all real
parts but the wheels; their answers and every byte that decode gets are compared with a dense model's. With both
defences off the same comparison must fail, or it would prove nothing.

`--seeds N` runs N seeds; `make soak-prefill` runs 200.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prefill_node.faulty_pool import FaultyPool
from prefill_node.outcome import PrefillResult
from tests.model.dense_backend import DenseBackend
from tests.model.runner import Runner
from tests.prefill_node.harness import MemoryPool, Rig
from tests.prefill_node.pulling import KINDS, PullingReader

LONGEST, LAYERS = 150, range(4)
SLOW_S = 0.004  # a step of all layers takes about 10 ms
TOO_SLOW_S = 0.03  # for what a reader, or the pool, reads to be overwritten, on slow machines as well
PREFIX = 70


def texts(family: int) -> list[int]:
    """Long prompts; all begin with the same 70 tokens."""

    def tokens(count: int, seed: int) -> list[int]:
        return torch.randint(2, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    return tokens(PREFIX, 0) + tokens(LONGEST - PREFIX, 1 + family)


class Dense:
    """What a model that keeps everything computes for every beginning of the texts."""

    def __init__(self, model_dir: Path) -> None:
        runner = Runner(model_dir)
        self.rows: dict[tuple[int, int, str], Tensor] = {}  # by family, layer and kind: [LONGEST, width]
        self.next: list[list[int]] = []  # by family and length - 1: the greedy next token
        main = runner.config.kv_lora_rank
        for family in range(4):
            backend = DenseBackend(runner.config)
            backend.begin([("text", LONGEST)])
            logits = runner.decoder.forward(torch.tensor(texts(family)), torch.arange(LONGEST), backend)
            self.next.append(logits.argmax(dim=-1).tolist())
            for layer in LAYERS:
                both = backend._main[layer, "text"]
                self.rows[family, layer, "ckv"], self.rows[family, layer, "k_rope"] = both[:, :main], both[:, main:]
                self.rows[family, layer, "indexer"] = backend._index[layer, "text"]


@pytest.fixture(scope="module")
def dense(tiny_model: Path) -> Dense:
    return Dense(tiny_model)


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> range:
    return range(request.config.getoption("--seeds"))


def run(
    model_dir: Path, dense: Dense, seed: int, shared: int, *, forget_saves: bool = False, **options: Any
) -> Counter[str]:
    """What became of three requests: "right", "wrong" (token or bytes), or "refused".

    With `forget_saves` the gate waits for readers only.
    """
    luck = random.Random(seed)
    slow_reader, slow_pool = ((True, False), (False, True), (True, True))[seed % 3]
    reader_s, pool_s = options.pop("reader_s", SLOW_S * slow_reader), options.pop("pool_s", SLOW_S * slow_pool)
    rig = Rig(
        model_dir,
        shared=shared,
        independent=luck.choice(([0], [])),
        budget=luck.choice((48, 64, 100)),
        max_whole_tokens=LONGEST,
        pool=FaultyPool(MemoryPool(), delay_s=pool_s, failure=0.0, seed=seed),
        make_reader=partial(PullingReader, delay_s=reader_s, seed=seed),
        **options,
    )
    if forget_saves:
        add = rig.gate.add
        rig.gate.add = lambda slot, consumer, deadline: consumer.kind == "save" or add(slot, consumer, deadline)
    requests = {f"r{number}": (luck.randrange(4), luck.randint(1, LONGEST)) for number in range(3)}
    found: Counter[str] = Counter()
    try:
        for number, (name, (family, length)) in enumerate(requests.items()):
            rig.submit(name, texts(family)[:length])
            if number == 0 and luck.random() < 0.5:
                rig.run(name)  # the others find its rows in the pool
        rig.run(*requests)
        for name, (family, length) in requests.items():
            found[verdict(rig, dense, name, family, length)] += 1
    finally:
        rig.close()
        rig.reader.close()
    return found


def verdict(rig: Rig, dense: Dense, name: str, family: int, length: int) -> str:
    outcome = rig.outcomes[name]
    if not isinstance(outcome, PrefillResult) or rig.reader.ended(name) is not None:
        return "refused"
    if outcome.first_token.token != dense.next[family][length - 1]:
        return "wrong"
    same = [
        torch.allclose(
            rig.reader.pulled(layer, name, kind, length), dense.rows[family, layer, kind][:length], atol=2e-4, rtol=1e-4
        )
        for layer in LAYERS
        for kind in KINDS
    ]
    return "right" if all(same) else "wrong"


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_no_wrong_token_or_byte_however_slow_the_consumers(
    tiny_model: Path, dense: Dense, seeds: range, shared: int
) -> None:
    """Field failures C5, C14, C15: prefetch, eviction or the next layer overwrites what is still being read."""
    for seed in seeds:
        assert run(tiny_model, dense, seed, shared) == {"right": 3}, f"seed {seed}"


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_without_the_gate_a_slow_reader_notices_by_the_generation(
    tiny_model: Path, dense: Dense, seeds: range, shared: int
) -> None:
    """The second defence alone: requests are lost, but none is answered wrongly."""
    found: Counter[str] = Counter()
    for seed in seeds:
        found += run(
            tiny_model, dense, seed, shared, gate_closes=False, checksums=True, reader_s=TOO_SLOW_S, pool_s=0.0
        )
    assert found["refused"] and not found["wrong"], found


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_without_gate_and_generation_the_proof_fails(tiny_model: Path, dense: Dense, seeds: range, shared: int) -> None:
    """The same slow readers get other layers' rows: what the two tests above look for can be seen."""
    found: Counter[str] = Counter()
    for seed in seeds:
        found += run(
            tiny_model, dense, seed, shared, gate_closes=False, words_change=False, reader_s=TOO_SLOW_S, pool_s=0.0
        )
    assert found["wrong"], found


@pytest.mark.parametrize("checksums", [True, False])
def test_without_the_gate_a_slow_pool_keeps_wrong_rows_and_checksums_notice(
    tiny_model: Path, dense: Dense, seeds: range, checksums: bool
) -> None:
    """Field failures C6, C7: what is saved late is another layer's. Checksums see it; without them it is served."""
    found: Counter[str] = Counter()
    for seed in seeds:
        found += run(
            tiny_model, dense, seed, 1, forget_saves=True, checksums=checksums, reader_s=0.0, pool_s=TOO_SLOW_S
        )
    assert bool(found["wrong"]) != checksums, found
