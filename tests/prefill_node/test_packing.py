"""A step's prompts are computed as one packed batch, without padding, and each gets its own answer."""

from __future__ import annotations

import torch

from prefill_node.batch import pack
from prefill_node.steps import Chunk, StepPlan

BLOCK = 16
LENGTHS = {"long": 90, "one": 1, "aligned": 32, "short": 7}


def prompt(tokens: int) -> list[int]:
    return torch.randint(2, 320, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def chunk(name: str, first_block: int) -> Chunk:
    blocks = tuple(range(first_block, first_block + 6))
    return Chunk(name, 0, tuple(prompt(LENGTHS[name])), LENGTHS[name], blocks, blocks)


def test_chunks_are_packed_in_the_steps_order():
    chunks = tuple(chunk(name, 6 * index) for index, name in enumerate(LENGTHS))
    batch = pack(StepPlan(1, chunks), BLOCK)
    assert batch.cu_seqlens.tolist() == [0, 90, 91, 123, 130]
    assert batch.query_ends.tolist() == [90, 91, 123, 130]
    parts = [
        batch.packed_input_ids[start:end].tolist()
        for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
    ]
    assert parts == [prompt(length) for length in LENGTHS.values()]
    assert batch.positions.tolist() == [p for length in LENGTHS.values() for p in range(length)]
    assert batch.last_rows.tolist() == [89, 90, 122, 129]


def together(rig) -> list[int]:
    """Runs all prompts at once; the rows the model computed in each step."""
    rows = []
    hidden = rig.rank._decoder.hidden

    def count(token_ids, positions, backend):
        rows.append(len(token_ids))
        return hidden(token_ids, positions, backend)

    rig.rank._decoder.hidden = count
    for name, length in LENGTHS.items():
        rig.submit(name, prompt(length))
    rig.run(*LENGTHS)
    return rows


def test_no_padding_is_computed(make_rig):
    rows = together(make_rig(budget=64))
    assert sum(rows) == sum(LENGTHS.values())
    assert max(rows) <= 64


def test_answers_come_back_in_the_order_of_the_requests(make_rig):
    """Whatever they were packed with, requests get the tokens they get alone."""
    rig, alone = make_rig(budget=1024), make_rig(budget=1024)
    together(rig)
    for name, length in LENGTHS.items():
        alone.submit(name, prompt(length))
        alone.run(name)
        assert rig.outcomes[name].first_token.token == alone.outcomes[name].first_token.token
