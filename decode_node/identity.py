"""Who a decode worker process is, and what it tells the meta server about itself."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.v1 import common_pb2, registry_pb2

from decode_node.geometry import DecodeGeometry
from engine.config import SluiceConfig
from engine.identity import new_identity
from engine.model.config import ModelConfig


@dataclass(frozen=True)
class Place:
    """Which of the deployment's decode workers this process is."""

    group: int
    dp_rank: int
    tp_rank: int

    @property
    def ranks(self) -> tuple[int, int, int]:
        return self.group, self.dp_rank, self.tp_rank

    @property
    def group_name(self) -> str:
        return f"decode-{self.group}"

    @property
    def replica_name(self) -> str:
        """Of the DP rank, without characters that a file name cannot hold."""
        return f"{self.group_name}.dp{self.dp_rank}"

    @property
    def worker_id(self) -> str:
        return f"{self.group_name}/dp{self.dp_rank}/tp{self.tp_rank}"


def worker_info(
    config: SluiceConfig, model: ModelConfig, geometry: DecodeGeometry, place: Place, device: int
) -> registry_pb2.WorkerInfo:
    """A new identity, with a new epoch. Raises ModelConfigError when the checkpoint's files are missing."""
    info = new_identity(config, model, device)
    place_and_limits = registry_pb2.WorkerInfo(
        worker_id=place.worker_id,
        role=common_pb2.WORKER_ROLE_DECODE,
        group=place.group_name,
        dp_rank=place.dp_rank,
        tp_rank=place.tp_rank,
        tp_size=config.decode.tp,
        max_request_tokens=geometry.max_request_tokens,
        max_requests=config.decode.max_requests,
    )
    info.MergeFrom(place_and_limits)
    return info
