"""Who a prefill worker process is, and what it tells the meta server about itself."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass

from sluice.v1 import common_pb2, registry_pb2

from engine.config import SluiceConfig
from engine.model.config import ModelConfig
from engine.model.fingerprint import fingerprint
from prefill_node.shape import PrefillShape
from transfer.layout import kv_layout


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
    layout = kv_layout(
        fingerprint=fingerprint(config.model.path),
        dtype=config.model.dtype,
        block_size=shape.geometry.block_size,
        num_layers=shape.plan.num_layers,
        kv_lora_rank=model.kv_lora_rank,
        rope_dim=model.qk_rope_head_dim,
        index_dim=model.index_head_dim,
        indexer_layers=model.indexer_layers,
        protocol=config.transfer.protocol,
        indexer_dtype=config.kv.indexer_dtype,
    )
    return registry_pb2.WorkerInfo(
        worker_id=place.worker_id,
        role=common_pb2.WORKER_ROLE_PREFILL,
        group=place.group_name,
        tp_rank=place.tp_rank,
        tp_size=config.prefill.tp,
        epoch=uuid.uuid4().hex,
        layout=layout,
        device_id=device,
        pid=os.getpid(),
        host=socket.gethostname(),
        max_request_tokens=shape.max_prompt_tokens,
        max_requests=config.prefill.max_requests,
    )
