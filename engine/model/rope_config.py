"""Rotary embedding parameters of a checkpoint, in either of the two spellings found in the wild."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.model.config_reader import FieldReader


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv 2309.00071).

    `factor` stretches positions, `original_max_position_embeddings` is the length (tokens) before stretching,
    `beta_fast` and `beta_slow` are the rotation counts between which dimensions blend from extrapolation to
    interpolation, `truncate` rounds these bounds to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    attention_factor: float | None
    truncate: bool

    @property
    def embedding_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_scale(self) -> float:
        """What the attention scale is multiplied by: mscale squared (the indexer's scale is not touched)."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Base wavelength and, when positions are stretched, YaRN."""

    theta: float
    yarn: YarnConfig | None = None


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(config: FieldReader, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_theta` + `rope_scaling` (which wins where both are given).

    Raises:
        ModelConfigError: for a rope type other than default and yarn, or an illegal parameter.
    """
    default_theta = config.number("rope_theta", 10_000.0)
    rope = config.child("rope_scaling") or config.child("rope_parameters")
    if rope is None:
        return RopeConfig(theta=default_theta)
    theta = rope.number("rope_theta", default_theta)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", rope.raw("partial_rotary_factor"), "1.0")
    type_field = "rope_type" if rope.raw("rope_type") is not None else "type"
    if rope.choice(type_field, ("default", "yarn"), default="default") == "default":
        return RopeConfig(theta=theta)
    original = rope.integer("original_max_position_embeddings", max_position_embeddings)
    attention_factor = rope.number("attention_factor") if rope.raw("attention_factor") is not None else None
    yarn = YarnConfig(
        factor=rope.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 0.0, above=-1.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, above=-1.0),
        attention_factor=attention_factor,
        truncate=rope.boolean("truncate", True),
    )
    return RopeConfig(theta=theta, yarn=yarn)
