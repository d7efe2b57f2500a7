from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops import BACKENDS, available_isas, backend, hadamard_quantise, quant_lightning_indexer, select_isa
from tests.ops.paged_case import generator
from tests.ops.quant_case import QuantCase


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 17), st.integers(17, 90)), min_size=1, max_size=3),
    heads=st.sampled_from([1, 3, 16, 33]),
    dims=st.sampled_from([5, 16, 64]),
    block_size=st.sampled_from([1, 7, 16]),
    topk=st.sampled_from([1, 8, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1 << 16),
)
def test_exact_scores_select_the_same_on_both_back_ends(
    shapes: list[tuple[int, int]],
    heads: int,
    dims: int,
    block_size: int,
    topk: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    case = QuantCase.random(shapes, heads=heads, dims=dims, block_size=block_size, seed=seed, exact=True, dtype=dtype)
    expected = [torch.sort(s, descending=True, stable=True).indices[:topk].tolist() for s in case.dense_scores()]
    for name in BACKENDS:
        with backend(name):
            ids = quant_lightning_indexer(*case.args(), topk)
        assert [[p for p in row if p >= 0] for row in ids.tolist()] == expected


def test_full_range_values_select_the_best_on_every_instruction_set() -> None:
    """Sums of products of -127 .. 127 overflow neither 16 bits nor float32; only near ties may be decided otherwise."""
    case, topk = QuantCase.random([(3, 700)], heads=64, dims=128, block_size=128, seed=3), 256
    case.query[0], case.key_cache[:, 5] = 127, 127
    scores = case.dense_scores()
    best = [torch.sort(row, descending=True).values[:topk] for row in scores]
    try:
        for isa in (*available_isas(), None):
            select_isa(isa)
            with backend("reference" if isa is None else "cpu"):
                ids = quant_lightning_indexer(*case.args(), topk)
            for row in range(3):
                assert len(set(ids[row].tolist())) == topk
                got = scores[row][ids[row].long()]
                torch.testing.assert_close(got, best[row], atol=1e-6 * float(best[row].max()), rtol=0)
    finally:
        select_isa(None)


def test_prefill_and_decode_select_alike() -> None:
    rows, length, topk = 20, 6000, 200
    case = QuantCase.random([(rows, length)], heads=8, dims=32, block_size=64, seed=2)
    whole = quant_lightning_indexer(*case.args(), topk)
    row = slice(7, 8)
    one = case.query[row], case.weights[row], case.query_scale[row], case.key_cache, case.key_scale, case.block_table
    visible = torch.tensor([length - (rows - 1 - 7)]).int()
    for threads in (1, 4):
        torch.set_num_threads(threads)
        ids = quant_lightning_indexer(*one, torch.tensor([1]).int(), visible, topk)
        assert torch.equal(ids[0], whole[7])


def test_errors_name_the_argument(each_backend: str) -> None:
    case = QuantCase.random([(2, 20)], heads=2, dims=8, block_size=4, seed=1)

    def refused(match: str, **changes: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            quant_lightning_indexer(*{**case.__dict__, **changes}.values(), 4)

    refused("query is torch.bfloat16; legal: torch.int8", query=case.query.bfloat16())
    refused(r"query_scale is torch.float32; legal: torch.float16", query_scale=case.query_scale.float())
    refused(r"key_scale has shape \[\d+, 4\]", key_scale=case.key_scale.squeeze(2))
    wide = QuantCase.random([(2, 20)], heads=2, dims=1028, block_size=4, seed=1)
    with pytest.raises(ValueError, match="query has 1028 dimensions; legal for int8: at most 1024"):
        quant_lightning_indexer(*wide.args(), 4)


def hadamard(dims: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dims:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / dims**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [1, 2, 64, 128, 1024])
def test_quantiser_is_the_rotation_to_within_half_a_step(each_backend: str, dims: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, dims, generator=generator(dims)).to(dtype)
    values, scales = hadamard_quantise(x)
    assert values.shape == x.shape and scales.shape == x.shape[:-1]
    assert values.dtype == torch.int8 and scales.dtype == torch.float16
    rotated = x.double() @ hadamard(dims)
    torch.testing.assert_close(scales.double(), rotated.abs().amax(-1) / 127, rtol=1e-3, atol=0)
    error = (values.double() * scales.double().unsqueeze(-1) - rotated).abs()
    # where the half-precision scale was rounded down the largest value is cut off at 127
    assert bool((error <= scales.double().unsqueeze(-1) * 0.5001 + 127 * scales.double().unsqueeze(-1) * 2**-11).all())


def test_both_back_ends_quantise_to_the_same_bits() -> None:
    x = torch.randn(500, 128, generator=generator(1)) * torch.logspace(-9, 6, 500).unsqueeze(1)
    x[3], x[4, 1:], x[5, 7] = 0, 0, torch.nan
    results = []
    for name in BACKENDS:
        with backend(name):
            results.append(hadamard_quantise(x))
    (values, scales), (expected_values, expected_scales) = results
    assert torch.equal(values, expected_values) and torch.equal(
        scales.view(torch.int16), expected_scales.view(torch.int16)
    )
    assert values[3].eq(0).all() and scales[3] == 0
    assert values[5].eq(0).all() and scales[5].isnan() and scales.isfinite().sum() == 499


def test_the_quantiser_refuses_what_it_cannot_rotate(each_backend: str) -> None:
    with pytest.raises(ValueError, match="x has 96 dimensions; legal: a power of two from 1 to 1024"):
        hadamard_quantise(torch.zeros(2, 96))
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        hadamard_quantise(torch.zeros(2, 64, dtype=torch.float64))
