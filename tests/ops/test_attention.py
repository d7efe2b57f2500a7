from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ops import BACKENDS, available_isas, backend, select_isa, sparse_flash_attention
from tests.ops.paged_case import TOLERANCE, dense_attention, gather, generator, i32, random_tables


def make_case(
    shapes: list[tuple[int, int]],
    heads: int,
    latent: int,
    rope: int,
    block: int,
    topk: int,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Tensor, ...]:
    """Inputs for (rows, length) per request with random selections that contain duplicates and -1."""
    rng = generator(seed)
    rows = sum(q for q, _ in shapes)
    table, blocks = random_tables([length for _, length in shapes], block, rng)
    ids = torch.cat([torch.randint(-1, length, (q, topk), generator=rng) for q, length in shapes]).int()
    return (
        torch.randn(rows, heads, latent, generator=rng).to(dtype),
        torch.randn(rows, heads, rope, generator=rng).to(dtype),
        torch.randn(blocks, block, 1, latent, generator=rng).to(dtype),
        torch.randn(blocks, block, 1, rope, generator=rng).to(dtype),
        table,
        torch.tensor([q for q, _ in shapes]).cumsum(0).int(),
        ids,
    )


def dense(case: tuple[Tensor, ...], lengths: list[int], scale: float) -> Tensor:
    q_nope, q_rope, ckv, k_rope, table, ends, ids = case
    out, start = torch.empty_like(q_nope, dtype=torch.float64), 0
    for i, end in enumerate(ends.tolist()):
        rows_ckv, rows_rope = (gather(cache, table[i], lengths[i]) for cache in (ckv, k_rope))
        for row in range(start, end):
            chosen = sorted({p for p in ids[row].tolist() if p >= 0})
            out[row] = dense_attention(q_nope[row], q_rope[row], rows_ckv, rows_rope, chosen, scale)
        start = end
    return out


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 80)), min_size=1, max_size=3),
    heads=st.sampled_from([1, 2, 5, 8, 19]),
    latent=st.sampled_from([3, 16, 40, 64]),
    rope=st.sampled_from([2, 8, 16]),
    block=st.sampled_from([1, 5, 16]),
    topk=st.sampled_from([1, 31, 32, 33, 70]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1 << 16),
)
def test_equals_dense_attention_over_the_selected_set(
    shapes: list[tuple[int, int]],
    heads: int,
    latent: int,
    rope: int,
    block: int,
    topk: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    case, scale = make_case(shapes, heads, latent, rope, block, topk, dtype, seed), (latent + rope) ** -0.5
    expected = dense(case, [length for _, length in shapes], scale)
    for name in BACKENDS:
        with backend(name):
            out = sparse_flash_attention(*case, scale)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_row_that_selects_nothing_is_zero(each_backend: str) -> None:
    case = make_case([(2, 9)], 4, 16, 8, 4, 6, torch.float32, 1)
    case[6][0] = -1
    out = sparse_flash_attention(*case, 0.2)
    assert out[0].eq(0).all() and out[1].ne(0).any()


def test_large_scores_stay_finite_and_exact(each_backend: str) -> None:
    case = make_case([(1, 200)], 3, 32, 8, 8, 150, torch.float32, 2)
    case[0].mul_(300)
    out = sparse_flash_attention(*case, 1.0)
    torch.testing.assert_close(out.double(), dense(case, [200], 1.0), atol=2e-3, rtol=2e-3)


def test_threads_and_instruction_sets_agree() -> None:
    case = make_case([(1, 300), (2, 40)], 32, 64, 16, 16, 100, torch.bfloat16, 4)
    expected = dense(case, [300, 40], 0.1)
    try:
        for isa in available_isas():
            select_isa(isa)
            for threads in (1, 5):
                torch.set_num_threads(threads)
                out = sparse_flash_attention(*case, 0.1)
                torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    finally:
        select_isa(None)


def test_errors_name_the_argument(each_backend: str) -> None:
    q_nope, q_rope, ckv, k_rope, table, ends, ids = make_case([(2, 9)], 4, 16, 8, 4, 6, torch.float32, 1)

    def refused(match: str, *args: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            sparse_flash_attention(*args, 1.0)

    refused("q_rope is torch.bfloat16", q_nope, q_rope.bfloat16(), ckv, k_rope, table, ends, ids)
    refused(r"k_rope_cache has shape", q_nope, q_rope, ckv, k_rope[:1], table, ends, ids)
    refused("topk_ids is torch.int64", q_nope, q_rope, ckv, k_rope, table, ends, ids.long())
    refused("query_ends ends at 5", q_nope, q_rope, ckv, k_rope, table, i32([5]), ids)
    refused("row 1", q_nope, q_rope, ckv, k_rope, table, ends, torch.where(ids < 0, ids, i32([[3], [1000]])))
