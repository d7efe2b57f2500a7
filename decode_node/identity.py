"""Who a decode worker process is, and what it tells the meta server about itself."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass

from sluice.v1 import common_pb2, registry_pb2

from decode_node.geometry import DecodeGeometry
from engine.config import SluiceConfig
from engine.model.config import ModelConfig
from engine.model.fingerprint import fingerprint
from transfer.layout import kv_layout


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
    layout = kv_layout(
        fingerprint=fingerprint(config.model.path),
        dtype=config.model.dtype,
        block_size=geometry.block_size,
        num_layers=geometry.num_layers,
        kv_lora_rank=geometry.kv_lora_rank,
        rope_dim=geometry.rope_dim,
        index_dim=geometry.index_dim,
        indexer_layers=geometry.indexer_layers,
        protocol=config.transfer.protocol,
        indexer_dtype=config.kv.indexer_dtype,
    )
    return registry_pb2.WorkerInfo(
        worker_id=place.worker_id,
        role=common_pb2.WORKER_ROLE_DECODE,
        group=place.group_name,
        dp_rank=place.dp_rank,
        tp_rank=place.tp_rank,
        tp_size=config.decode.tp,
        epoch=uuid.uuid4().hex,
        layout=layout,
        device_id=device,
        pid=os.getpid(),
        host=socket.gethostname(),
        max_request_tokens=geometry.max_request_tokens,
        max_requests=config.decode.max_requests,
    )
