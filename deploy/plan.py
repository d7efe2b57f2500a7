"""What a deployment needs for so many requests of such a length. Pure: no torch, no I/O, nothing is started.

The numbers come from the same functions with which the workers size themselves, `prefill_node.shape.prefill_shape` and
`decode_node.geometry.plan_geometry`, applied to a configuration that has exactly room for the load. They cover the KV
cache; weights and activations need device memory of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from decode_node.geometry import DecodeGeometry, plan_geometry
from engine.config import ConfigError, SluiceConfig
from engine.config_check import min_hot_tokens
from engine.model.config import ModelConfig
from prefill_node.geometry import CapacityError
from prefill_node.shape import PrefillShape, pool_bytes_for, prefill_shape

_AMPLE = 1 << 62  # bytes; stands for "enough" until the need is known
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True)
class Load:
    """What is to be served: `concurrency` requests at a time, each of `context` tokens, prompt and output together."""

    context: int
    concurrency: int


@dataclass(frozen=True)
class PrefillNeeds:
    """Of each prefill worker, which computes one prompt of the full context at a time."""

    layers: int  # N
    independent: int  # I
    shared: int  # min(B, N - I)
    footprint: float  # (I + min(B, N - I)) / N
    kv_blocks: int  # of each layer buffer
    device_bytes: int
    device_bytes_all_resident: int  # with a buffer for every layer
    pool_bytes: int  # share of the pool that one prompt fills; 0 if nothing is ever reloaded


@dataclass(frozen=True)
class DecodeNeeds:
    """Of each DP rank; device bytes are those of each of its workers."""

    requests: int  # of the load, on one DP rank
    host_bytes: int  # main KV
    device_bytes: int  # indexer caches and hot buffers
    device_bytes_all_resident: int  # with main KV on the device instead of in host memory and hot buffers
    indexer_bytes: int  # as `kv.indexer_dtype` says
    indexer_bytes_model: int  # in the model's dtype
    indexer_bytes_int8: int | None  # None if this checkpoint's keys cannot be int8
    hot_tokens: int
    hot_bytes_per_request: int
    break_even_context: int  # tokens; up to here a hot row is no smaller than the main KV it stands for


@dataclass(frozen=True)
class Plan:
    """What both sides need, and the configuration that has exactly room for it."""

    load: Load
    prefill: PrefillNeeds
    decode: DecodeNeeds
    config: SluiceConfig

    def settings(self) -> dict[str, Any]:
        """The fields that follow from the load, by dotted path."""
        c = self.config
        return {
            "model.max_model_len": c.model.max_model_len,
            "hostcann.hbm_bytes": c.hostcann.hbm_bytes,
            "prefill.kv_blocks": c.prefill.kv_blocks,
            "pool.dram_bytes": c.pool.dram_bytes,
            "decode.hot_tokens": c.decode.hot_tokens,
            "decode.host_pool_bytes": c.decode.host_pool_bytes,
            "decode.max_requests": c.decode.max_requests,
        }


def parse_tokens(text: str) -> int:
    """``"128K"`` -> 131072, ``"1M"`` -> 1048576. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower())
    tokens = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if tokens < 1:
        raise ConfigError(f"{text!r} is not a number of tokens; write one like 4096, 128K or 1M")
    return tokens


def plan_deployment(config: SluiceConfig, model: ModelConfig, load: Load) -> Plan:
    """What `load` needs, with the topology, dtypes and layer buffers of `config`, whose sizes are not looked at.

    A hot buffer too small for the model is planned with the smallest legal size.

    Raises ConfigError for layer buffers the model does not have.
    """
    replicas = config.decode.groups * config.decode.dp
    blocks = -(-load.context // config.kv.block_size)
    requests = -(-load.concurrency // replicas)
    ample = _with(
        config,
        model={"max_model_len": load.context},
        hostcann={"hbm_bytes": _AMPLE},
        prefill={"kv_blocks": blocks},
        pool={"dram_bytes": _AMPLE},
        decode={
            "hot_tokens": max(config.decode.hot_tokens, min_hot_tokens(config, model)),
            "host_pool_bytes": _AMPLE,
            "max_requests": requests,
        },
    )
    try:
        shape = prefill_shape(ample, model)
        resident = prefill_shape(_with(ample, prefill={"independent_layers": "all"}), model)
    except (CapacityError, ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
    block_bytes = plan_geometry(ample, model).host_block_bytes
    sized = _with(ample, decode={"host_pool_bytes": requests * blocks * block_bytes})
    geometry = plan_geometry(sized, model)
    pool_bytes = pool_bytes_for(blocks, shape.object_layout) if shape.plan.has_reuse else 0
    exact = _with(
        sized,
        hostcann={"hbm_bytes": max(shape.device_bytes, geometry.device_bytes)},
        pool={"dram_bytes": max(pool_bytes, config.pool.dram_bytes)},
    )
    return Plan(load, _prefill(shape, resident, pool_bytes), _decode(exact, model, geometry), exact)


def with_setting(config: SluiceConfig, path: str, value: object) -> SluiceConfig:
    """A copy with one field, given as ``section.field``, changed; not validated."""
    section, field = path.split(".")
    return _with(config, **{section: {field: value}})


def _prefill(shape: PrefillShape, resident: PrefillShape, pool_bytes: int) -> PrefillNeeds:
    plan = shape.plan
    return PrefillNeeds(
        layers=plan.num_layers,
        independent=len(plan.independent),
        shared=plan.num_slots - len(plan.independent),
        footprint=plan.footprint,
        kv_blocks=shape.kv_blocks,
        device_bytes=shape.device_bytes,
        device_bytes_all_resident=resident.device_bytes,
        pool_bytes=pool_bytes,
    )


def _decode(config: SluiceConfig, model: ModelConfig, geometry: DecodeGeometry) -> DecodeNeeds:
    def indexer_bytes(dtype: str) -> int:
        return plan_geometry(with_setting(config, "kv.indexer_dtype", dtype), model).indexer_bytes

    can_be_int8 = model.index_head_dim & (model.index_head_dim - 1) == 0
    return DecodeNeeds(
        requests=geometry.hot.rows,
        host_bytes=geometry.host_pool_bytes,
        device_bytes=geometry.device_bytes,
        device_bytes_all_resident=geometry.host_pool_bytes + geometry.indexer_bytes,
        indexer_bytes=geometry.indexer_bytes,
        indexer_bytes_model=indexer_bytes("model"),
        indexer_bytes_int8=indexer_bytes("int8") if can_be_int8 else None,
        hot_tokens=geometry.hot.tokens,
        hot_bytes_per_request=geometry.hot_bytes_per_request,
        break_even_context=geometry.hot.stride,
    )


def _with(config: SluiceConfig, **sections: dict[str, Any]) -> SluiceConfig:
    changed = {name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()}
    return config.model_copy(update=changed)
