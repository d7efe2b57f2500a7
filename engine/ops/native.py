"""The C++ back end: loads ``libsluice_ops.so`` and calls it through ctypes, which releases the GIL.

Layouts below mirror the argument structs of ``csrc/sluice_ops.h`` in order; the library checks their size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from transfer.build_folder import build_folder

LIBRARY_PATH = build_folder() / "ops" / "libsluice_ops.so"

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_INVALID = 1


class _Layout(NamedTuple):
    """Fields of one argument struct: `size`, the pointers, the scale if it has one, the sizes."""

    pointers: str
    sizes: str
    scale: bool = False


_LAYOUTS = {
    "lightning_indexer": _Layout(
        "query weights key_cache block_table query_ends key_lens topk_ids query_scale key_scale",
        "rows heads dims requests blocks block_size max_blocks topk dtype weights_dtype threads",
    ),
    "sparse_flash_attention": _Layout(
        "query_nope query_rope ckv_cache rope_cache block_table query_ends topk_ids out",
        "rows heads latent rope requests blocks block_size max_blocks topk dtype threads",
        scale=True,
    ),
    "lru_residency": _Layout(
        "topk_ids query_ends stable_prefix generation row_index last_generation slot_to_token last_used "
        "clock "
        "slots miss_ids miss_slots miss_counts hit_counts",
        "rows topk requests miss_capacity state_rows capacity threads",
    ),
    "copy_sparse_flash_attention": _Layout(
        "query_rope query query_ends kv_lens cache_tokens topk_dst_slots topk_src_ids topk_miss_counts "
        "miss_src_ids miss_dst_slots miss_counts hbm_block_table dram_block_table "
        "hbm_rope hbm_ckv dram_rope dram_ckv out copied_bytes",
        "rows heads latent rope requests topk miss_capacity hbm_blocks dram_blocks block_size "
        "hbm_max_blocks dram_max_blocks dtype threads device",
        scale=True,
    ),
    "lightning_indexer_manage": _Layout(
        "weights query_scale query key_scale key_cache block_table query_ends key_lens stable_lens cache_tokens states "
        "pool_entries slots_pool topk_src_ids topk_dst_slots topk_miss_counts miss_src_ids miss_dst_slots miss_counts "
        "topk_scores",
        "rows heads dims requests blocks block_size max_blocks topk pool_rows pool_width miss_capacity "
        "dtype weights_dtype threads",
    ),
    "select_with_tail": _Layout(
        "weights query_scale query key_scale key_cache block_table query_ends key_lens stable_lens cache_tokens states "
        "topk_src_ids topk_dst_slots topk_scores ids slots",
        "rows heads dims requests blocks block_size max_blocks topk dtype weights_dtype threads",
    ),
    "hadamard_quantise": _Layout("rows values scales", "count dims dtype threads"),
}


class Settings:
    """Process-wide settings of the C++ back end.

    Attributes:
        threads: Threads per operator call, the caller included; None follows ``torch.get_num_threads()``
            (and so OMP_NUM_THREADS).
        device: The device that host-to-device copies are accounted to.
    """

    threads: int | None = None
    device: int = 0


def set_num_threads(count: int) -> None:
    """Use ``count`` threads per operator call from now on. Raises ValueError below 1."""
    if count < 1:
        raise ValueError(f"count is {count}; legal: 1 or more")
    Settings.threads = count


def set_device(index: int) -> None:
    """Account host-to-device copies of this process to device ``index``. Raises ValueError below 0."""
    if index < 0:
        raise ValueError(f"index is {index}; legal: 0 or more")
    Settings.device = index


def available_isas() -> tuple[str, ...]:
    """Instruction sets this machine can run, best first."""
    return tuple(_library().sluice_ops_isas().decode().split(","))


def select_isa(name: str | None) -> None:
    """Use instruction set ``name`` process-wide; None is the best one. Raises ValueError if it cannot run here."""
    _raise(_library().sluice_ops_select_isa((name or "").encode()))


Values = dict[str, Tensor | int | float | None]


class Prepared:
    """A call of ``sluice_<operator>``, to be made again and again, each time with other memory for some arguments.

    Making it costs a few microseconds, a tenth of what a call of the checked operator takes: for loops over layers.
    """

    __slots__ = ("_arguments", "_function", "_reference", "_tensors")

    def __init__(self, operator: str, values: Values) -> None:
        """``values``: one per field of the operator's struct but size, threads and device; tensors are kept alive.

        Raises:
            RuntimeError: The library is not built.
        """
        struct = _struct(operator)
        self._tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        filled: dict[str, int | float | None] = {
            name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in values.items()
        }
        threads = Settings.threads or torch.get_num_threads()
        defaults = {"size": ctypes.sizeof(struct), "threads": threads, "device": Settings.device}
        filled.update({name: value for name, value in defaults.items() if hasattr(struct, name)})
        self._function, self._arguments = _function(operator), struct(**filled)
        self._reference = ctypes.byref(self._arguments)

    def __call__(self, **tensors: Tensor) -> None:
        """Run it, with ``tensors`` from now on in place of those of the same names.

        Raises:
            ValueError: A tensor has another layout than the one it replaces, or an argument an illegal value.
            RuntimeError: The library could not get memory or threads.
        """
        for name, tensor in tensors.items():
            replaced = self._tensors[name]
            if tensor is replaced:
                continue
            if tensor.shape != replaced.shape or tensor.dtype != replaced.dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; legal here: contiguous, {replaced.dtype} "
                    f"of shape {list(replaced.shape)}, like the one before"
                )
            self._tensors[name] = tensor
            setattr(self._arguments, name, tensor.data_ptr())
        _raise(self._function(self._reference))


def call(operator: str, values: Values) -> None:
    """Run ``sluice_<operator>`` once; see ``Prepared``."""
    Prepared(operator, values)()


def dtype_code(tensor: Tensor) -> int:
    """The library's code of ``tensor.dtype``, which must be float32, bfloat16, float16 or int8."""
    return _DTYPE_CODES[tensor.dtype]


def _raise(status: int) -> None:
    if status == 0:
        return
    message = _library().sluice_ops_last_error().decode()
    raise ValueError(message) if status == _INVALID else RuntimeError(message)


@cache
def _struct(operator: str) -> type[ctypes.Structure]:
    layout = _LAYOUTS[operator]
    fields: list[tuple[str, type]] = [("size", ctypes.c_int64)]
    fields += [(name, ctypes.c_void_p) for name in layout.pointers.split()]
    fields += [("scale", ctypes.c_double)] if layout.scale else []
    fields += [(name, ctypes.c_int64) for name in layout.sizes.split()]
    return type(f"{operator}_args", (ctypes.Structure,), {"_fields_": fields})


@cache
def _function(operator: str) -> Callable[..., int]:
    function: Callable[..., int] = getattr(_library(), f"sluice_{operator}")
    return function


@cache
def _library() -> ctypes.CDLL:
    if not LIBRARY_PATH.exists():
        raise RuntimeError(
            f"{LIBRARY_PATH} is not built; run `make setup`, or "
            "`cmake -S engine/ops/csrc -B build/ops && cmake --build build/ops`"
        )
    library = ctypes.CDLL(str(LIBRARY_PATH))
    library.sluice_ops_last_error.restype = ctypes.c_char_p
    library.sluice_ops_isas.restype = ctypes.c_char_p
    library.sluice_ops_select_isa.argtypes = [ctypes.c_char_p]
    return library
