"""Does a deployment's configuration fit the checkpoint it serves? Asked before any process starts; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import ConfigError, SluiceConfig
from engine.model.config import ModelConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MAX_INT8_DIMS = 1024
"""Widest index key that can be int8: up to here products of two keys are exact in float32."""


def max_model_len(config: SluiceConfig, model: ModelConfig) -> int:
    """Longest prompt + output in tokens: `model.max_model_len`, or the checkpoint's own limit when it is absent."""
    return config.model.max_model_len or model.max_position_embeddings


def main_kv_block_bytes(config: SluiceConfig, model: ModelConfig) -> int:
    """Bytes of one block of main KV (latent and rope part) over all layers."""
    row = (model.kv_lora_rank + model.qk_rope_head_dim) * _ITEM_BYTES[config.model.dtype]
    return model.num_hidden_layers * config.kv.block_size * row


def check_against_model(config: SluiceConfig, model: ModelConfig) -> None:
    """Refuses a configuration which this checkpoint cannot be served with.

    Raises:
        ConfigError: one line per problem, each with the field's path, its value and what is legal.
    """
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
    if config.decode.hot_tokens < model.index_topk:
        block = config.kv.block_size
        least = -(-model.index_topk // block) * block
        yield (
            f"decode.hot_tokens = {config.decode.hot_tokens}: must hold the {model.index_topk} tokens which every step "
            f"attends to (index_topk), as whole blocks of {block}; use {least} or more"
        )
    block_bytes = main_kv_block_bytes(config, model)
    if config.decode.host_pool_bytes < block_bytes:
        yield (
            f"decode.host_pool_bytes = {config.decode.host_pool_bytes}: not even one block of {config.kv.block_size} "
            f"tokens; one block of all {model.num_hidden_layers} layers takes {block_bytes} bytes"
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
    count = model.num_hidden_layers
    wrong = [layer for layer in layers if not -count <= layer < count]
    if wrong:
        yield (
            f"prefill.independent_layers = {layers}: {wrong} are not layers of this checkpoint; legal: 0 to "
            f'{count - 1}, negative ones counted from the end, or "all"'
        )
