"""Small checkpoints for tests: random ones of both families, and the trained one in the layouts of its siblings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PASSKEY_GLM = Path(__file__).resolve().parent.parent / "benchmarks" / "models" / "passkey-glm"
"""The trained demo model (glm_moe_dsa, 3 layers, index_topk 64); see benchmarks/train_passkey."""

EMBEDDING_SCALE = 6.0
"""Of `drafting_checkpoint`: size of a residual stream's embedding next to what a layer adds to it."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def tiny_config(model_type: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a four-layer model with 16 index heads.

    With fewer index heads relu leaves many scores exactly zero, and ties at the border of the top-k make even the
    oracle disagree with itself.
    """
    glm = model_type == "glm_moe_dsa"
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": ["GlmMoeDsaForCausalLM" if glm else "DeepseekV32ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 160,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 1 if glm else 4,
        "topk_group": 1 if glm else 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5 if glm else 1e-6,
        "max_position_embeddings": 5120,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    config.update(overrides)
    return config


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this config.json."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)

    def mlp(prefix: str, inner: int) -> None:
        shapes[prefix + "gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "up_proj.weight"] = (inner, hidden)
        shapes[prefix + "down_proj.weight"] = (hidden, inner)

    layers, drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    for layer in range(layers + drafts):
        prefix = f"model.layers.{layer}."
        if layer >= layers:
            shapes[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                shapes[f"{prefix}{norm}.weight"] = (hidden,)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        attention = prefix + "self_attn."
        shapes[attention + "q_a_proj.weight"] = (q_rank, hidden)
        shapes[attention + "q_a_layernorm.weight"] = (q_rank,)
        shapes[attention + "q_b_proj.weight"] = (heads * (nope + rope), q_rank)
        shapes[attention + "kv_a_proj_with_mqa.weight"] = (kv_rank + rope, hidden)
        shapes[attention + "kv_a_layernorm.weight"] = (kv_rank,)
        shapes[attention + "kv_b_proj.weight"] = (heads * (nope + value), kv_rank)
        shapes[attention + "o_proj.weight"] = (hidden, heads * value)
        if layer >= layers or config.get("indexer_types", ["full"] * layers)[layer] == "full":
            indexer = attention + "indexer."
            shapes[indexer + "wq_b.weight"] = (index_heads * index_dim, q_rank)
            shapes[indexer + "wk.weight"] = (index_dim, hidden)
            shapes[indexer + "k_norm.weight"] = (index_dim,)
            shapes[indexer + "k_norm.bias"] = (index_dim,)
            shapes[indexer + "weights_proj.weight"] = (index_heads, hidden)
        if layer < config["first_k_dense_replace"]:
            mlp(prefix + "mlp.", config["intermediate_size"])
            continue
        shapes[prefix + "mlp.gate.weight"] = (experts, hidden)
        shapes[prefix + "mlp.gate.e_score_correction_bias"] = (experts,)
        for expert in range(experts):
            mlp(f"{prefix}mlp.experts.{expert}.", width)
        mlp(prefix + "mlp.shared_experts.", width * config["n_shared_experts"])
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights; norms near one, biases small, the rest scaled to keep activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensors[name] = 1.0 + 0.1 * noise
        elif len(shape) == 1:
            tensors[name] = 0.1 * noise
        else:
            tensors[name] = noise * shape[1] ** -0.5
    return tensors


def write_checkpoint(model_dir: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """Write config.json and the tensors, in one file or in `shards` files with an index; returns `model_dir`."""
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if shards == 1:
        save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
        return model_dir
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, model_dir / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return model_dir


def random_checkpoint(model_dir: Path, model_type: str, seed: int = 0, shards: int = 1, **overrides: Any) -> Path:
    """Write a random tiny model (see `tiny_config`) without a tokenizer; returns `model_dir`."""
    config = tiny_config(model_type, **overrides)
    return write_checkpoint(model_dir, config, random_tensors(config, seed), shards)


def drafting_checkpoint(model_dir: Path, model_type: str, seed: int = 0, **overrides: Any) -> Path:
    """A random tiny model with a draft layer that is often, not always, right; returns `model_dir`.

    Large embeddings make the newest token weigh most in what comes next, and the draft layer passes its embedding on:
    it then guesses what the model's head makes of the token alone. Layers still decide many tokens.
    """
    config = tiny_config(model_type, num_nextn_predict_layers=1, **overrides)
    tensors, hidden = random_tensors(config, seed), config["hidden_size"]
    tensors["model.embed_tokens.weight"] *= EMBEDDING_SCALE * hidden**0.5
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors[prefix + "eh_proj.weight"] = torch.cat(
        (EMBEDDING_SCALE * torch.eye(hidden), torch.zeros(hidden, hidden)), 1
    )
    tensors[prefix + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    for name in tensors:
        if name.startswith(prefix) and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.1
    return write_checkpoint(model_dir, config, tensors)


def quantise_fp8(tensors: dict[str, Tensor], block: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Store the linear weights of attention and MLPs as float8_e4m3fn with one float32 scale per `block`.

    Returns:
        the quantised tensors and, under plain names, the float32 values they stand for.
    """
    height, width = block
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight") or "weights_proj" in name:
            continue
        rows = torch.arange(tensor.shape[0]) // height
        columns = torch.arange(tensor.shape[1]) // width
        scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                part = tensor[row * height : (row + 1) * height, column * width : (column + 1) * width]
                scales[row, column] = part.abs().max() / 448.0
        spread = scales[rows][:, columns]
        stored[name] = (tensor / spread).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        meant[name] = stored[name].float() * spread
    return stored, meant


def passkey_as_deepseek(model_dir: Path) -> Path:
    """The trained model as deepseek_v32, computing the same: its indexer rotates halves instead of neighbours.

    So the rope dims of index queries and keys (rows of wq_b per head, rows of wk, and k_norm) are reordered.
    """
    config = json.loads((PASSKEY_GLM / "config.json").read_text(encoding="utf-8"))
    heads, dim, rope = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
    order = torch.cat((torch.arange(0, rope, 2), torch.arange(1, rope, 2), torch.arange(rope, dim)))
    tensors = load_file(PASSKEY_GLM / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("indexer.wq_b.weight"):
            tensors[name] = tensor.view(heads, dim, -1)[:, order].reshape(heads * dim, -1).contiguous()
        elif ".indexer.wk." in name or ".indexer.k_norm." in name:
            tensors[name] = tensor[order].contiguous()
    config.update(model_type="deepseek_v32", architectures=["DeepseekV32ForCausalLM"], indexer_rope_interleave=False)
    return _with_tokenizer(write_checkpoint(model_dir, config, tensors))


def passkey_with_shared_index(model_dir: Path) -> Path:
    """The trained model as GLM-5.2 stores it: the last layer reuses the top-k before it and has no indexer."""
    config = json.loads((PASSKEY_GLM / "config.json").read_text(encoding="utf-8"))
    last = config["num_hidden_layers"] - 1
    config["indexer_types"] = ["full"] * last + ["shared"]
    dropped = f"model.layers.{last}.self_attn.indexer."
    tensors = load_file(PASSKEY_GLM / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    return _with_tokenizer(write_checkpoint(model_dir, config, kept))


def _with_tokenizer(model_dir: Path) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PASSKEY_GLM / file, model_dir / file)
    return model_dir
