"""Who a prefill worker process is, and what it tells the meta server about itself."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.v1 import common_pb2, registry_pb2

from engine.config import SluiceConfig
from engine.identity import new_identity
from engine.model.config import ModelConfig
from prefill_node.shape import PrefillShape


@dataclass(frozen=True)
class Place:
    """Which of the deployment's prefill workers this process is."""

    group: int
    tp_rank: int

    @property
    def group_name(self) -> str:
        return f"prefill-{self.group}"

    @property
    def worker_id(self) -> str:
        return f"{self.group_name}/tp{self.tp_rank}"


def worker_info(
    config: SluiceConfig, model: ModelConfig, shape: PrefillShape, place: Place, device: int
) -> registry_pb2.WorkerInfo:
    """A new identity, with a new epoch. Raises ModelConfigError when the checkpoint's files are missing."""
    info = new_identity(config, model, device)
    place_and_limits = registry_pb2.WorkerInfo(
        worker_id=place.worker_id,
        role=common_pb2.WORKER_ROLE_PREFILL,
        group=place.group_name,
        tp_rank=place.tp_rank,
        tp_size=config.prefill.tp,
        max_request_tokens=shape.max_prompt_tokens,
        max_requests=config.prefill.max_requests,
    )
    info.MergeFrom(place_and_limits)
    return info
