"""Does a deployment's configuration fit the checkpoint it serves? Asked before any process starts; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import ConfigError, SluiceConfig
from engine.model.config import ModelConfig
from engine.model.config_reader import ModelConfigError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MAX_INT8_DIMS = 1024
"""Widest index key that can be int8: up to here products of two keys are exact in float32."""


def max_model_len(config: SluiceConfig, model: ModelConfig) -> int:
    """Longest prompt + output in tokens: `model.max_model_len`, or the checkpoint's own limit when it is absent."""
    return config.model.max_model_len or model.max_position_embeddings


def served_model(config: SluiceConfig) -> ModelConfig:
    """The checkpoint's shape as this deployment serves it: with its draft layer if tokens are to be drafted.

    Raises:
        ModelConfigError: the checkpoint cannot be served.
        ConfigError: it has no draft layer, but `decode.speculative_tokens` asks for one.
    """
    return _with_draft(config, ModelConfig.from_dir(config.model.path))


def _with_draft(config: SluiceConfig, model: ModelConfig) -> ModelConfig:
    count = config.decode.speculative_tokens
    if not count or model.draft_layers:
        return model
    try:
        return model.with_draft()
    except ModelConfigError:
        raise ConfigError(
            f"decode.speculative_tokens = {count}: the checkpoint has no multi-token-prediction layer "
            f"(num_nextn_predict_layers = {model.num_nextn_predict_layers}); legal: 0"
        ) from None


def min_hot_tokens(config: SluiceConfig, model: ModelConfig) -> int:
    """Smallest legal `decode.hot_tokens`: what one request's rows of a step may attend to, in whole blocks."""
    block = config.kv.block_size
    return -(-(1 + config.decode.speculative_tokens) * model.index_topk // block) * block


def main_kv_block_bytes(config: SluiceConfig, model: ModelConfig) -> int:
    """Bytes of one block of main KV (latent and rope part) over all layers."""
    row = (model.kv_lora_rank + model.qk_rope_head_dim) * _ITEM_BYTES[config.model.dtype]
    return model.num_layers * config.kv.block_size * row


def check_against_model(config: SluiceConfig, model: ModelConfig) -> None:
    """Refuses a configuration which this checkpoint cannot be served with.

    Raises:
        ConfigError: one line per problem, each with the field's path, its value and what is legal.
    """
    model = _with_draft(config, model)
    problems = [
        *_check_lengths(config, model),
        *_check_indexer(config, model),
        *_check_parallel(config, model),
        *_check_layers(config, model),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _check_lengths(config: SluiceConfig, model: ModelConfig) -> Iterator[str]:
    length, limit = config.model.max_model_len, model.max_position_embeddings
    if length is not None and length > limit:
        yield f"model.max_model_len = {length}: the checkpoint supports at most {limit} (max_position_embeddings)"
    least = min_hot_tokens(config, model)
    if config.decode.hot_tokens < least:
        rows = 1 + config.decode.speculative_tokens
        each = "every step" if rows == 1 else f"each of a step's 1 + {rows - 1} (decode.speculative_tokens) tokens"
        yield (
            f"decode.hot_tokens = {config.decode.hot_tokens}: must hold the {model.index_topk} tokens which {each} "
            f"attends to (index_topk), as whole blocks of {config.kv.block_size}; use {least} or more"
        )
    block_bytes = main_kv_block_bytes(config, model)
    if config.decode.host_pool_bytes < block_bytes:
        yield (
            f"decode.host_pool_bytes = {config.decode.host_pool_bytes}: not even one block of {config.kv.block_size} "
            f"tokens; one block of all {model.num_layers} layers takes {block_bytes} bytes"
        )


def _check_indexer(config: SluiceConfig, model: ModelConfig) -> Iterator[str]:
    dims = model.index_head_dim
    if config.kv.indexer_dtype == "int8" and (dims & (dims - 1) or dims > MAX_INT8_DIMS):
        yield (
            f"kv.indexer_dtype = 'int8': index keys are rotated before they are rounded, which needs a power of two "
            f"of at most {MAX_INT8_DIMS} dims, but this checkpoint has {dims} (index_head_dim); use 'model'"
        )


def _check_parallel(config: SluiceConfig, model: ModelConfig) -> Iterator[str]:
    heads, experts = model.num_attention_heads, model.n_routed_experts if any(model.moe_layers) else 0
    legal = [tp for tp in range(1, heads + 1) if heads % tp == 0 and experts % tp == 0]
    for side, tp in (("prefill", config.prefill.tp), ("decode", config.decode.tp)):
        if tp not in legal:
            yield f"{side}.tp = {tp}: must divide {heads} attention heads and {experts} experts; legal: {legal}"


def _check_layers(config: SluiceConfig, model: ModelConfig) -> Iterator[str]:
    layers = config.prefill.independent_layers
    if layers == "all":
        return
    count = model.num_layers
    wrong = [layer for layer in layers if not -count <= layer < count]
    if wrong:
        yield (
            f"prefill.independent_layers = {layers}: {wrong} are not layers of this checkpoint; legal: 0 to "
            f'{count - 1}, negative ones counted from the end, or "all"'
        )
