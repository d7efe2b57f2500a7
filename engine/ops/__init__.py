"""Sluice's operators: the ``sluice`` namespace of ``torch.ops`` and typed functions over it.

Each has two CPU implementations, chosen with ``backend("cpu")`` (C++, the default) or ``backend("reference")``. NPU
tensors run on Ascend's own operators, once ``engine.ops.ascend.enable()`` has been called.
"""

from engine.ops.ascend_limits import AscendLimits
from engine.ops.attention import sparse_flash_attention
from engine.ops.backends import BACKENDS, Backend, backend, current_backend
from engine.ops.copy_sfa import fused_scatter_copy_sparse_flash_attention
from engine.ops.indexer import lightning_indexer, quant_lightning_indexer
from engine.ops.lim import NO_SLOT, fused_lightning_indexer_manage
from engine.ops.lim_quant import fused_quant_lightning_indexer_manage
from engine.ops.native import available_isas, select_isa, set_device, set_num_threads
from engine.ops.quantise import hadamard_quantise
from engine.ops.residency import Residency, ResidencyState, lru_residency
from engine.ops.tail import select_with_tail

__all__ = [
    "BACKENDS",
    "NO_SLOT",
    "AscendLimits",
    "Backend",
    "Residency",
    "ResidencyState",
    "available_isas",
    "backend",
    "current_backend",
    "fused_lightning_indexer_manage",
    "fused_quant_lightning_indexer_manage",
    "fused_scatter_copy_sparse_flash_attention",
    "hadamard_quantise",
    "lightning_indexer",
    "lru_residency",
    "quant_lightning_indexer",
    "select_isa",
    "select_with_tail",
    "set_device",
    "set_num_threads",
    "sparse_flash_attention",
]
