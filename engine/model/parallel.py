"""Tensor parallelism: the sum over all ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from engine.model.shard import Shard, TensorParallelError


class TensorParallel(Protocol):
    """What the decoder asks of its group."""

    @property
    def shard(self) -> Shard:
        """This process's rank and the number of ranks."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, bit-equal on each; may reuse its memory."""


class SingleRank:
    """A group of one: nothing to sum."""

    shard = Shard(rank=0, size=1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """`tensor` itself."""
        return tensor


class TensorParallelGroup:
    """Ranks joined by torch.distributed (gloo on CPU hosts, hccl on NPUs); one group per process.

    Invariant: no call waits longer than the group's timeout for a peer. After a TensorParallelError the ranks are out
    of step, and so are torch's own counters: all processes of the group must be started anew.
    """

    def __init__(self, shard: Shard, init_method: str, backend: str = "gloo", timeout_s: float = 60.0) -> None:
        """Join the group and wait until all ranks have.

        `init_method` is a torch.distributed URL, the same on all ranks: tcp://host:port or file:///path.

        Raises:
            TensorParallelError: the ranks did not meet within `timeout_s` seconds.
        """
        self._shard = shard
        self._timeout_s = timeout_s
        try:
            dist.init_process_group(
                backend,
                init_method=init_method,
                rank=shard.rank,
                world_size=shard.size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise self._failed(f"joining {init_method} over {backend}", error) from error

    @property
    def shard(self) -> Shard:
        """This process's rank and the number of ranks."""
        return self._shard

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it.

        Raises:
            TensorParallelError: a peer is gone or did not answer in time.
        """
        tensor = tensor.contiguous()
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise self._failed(f"summing a {list(tensor.shape)} tensor", error) from error
        return tensor

    def close(self) -> None:
        """Leave the group; idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _failed(self, doing: str, error: Exception) -> TensorParallelError:
        who = f"tensor parallel rank {self._shard.rank} of {self._shard.size}"
        return TensorParallelError(f"{who} failed at {doing} (timeout {self._timeout_s:g} s): {error}")
