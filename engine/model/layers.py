"""Norms, rotary embedding and the dense SwiGLU block."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.rope_config import RopeConfig, YarnConfig
from engine.model.weights import MlpWeights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 and scaled in x's dtype."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def swiglu(x: Tensor, weights: MlpWeights) -> Tensor:
    """down(silu(gate(x)) * up(x)): [T, H] -> [T, H], this rank's part of the sum over ranks."""
    gate, up = F.linear(x, weights.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weights.down)


class RotaryEmbedding:
    """Turns positions into rotations. Frequencies are float32; cos and sin come in the model's dtype."""

    def __init__(self, rope: RopeConfig, rope_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._scale = rope.yarn.embedding_scale if rope.yarn else 1.0
        wavelengths = rope.theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
        frequencies = 1.0 / wavelengths
        if rope.yarn:
            frequencies = _yarn_frequencies(wavelengths, rope.theta, rope_dim, rope.yarn)
        self._frequencies = frequencies.to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, rope_dim / 2], for int64 `positions` [T]."""
        angles = positions[:, None].to(torch.float32) * self._frequencies
        return (angles.cos() * self._scale).to(self._dtype), (angles.sin() * self._scale).to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of x's last dimension: neighbours (2i, 2i+1) if `interleaved`, else (i, i + half).

    `cos` and `sin` must broadcast against [..., half]. The result is laid out in halves in both cases; as queries
    and keys are laid out alike, their products do not depend on it.
    """
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _yarn_frequencies(wavelengths: Tensor, theta: float, rope_dim: int, yarn: YarnConfig) -> Tensor:
    """Blend of original and stretched frequencies by a linear ramp over dimensions (arXiv 2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that turns `rotations` times over the original length."""
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (yarn.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
