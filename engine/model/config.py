"""The model's shape, read from a Hugging Face directory. Imports no torch: the front end reads it too."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.model.config_reader import FieldReader, ModelConfigError
from engine.model.index_reuse import read_index_owners
from engine.model.rope_config import RopeConfig, read_rope

_COMMON_DEFAULTS: dict[str, Any] = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        **_COMMON_DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "n_group": 8,
        "topk_group": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "indexer_rope_interleave": False,
    },
    "glm_moe_dsa": {
        **_COMMON_DEFAULTS,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "indexer_rope_interleave": True,
    },
}
"""What a field is when config.json leaves it out, per `model_type`; savers drop fields that equal these."""

LORA_NORM_EPS = 1e-6
"""Epsilon of the RMS norms on both low-rank latents, in both families, whatever `rms_norm_eps` says."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know about a `deepseek_v32` or `glm_moe_dsa` checkpoint.

    Fields keep the names of config.json. `index_owners[i]` is the layer whose top-k layer i attends to;
    `moe_layers[i]` says whether layer i has experts; `draft_layers` of the `num_nextn_predict_layers` layers for
    multi-token prediction are served (see `with_draft`), numbered behind the others, and `drafts_share_topk`
    (index_share_for_mtp_iteration) says that all drafts of a step use the top-k of the first; `eos_token_ids` end a
    generation (generation_config.json wins); `quant_block` is the [rows, columns] block of FP8 weights, None for plain
    checkpoints.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    draft_layers: int
    draft_is_moe: bool
    drafts_share_topk: bool
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool
    index_owners: tuple[int, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    moe_layers: tuple[bool, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quant_block: tuple[int, int] | None

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query before absorption: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Attention scale: qk_head_dim^-0.5, times mscale^2 with YaRN. The attention backend applies it."""
        scale = 1.0 / math.sqrt(self.qk_head_dim)
        return scale * self.rope.yarn.softmax_scale if self.rope.yarn else scale

    @property
    def num_layers(self) -> int:
        """Layers with KV: those of the model and the served draft layers."""
        return self.num_hidden_layers + self.draft_layers

    @property
    def indexer_layers(self) -> tuple[int, ...]:
        """The layers with their own indexer, and so with an index-key cache, ascending."""
        return tuple(layer for layer in range(self.num_layers) if self.has_indexer(layer))

    def with_draft(self) -> ModelConfig:
        """The same model with its first multi-token-prediction layer, as layer `num_hidden_layers`.

        That layer has an indexer of its own, whatever the others share.

        Raises:
            ModelConfigError: the checkpoint has no such layer.
        """
        if self.num_nextn_predict_layers < 1:
            field = "num_nextn_predict_layers"
            raise ModelConfigError("config.json", field, self.num_nextn_predict_layers, "1 or more, to draft tokens")
        layer = self.num_hidden_layers
        owners, moe = self.index_owners[:layer], self.moe_layers[:layer]
        return replace(self, draft_layers=1, index_owners=(*owners, layer), moe_layers=(*moe, self.draft_is_moe))

    def has_indexer(self, layer: int) -> bool:
        """Whether `layer` runs an indexer (True) or reuses the top-k of `index_owners[layer]` (False)."""
        return self.index_owners[layer] == layer

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> ModelConfig:
        """Read config.json (and generation_config.json where there is one) of a Hugging Face directory.

        Raises:
            ModelConfigError: file missing or not JSON, unknown family, or a field with a value we cannot serve.
        """
        directory = Path(model_dir)
        values = _read_json(directory / "config.json")
        if values is None:
            raise ModelConfigError(str(directory), "config.json", None, "a Hugging Face model directory")
        generation = _read_json(directory / "generation_config.json") or {}
        return cls.from_dict(values, generation, source=str(directory / "config.json"))

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], generation: dict[str, Any] | None = None, source: str = "config.json"
    ) -> ModelConfig:
        """Build from the parsed config.json `values` and generation_config.json `generation`; see `from_dir`."""
        family = FieldReader(values, source).choice("model_type", tuple(FAMILY_DEFAULTS))
        merged = {**FAMILY_DEFAULTS[family], **{key: value for key, value in values.items() if value is not None}}
        reader = FieldReader(merged, source)
        _check_fixed_choices(reader)
        layers = reader.integer("num_hidden_layers")
        max_positions = reader.integer("max_position_embeddings")
        vocab = reader.integer("vocab_size")
        eos = _read_eos(FieldReader(generation or {}, source + " (generation_config.json)"), vocab)
        config = cls(
            model_type=family,
            vocab_size=vocab,
            hidden_size=reader.integer("hidden_size"),
            intermediate_size=reader.integer("intermediate_size"),
            moe_intermediate_size=reader.integer("moe_intermediate_size"),
            num_hidden_layers=layers,
            num_nextn_predict_layers=reader.integer("num_nextn_predict_layers", 0, minimum=0),
            draft_layers=0,
            draft_is_moe=_draft_is_moe(reader, layers),
            drafts_share_topk=reader.boolean("index_share_for_mtp_iteration", False),
            num_attention_heads=reader.integer("num_attention_heads"),
            q_lora_rank=reader.integer("q_lora_rank"),
            kv_lora_rank=reader.integer("kv_lora_rank"),
            qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
            qk_rope_head_dim=reader.integer("qk_rope_head_dim", minimum=2),
            v_head_dim=reader.integer("v_head_dim"),
            index_n_heads=reader.integer("index_n_heads"),
            index_head_dim=reader.integer("index_head_dim"),
            index_topk=reader.integer("index_topk"),
            indexer_rope_interleave=reader.boolean("indexer_rope_interleave"),
            index_owners=read_index_owners(reader, layers),
            n_routed_experts=reader.integer("n_routed_experts"),
            n_shared_experts=reader.integer("n_shared_experts"),
            num_experts_per_tok=reader.integer("num_experts_per_tok"),
            n_group=reader.integer("n_group"),
            topk_group=reader.integer("topk_group"),
            norm_topk_prob=reader.boolean("norm_topk_prob", True),
            routed_scaling_factor=reader.number("routed_scaling_factor"),
            moe_layers=_read_moe_layers(reader, layers),
            rms_norm_eps=reader.number("rms_norm_eps"),
            max_position_embeddings=max_positions,
            rope=read_rope(reader, max_positions),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
            dtype=_read_dtype(reader),
            bos_token_id=None if reader.raw("bos_token_id") is None else reader.integer("bos_token_id", minimum=0),
            eos_token_ids=eos or _read_eos(reader, vocab),
            quant_block=_read_quant_block(reader),
        )
        _check_relations(config, reader)
        return config


def _read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelConfigError(str(path), "(file)", str(error), "a readable JSON object") from error
    if not isinstance(value, dict):
        raise ModelConfigError(str(path), "(file)", type(value).__name__, "a JSON object")
    return value


def _check_fixed_choices(reader: FieldReader) -> None:
    """Refuse variants of the architecture that no released checkpoint of the two families uses."""
    reader.choice("hidden_act", ("silu",), default="silu")
    reader.choice("scoring_func", ("sigmoid",), default="sigmoid")
    reader.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    reader.choice("attention_bias", (False,), default=False)
    reader.choice("mlp_bias", (False,), default=False)
    reader.choice("moe_layer_freq", (1,), default=1)
    heads = reader.integer("num_attention_heads")
    if reader.integer("num_key_value_heads", heads) != heads:
        raise reader.error("num_key_value_heads", reader.raw("num_key_value_heads"), f"num_attention_heads ({heads})")


def _read_moe_layers(reader: FieldReader, layers: int) -> tuple[bool, ...]:
    kinds = reader.raw("mlp_layer_types")
    if kinds is None:
        dense = reader.integer("first_k_dense_replace", minimum=0)
        return tuple(layer >= dense for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise reader.error("mlp_layer_types", kinds, f'a list of {layers} entries, each "dense" or "sparse"')
    return tuple(kind == "sparse" for kind in kinds[:layers])


def _draft_is_moe(reader: FieldReader, layers: int) -> bool:
    """Whether the layer behind the last one, for multi-token prediction, has experts."""
    kinds = reader.raw("mlp_layer_types")
    if kinds is None:
        return layers >= reader.integer("first_k_dense_replace", minimum=0)
    return bool(kinds[layers] == "sparse") if len(kinds) > layers else "sparse" in kinds


def _read_dtype(reader: FieldReader) -> str:
    field = "dtype" if reader.raw("dtype") is not None else "torch_dtype"
    return reader.choice(field, ("float32", "bfloat16", "float16"), default="bfloat16")


def _read_eos(reader: FieldReader, vocab: int) -> tuple[int, ...]:
    value = reader.raw("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab for token in ids):
        raise reader.error("eos_token_id", value, f"token ids from 0 to {vocab - 1}")
    return tuple(ids)


def _read_quant_block(reader: FieldReader) -> tuple[int, int] | None:
    quant = reader.child("quantization_config")
    if quant is None:
        return None
    quant.choice("quant_method", ("fp8",))
    if (scheme := quant.raw("kv_cache_scheme")) is not None:
        raise quant.error("kv_cache_scheme", scheme, "null, as main KV is never packed")
    block = quant.raw("weight_block_size")
    if block is None:
        return (128, 128)
    if not isinstance(block, list) or len(block) != 2 or any(not isinstance(side, int) or side < 1 for side in block):
        raise quant.error("weight_block_size", block, "two positive integers [rows, columns]")
    return (block[0], block[1])


def _check_relations(config: ModelConfig, reader: FieldReader) -> None:
    """Rules that tie fields to each other."""
    if config.qk_rope_head_dim % 2:
        raise reader.error("qk_rope_head_dim", config.qk_rope_head_dim, "an even number")
    if config.index_head_dim < config.qk_rope_head_dim:
        raise reader.error("index_head_dim", config.index_head_dim, f">= qk_rope_head_dim ({config.qk_rope_head_dim})")
    if config.model_type == "deepseek_v32" and len(config.indexer_layers) < config.num_hidden_layers:
        raise reader.error("indexer_types", config.index_owners, 'all "full": deepseek_v32 has no index reuse')
    if not any(config.moe_layers):
        return
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups or experts // groups < 2:
        raise reader.error("n_group", groups, f"a divisor of n_routed_experts ({experts}) leaving 2 or more per group")
    if config.topk_group > groups:
        raise reader.error("topk_group", config.topk_group, f"at most n_group ({groups})")
    selectable = config.topk_group * (experts // groups)
    if config.num_experts_per_tok > selectable:
        legal = f"at most {selectable}, the experts of topk_group groups"
        raise reader.error("num_experts_per_tok", config.num_experts_per_tok, legal)
