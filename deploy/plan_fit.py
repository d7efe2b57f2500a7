"""Does a configuration have room for a planned load, and which field to change where it does not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deploy.plan import Load, Plan, plan_deployment, with_setting
from engine.config import ConfigError, SluiceConfig
from engine.config_check import check_against_model
from engine.model.config import ModelConfig


@dataclass(frozen=True)
class Remedy:
    """One field to change instead, and the device bytes that are needed then."""

    setting: str  # "section.field=value"
    device_bytes: int
    fits: bool


@dataclass(frozen=True)
class Shortfall:
    """A field whose value has no room for the load."""

    field: str  # dotted path
    configured: int
    needed: int
    reason: str
    remedies: tuple[Remedy, ...] = ()  # other ways than raising the field


def shortfalls(config: SluiceConfig, model: ModelConfig, plan: Plan) -> tuple[Shortfall, ...]:
    """Every field of `config` that is too small for the plan's load; empty when the load fits."""
    return tuple(_fields(config, plan)) + tuple(_devices(config, model, plan))


def other_problems(model: ModelConfig, plan: Plan) -> str:
    """What is wrong even with room enough, one line each: lengths, parallelism or layers the checkpoint has not."""
    try:
        check_against_model(plan.config, model)
    except ConfigError as error:
        return str(error)
    return ""


def _fields(config: SluiceConfig, plan: Plan) -> Iterator[Shortfall]:
    length, blocks = config.model.max_model_len, config.prefill.kv_blocks
    if length is not None and length < plan.load.context:
        yield Shortfall("model.max_model_len", length, plan.load.context, "the tokens of a request")
    if blocks is not None and blocks < plan.prefill.kv_blocks:
        yield Shortfall("prefill.kv_blocks", blocks, plan.prefill.kv_blocks, "the blocks of one prompt")
    if config.pool.dram_bytes < plan.prefill.pool_bytes:
        reason = "the pool bytes from which one prompt's shared layer buffers are reloaded"
        yield Shortfall("pool.dram_bytes", config.pool.dram_bytes, plan.prefill.pool_bytes, reason)
    if config.decode.hot_tokens < plan.decode.hot_tokens:
        reason = "the tokens that one step of a request attends to"
        yield Shortfall("decode.hot_tokens", config.decode.hot_tokens, plan.decode.hot_tokens, reason)
    if config.decode.max_requests < plan.decode.requests:
        reason = "the requests of one DP rank"
        yield Shortfall("decode.max_requests", config.decode.max_requests, plan.decode.requests, reason)
    if config.decode.host_pool_bytes < plan.decode.host_bytes:
        reason = "the main KV of one DP rank"
        yield Shortfall("decode.host_pool_bytes", config.decode.host_pool_bytes, plan.decode.host_bytes, reason)


def _devices(config: SluiceConfig, model: ModelConfig, plan: Plan) -> Iterator[Shortfall]:
    limit = config.hostcann.hbm_bytes
    if plan.prefill.device_bytes > limit:
        settings = [
            ("kv.indexer_dtype", "int8"),
            ("prefill.shared_buffers", 1),
            ("prefill.independent_layers", []),
            ("model.dtype", "bfloat16"),
        ]
        remedies = _try(config, model, plan.load, settings, lambda tried: tried.prefill.device_bytes, limit)
        reason = "a prefill device's layer buffers"
        yield Shortfall("hostcann.hbm_bytes", limit, plan.prefill.device_bytes, reason, remedies)
    if plan.decode.device_bytes > limit:
        settings = [
            ("kv.indexer_dtype", "int8"),
            ("decode.hot_tokens", 1),  # planned with the smallest legal size
            ("model.dtype", "bfloat16"),
            *(("decode.dp", dp) for dp in _more_replicas(config, model, plan)),
        ]
        remedies = _try(config, model, plan.load, settings, lambda tried: tried.decode.device_bytes, limit)
        reason = "a decode device's indexer caches and hot buffers"
        yield Shortfall("hostcann.hbm_bytes", limit, plan.decode.device_bytes, reason, remedies)


def _try(
    config: SluiceConfig,
    model: ModelConfig,
    load: Load,
    settings: list[tuple[str, object]],
    device_bytes: Callable[[Plan], int],
    limit: int,
) -> tuple[Remedy, ...]:
    """Those of the settings that lower the need."""
    before, remedies = device_bytes(plan_deployment(config, model, load)), []
    for path, value in settings:
        if path == "kv.indexer_dtype" and model.index_head_dim & (model.index_head_dim - 1):
            continue
        tried = plan_deployment(with_setting(config, path, value), model, load)
        need = device_bytes(tried)
        if need < before:
            section, field = path.split(".")
            shown = getattr(getattr(tried.config, section), field)
            remedies.append(Remedy(f"{path}={shown}", need, need <= limit))
    return tuple(remedies)


def _more_replicas(config: SluiceConfig, model: ModelConfig, plan: Plan) -> Iterator[int]:
    """The fewest DP ranks per group among which the load fits the device; none if even one request does not."""
    for requests in range(plan.decode.requests - 1, 0, -1):
        dp = -(-plan.load.concurrency // (requests * config.decode.groups))
        tried = plan_deployment(with_setting(config, "decode.dp", dp), model, plan.load)
        if tried.decode.device_bytes <= config.hostcann.hbm_bytes:
            yield dp
            return
