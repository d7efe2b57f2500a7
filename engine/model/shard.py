"""Which part of the model a tensor-parallel rank holds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.config import ModelConfig


class TensorParallelError(RuntimeError):
    """The ranks cannot share the model, or one of them was not heard of in time."""


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` equal ones; rank r holds the r-th contiguous part of whatever is split."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise TensorParallelError(f"tensor parallel rank {self.rank} of {self.size}; legal: 0 <= rank < size")

    def split(self, what: str, total: int) -> tuple[int, int]:
        """The half-open range of `total` items (named `what` in errors) that this rank holds.

        Raises:
            TensorParallelError: the number of ranks does not divide `total`.
        """
        if total % self.size:
            legal = [size for size in range(1, total + 1) if total % size == 0]
            message = f"tensor parallel size {self.size} does not divide {what} {total}; legal: {legal}"
            raise TensorParallelError(message)
        part = total // self.size
        return self.rank * part, (self.rank + 1) * part


def check_divisible(config: ModelConfig, shard: Shard) -> None:
    """Raise TensorParallelError unless the ranks can share the model's heads, experts and widths evenly."""
    shard.split("num_attention_heads", config.num_attention_heads)
    if not all(config.moe_layers):
        shard.split("intermediate_size", config.intermediate_size)
    if any(config.moe_layers):
        shard.split("n_routed_experts", config.n_routed_experts)
        shard.split("moe_intermediate_size * n_shared_experts", config.moe_intermediate_size * config.n_shared_experts)
