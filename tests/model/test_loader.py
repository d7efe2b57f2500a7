"""Weights arrive whole, in the right parts, or with an error that names what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.model.config import ModelConfig
from engine.model.loader import load_weights
from engine.model.shard import Shard, TensorParallelError
from engine.model.weight_files import CheckpointError
from engine.model.weights import ModelWeights, MoeWeights
from tests.checkpoints import quantise_fp8, random_checkpoint, random_tensors, tiny_config, write_checkpoint
from tests.model.runner import Runner


def load(path: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(path, ModelConfig.from_dir(path), dtype, Shard(rank, size))


def moe(weights: ModelWeights, layer: int = 1) -> MoeWeights:
    block = weights.layers[layer].mlp
    assert isinstance(block, MoeWeights)
    return block


def test_ranks_hold_disjoint_parts_of_the_whole(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "glm_moe_dsa")
    whole, parts = load(tmp_path), [load(tmp_path, rank, 2) for rank in range(2)]
    for layer, attention in enumerate(entry.attention for entry in whole.layers):
        split = [part.layers[layer].attention for part in parts]
        assert torch.equal(torch.cat([part.w_uk for part in split]), attention.w_uk)
        assert torch.equal(torch.cat([part.w_uv for part in split]), attention.w_uv)
        assert torch.equal(torch.cat([part.q_b_proj for part in split]), attention.q_b_proj)
        assert torch.equal(torch.cat([part.o_proj for part in split], dim=1), attention.o_proj)
        assert attention.indexer is not None
        assert all(torch.equal(part.indexer.wq_b, attention.indexer.wq_b) for part in split if part.indexer)
    experts = [part for weights in parts for part in moe(weights).experts]
    assert [moe(weights).first_expert for weights in parts] == [0, 4]
    assert len(experts) == 8
    for part, full in zip(experts, moe(whole).experts, strict=True):
        assert torch.equal(part.gate_up, full.gate_up)
        assert torch.equal(part.down, full.down)
    shared = [moe(weights).shared for weights in parts]
    assert torch.equal(torch.cat([part.down for part in shared], dim=1), moe(whole).shared.down)


def test_sharded_files_load_like_a_single_one(tmp_path: Path) -> None:
    one = load(random_checkpoint(tmp_path / "one", "deepseek_v32"))
    many = load(random_checkpoint(tmp_path / "many", "deepseek_v32", shards=3))
    assert torch.equal(one.lm_head, many.lm_head)
    assert torch.equal(moe(one, 3).experts[7].down, moe(many, 3).experts[7].down)


def test_router_stays_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    weights = load(random_checkpoint(tmp_path, "glm_moe_dsa"), dtype=torch.bfloat16)
    assert weights.embed.dtype == torch.bfloat16
    assert moe(weights).gate.dtype == torch.float32
    assert moe(weights).correction_bias.dtype == torch.float32


@pytest.mark.parametrize("size", [1, 2])
def test_fp8_blocks_are_dequantised_wherever_a_rank_cuts_them(tmp_path: Path, size: int) -> None:
    """Head and column borders (40, 64, 80, ...) do not fall on the borders of 48 x 32 blocks."""
    block = (48, 32)
    quantised = {"quant_method": "fp8", "weight_block_size": list(block)}
    config = tiny_config("deepseek_v32", quantization_config=quantised)
    stored, meant = quantise_fp8(random_tensors(config), block)
    write_checkpoint(tmp_path / "fp8", config, stored)
    write_checkpoint(tmp_path / "plain", tiny_config("deepseek_v32"), meant)
    for rank in range(size):
        fp8, plain = load(tmp_path / "fp8", rank, size), load(tmp_path / "plain", rank, size)
        for left, right in zip(fp8.layers, plain.layers, strict=True):
            assert torch.equal(left.attention.w_uk, right.attention.w_uk)
            assert torch.equal(left.attention.o_proj, right.attention.o_proj)
        assert torch.equal(moe(fp8).experts[0].down, moe(plain).experts[0].down)
        assert torch.equal(moe(fp8).shared.down, moe(plain).shared.down)


def test_fp8_checkpoint_runs(tmp_path: Path) -> None:
    config = tiny_config("glm_moe_dsa", quantization_config={"quant_method": "fp8"})
    stored, meant = quantise_fp8(random_tensors(config), (128, 128))
    prompt = [3, 1, 4, 1, 5]
    fp8 = Runner(write_checkpoint(tmp_path / "fp8", config, stored)).logits(prompt)
    plain = Runner(write_checkpoint(tmp_path / "plain", tiny_config("glm_moe_dsa"), meant)).logits(prompt)
    assert torch.equal(fp8, plain)


def test_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    config = tiny_config("glm_moe_dsa")
    tensors = random_tensors(config)
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.5\.up_proj.*missing.*\[64, 96\]"):
        load(write_checkpoint(tmp_path, config, tensors))


def test_misshaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    config = tiny_config("glm_moe_dsa")
    tensors = random_tensors(config)
    tensors["model.layers.0.self_attn.indexer.wk.weight"] = torch.zeros(31, 96)
    with pytest.raises(CheckpointError, match=r"indexer\.wk.*\[31, 96\]; needed: \[32, 96\]"):
        load(write_checkpoint(tmp_path, config, tensors))


def test_tensor_of_integers_is_refused(tmp_path: Path) -> None:
    """Packed weights of a quantised checkpoint are no numbers to cast."""
    config = tiny_config("glm_moe_dsa")
    tensors = random_tensors(config)
    tensors["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"].to(
        torch.int32
    )
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj.*int32; legal: float32"):
        load(write_checkpoint(tmp_path, config, tensors))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    random_checkpoint(tmp_path, "glm_moe_dsa", shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: "):
        load(tmp_path)


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "glm_moe_dsa", shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load(tmp_path)


def test_fp8_without_quantization_config_is_refused(tmp_path: Path) -> None:
    config = tiny_config("glm_moe_dsa")
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load(write_checkpoint(tmp_path, config, quantise_fp8(random_tensors(config), (128, 128))[0]))


@pytest.mark.parametrize(
    ("overrides", "size", "what"),
    [({}, 3, "num_attention_heads 4"), ({"n_routed_experts": 9, "n_group": 1}, 2, "n_routed_experts 9")],
)
def test_tensor_parallel_size_must_divide_the_model(
    tmp_path: Path, overrides: dict[str, int], size: int, what: str
) -> None:
    random_checkpoint(tmp_path, "glm_moe_dsa", **overrides)
    with pytest.raises(TensorParallelError, match=f"{size} does not divide {what}; legal: "):
        load(tmp_path, 0, size)


def test_rank_must_lie_within_the_group() -> None:
    with pytest.raises(TensorParallelError, match="rank 2 of 2"):
        Shard(rank=2, size=2)


def test_progress_counts_layers(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, "glm_moe_dsa")
    seen: list[tuple[int, int]] = []
    load_weights(
        tmp_path,
        ModelConfig.from_dir(tmp_path),
        torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_shared_layers_and_prediction_layers_are_not_read(tmp_path: Path) -> None:
    """A checkpoint may keep indexers of sharing layers (GLM-5.1) and a prediction layer past the last one."""
    config = tiny_config("glm_moe_dsa")
    tensors = random_tensors(config)
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(96, 192)
    write_checkpoint(tmp_path, config, tensors)
    shape = replace(ModelConfig.from_dir(tmp_path), index_owners=(0, 0, 2, 2))
    weights = load_weights(tmp_path, shape, torch.float32)
    assert [layer.attention.indexer is not None for layer in weights.layers] == [True, False, True, False]


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_checkpoints_saved_by_transformers_load(tmp_path: Path, model_type: str) -> None:
    """Their saver writes fields of its own and may drop those that equal the family's defaults."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**tiny_config(model_type), "index_head_dim": 128, "qk_rope_head_dim": 64, "first_k_dense_replace": 3}
    config = AutoConfig.for_model(**{**fields, "dtype": torch.float32})
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    prompt = [7, 3, 9, 11]
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(Runner(tmp_path).logits(prompt), expected, atol=1e-4, rtol=0)
