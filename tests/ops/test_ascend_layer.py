"""The operators around attention over emulated ones, against plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops import AscendLimits, ascend_layer, hadamard_quantise
from tests.ops import ascend_emulation
from tests.ops.paged_case import generator


@pytest.fixture(autouse=True)
def operators() -> None:
    ascend_emulation.install()


def angles(tokens: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(angles [T, R / 2], cos [T, R], sin [T, R])."""
    angle = torch.rand(tokens, 32, generator=rng) * 6
    return angle, angle.cos().repeat(1, 2).half(), angle.sin().repeat(1, 2).half()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_embeddings_turn_their_pairs(interleaved: bool) -> None:
    rng = generator(5)
    x = torch.randn(4, 3, 64, generator=rng).half()
    angle, cos, sin = angles(4, rng)
    rotate = ascend_layer.rope_interleaved if interleaved else ascend_layer.rope_half_split
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :32], x[..., 32:])
    turned = torch.complex(first.double(), second.double()) * torch.polar(torch.ones(4, 32), angle)[:, None]
    wanted = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(rotate(x, cos, sin).double(), wanted, atol=4e-3, rtol=4e-3)


def test_kv_is_normalised_rotated_and_written_to_its_slots() -> None:
    rng = generator(6)
    kv, gamma = torch.randn(3, 576, generator=rng).half(), torch.rand(512, generator=rng).half()
    _, cos, sin = angles(3, rng)
    rope, ckv = torch.zeros(2, 128, 1, 64).half(), torch.zeros(2, 128, 1, 512).half()
    slots = torch.tensor([130, 0, 127])
    ascend_layer.write_kv(kv, gamma, cos, sin, slots, rope, ckv, epsilon=1e-5)
    latent = kv[:, :512].double()
    wanted = latent / (latent.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double()
    torch.testing.assert_close(ckv.view(-1, 512)[slots].double(), wanted, atol=4e-3, rtol=4e-3)
    turned = ascend_layer.rope_interleaved(kv[:, None, 512:].contiguous(), cos, sin)
    torch.testing.assert_close(rope.view(-1, 64)[slots], turned.squeeze(1))
    for cache in (rope, ckv):
        assert int(cache.flatten(0, 2).any(-1).sum()) == len(slots)
    torch.testing.assert_close(
        ascend_layer.rms_norm(kv[:, :512].contiguous(), gamma, 1e-5).double(), wanted, atol=4e-3, rtol=4e-3
    )


def test_rows_are_written_to_their_slots() -> None:
    cache, rows = torch.zeros(2, 4, 1, 3), torch.arange(6.0).view(2, 3)
    ascend_layer.write_rows(cache, torch.tensor([6, 1]), rows)
    wanted = torch.zeros(8, 3)
    wanted[6], wanted[1] = rows
    assert torch.equal(cache.view(8, 3), wanted)


def test_quantised_rows_are_those_of_our_quantiser() -> None:
    """But for one step of rounding; what they stand for is the rotated row."""
    x = torch.randn(5, 3, 128, generator=generator(7)).half()
    values, scales = ascend_layer.hadamard_quantise(x)
    wanted, wanted_scales = hadamard_quantise(x)
    assert values.dtype == torch.int8 and int((values.int() - wanted.int()).abs().max()) <= 1
    torch.testing.assert_close(scales, wanted_scales, atol=1e-5, rtol=2e-3)


def test_illegal_layer_calls_name_the_argument() -> None:
    half = torch.float16
    kv, gamma, angle = torch.zeros(2, 576, dtype=half), torch.zeros(512, dtype=half), torch.zeros(2, 64, dtype=half)
    caches = torch.zeros(1, 128, 1, 64, dtype=half), torch.zeros(1, 128, 1, 512, dtype=half)
    slots = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"slots is torch.int32; legal: torch.int64"):
        ascend_layer.write_kv(kv, gamma, angle, angle, slots.int(), *caches, 1e-6)
    with pytest.raises(ValueError, match=r"kv has shape \[2, 512\]; legal: \[any, 576\]"):
        ascend_layer.write_kv(kv[:, :512].contiguous(), gamma, angle, angle, slots, *caches, 1e-6)
    with pytest.raises(ValueError, match=rf"gamma has shape \[256\]; legal: \[{AscendLimits.LATENT}\]"):
        ascend_layer.write_kv(kv, gamma[:256], angle, angle, slots, *caches, 1e-6)
    with pytest.raises(ValueError, match=r"cos has shape \[1, 64\]; legal: \[2, 64\]"):
        ascend_layer.rope_half_split(torch.zeros(2, 1, 64, dtype=half), angle[:1], angle)
    with pytest.raises(ValueError, match=r"rows is torch.float32; legal: torch.float16"):
        ascend_layer.write_rows(caches[0], slots, torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"x is torch.float32"):
        ascend_layer.hadamard_quantise(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="x has 12 dimensions; legal: a power of two from 1 to 1024"):
        ascend_layer.hadamard_quantise(torch.zeros(2, 12, dtype=half))
    with pytest.raises(ValueError, match=r"gamma has shape \[512\]; legal: \[576\]"):
        ascend_layer.rms_norm(kv, gamma, 1e-6)
