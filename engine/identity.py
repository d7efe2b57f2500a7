"""What a worker process of either kind tells the meta server about itself; each kind adds its place and its limits."""

from __future__ import annotations

import os
import socket
import uuid

from sluice.v1 import registry_pb2

from engine.config import SluiceConfig
from engine.model.config import ModelConfig
from engine.model.fingerprint import fingerprint
from transfer.layout import kv_layout


def new_identity(config: SluiceConfig, model: ModelConfig, device: int) -> registry_pb2.WorkerInfo:
    """This process, with a new epoch, and the KV layout that both sides must have.

    Raises ModelConfigError when the checkpoint's files are missing.
    """
    layout = kv_layout(
        fingerprint=fingerprint(config.model.path),
        dtype=config.model.dtype,
        block_size=config.kv.block_size,
        num_layers=model.num_layers,
        kv_lora_rank=model.kv_lora_rank,
        rope_dim=model.qk_rope_head_dim,
        index_dim=model.index_head_dim,
        indexer_layers=model.indexer_layers,
        protocol=config.transfer.protocol,
        indexer_dtype=config.kv.indexer_dtype,
    )
    return registry_pb2.WorkerInfo(
        epoch=uuid.uuid4().hex, layout=layout, device_id=device, pid=os.getpid(), host=socket.gethostname()
    )
