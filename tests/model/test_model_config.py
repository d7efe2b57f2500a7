"""What config.json may say, and what is said about what it may not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.model.config import FAMILY_DEFAULTS, ModelConfig
from engine.model.config_reader import ModelConfigError
from engine.model.fingerprint import fingerprint
from tests.checkpoints import PASSKEY_GLM, random_checkpoint, tiny_config


def parse(model_type: str = "glm_moe_dsa", generation: dict[str, Any] | None = None, **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(model_type, **overrides), generation)


def test_fields_left_out_take_the_family_defaults() -> None:
    """transformers' savers drop fields that equal their defaults, so these must be the same."""
    from transformers import AutoConfig

    for model_type in ("deepseek_v32", "glm_moe_dsa"):
        config = ModelConfig.from_dict({"model_type": model_type})
        theirs = AutoConfig.for_model(model_type)
        for field, value in FAMILY_DEFAULTS[model_type].items():
            if field != "indexer_rope_interleave":  # theirs is fixed in code
                assert getattr(theirs, field) == value, f"{model_type}.{field}"
        assert config.tie_word_embeddings == theirs.tie_word_embeddings
        assert config.norm_topk_prob == theirs.norm_topk_prob
        assert config.moe_layers == tuple(kind == "sparse" for kind in theirs.mlp_layer_types)


def test_indexer_rope_defaults_by_family_and_can_be_overridden() -> None:
    assert parse("glm_moe_dsa").indexer_rope_interleave
    assert not parse("deepseek_v32").indexer_rope_interleave
    assert parse("deepseek_v32", indexer_rope_interleave=True).indexer_rope_interleave


def test_old_and_new_rope_spellings_mean_the_same() -> None:
    yarn = {"factor": 40.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0}
    new = parse(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **yarn})
    old = parse(rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "yarn", **yarn})
    assert old.rope == new.rope
    assert new.rope.theta == 5e5


def test_softmax_scale_grows_with_yarn_only() -> None:
    plain = parse()
    assert plain.softmax_scale == pytest.approx((24 + 16) ** -0.5)
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "mscale_all_dim": 1.0}
    mscale = 0.1 * math.log(40.0) + 1.0
    assert parse(rope_parameters=yarn).softmax_scale == pytest.approx(plain.softmax_scale * mscale**2)


@pytest.mark.parametrize(
    ("fields", "owners"),
    [
        ({}, (0, 1, 2, 3, 4, 5, 6)),
        ({"indexer_types": ["full", "full", "shared", "shared", "full", "shared", "full"]}, (0, 1, 1, 1, 4, 4, 6)),
        ({"index_topk_pattern": "FFSSFSF"}, (0, 1, 1, 1, 4, 4, 6)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 2, 2, 2, 6)),
        ({"index_topk_freq": 4}, (0, 1, 1, 1, 1, 5, 5)),
        ({"indexer_types": ["full"] * 7, "index_topk_freq": 4}, (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_index_owners(fields: dict[str, Any], owners: tuple[int, ...]) -> None:
    config = parse(num_hidden_layers=7, **fields)
    assert config.index_owners == owners
    assert config.indexer_layers == tuple(sorted(set(owners)))


def test_glm_5_2_has_21_full_and_57_shared_layers() -> None:
    config = ModelConfig.from_dict({"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert (len(config.indexer_layers), config.num_hidden_layers) == (21, 78)


def test_eos_ids_come_from_generation_config_where_it_has_them() -> None:
    assert parse(eos_token_id=7).eos_token_ids == (7,)
    assert parse(eos_token_id=7, generation={"eos_token_id": [8, 9]}).eos_token_ids == (8, 9)
    assert parse(eos_token_id=7, generation={"temperature": 1.0}).eos_token_ids == (7,)
    assert parse(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ({"index_head_dim": 8}, "index_head_dim"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 4, "topk_group": 5}, "topk_group"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types"),
        ({"indexer_types": ["full", "none", "full", "full"]}, "indexer_types"),
        ({"index_topk_pattern": "FS"}, "index_topk_pattern"),
        ({"eos_token_id": 320}, "eos_token_id"),
        ({"dtype": "int8"}, "dtype"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0]}}, "weight_block_size"),
    ],
)
def test_illegal_fields_are_refused_by_name(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_dict({**tiny_config("glm_moe_dsa"), **overrides}, source="here/config.json")
    assert caught.value.field.endswith(field)
    assert str(caught.value).startswith(f"here/config.json: {caught.value.field} is ")
    assert "legal: " in str(caught.value)


def test_deepseek_refuses_index_reuse() -> None:
    """The oracle ignores the fields for this family, so serving them would silently differ."""
    with pytest.raises(ModelConfigError, match="no index reuse"):
        parse("deepseek_v32", index_topk_freq=2)


def test_unreadable_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json is missing"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="a readable JSON object"):
        ModelConfig.from_dir(tmp_path)


def test_fingerprint_depends_on_contents_only(tmp_path: Path) -> None:
    first = random_checkpoint(tmp_path / "a", "glm_moe_dsa", seed=0)
    assert fingerprint(first) == fingerprint(random_checkpoint(tmp_path / "b", "glm_moe_dsa", seed=0))
    assert fingerprint(first) != fingerprint(random_checkpoint(tmp_path / "c", "glm_moe_dsa", seed=1))
    before = fingerprint(first)
    config = json.loads((first / "config.json").read_text(encoding="utf-8"))
    (first / "config.json").write_text(json.dumps({**config, "index_topk": 32}))
    assert fingerprint(first) != before


def test_fingerprint_needs_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelConfigError, match="safetensors"):
        fingerprint(tmp_path)


def test_light_modules_import_no_torch() -> None:
    """The front end and the command line read configs, tokenizers and sampling parameters without torch."""
    modules = (
        "engine.model.config engine.model.fingerprint engine.model.shard engine.sampling_params engine.tokenizer "
        "engine.detokenizer"
    )
    program = (
        f"import sys, {', '.join(modules.split())}\n"
        f"engine.model.config.ModelConfig.from_dir({str(PASSKEY_GLM)!r})\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=False).returncode == 0
