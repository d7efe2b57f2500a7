"""The draft layer against transformers, which has none: its decoder layer is run there as a model of one layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.config_reader import ModelConfigError
from engine.model.decoder import DsaDecoder
from engine.model.draft import DraftLayer
from engine.model.loader import load_weights
from tests.checkpoints import random_checkpoint, random_tensors, tiny_config, write_checkpoint
from tests.model.dense_backend import DenseBackend

LENGTH = 150
DRAFT = "model.layers.4."


def only_the_draft_layer(source: Path, target: Path, family: str) -> Path:
    """A checkpoint whose single layer, norm and head are those of the draft layer of `source`."""
    tensors = load_file(source / "model.safetensors")
    kept = {f"model.layers.0.{name[len(DRAFT) :]}": t for name, t in tensors.items() if name.startswith(DRAFT)}
    for name in ("eh_proj", "enorm", "hnorm"):
        del kept[f"model.layers.0.{name}.weight"]
    kept["model.norm.weight"] = kept.pop("model.layers.0.shared_head.norm.weight")
    kept |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return write_checkpoint(target, tiny_config(family, num_hidden_layers=1, first_k_dense_replace=0), kept)


def plain_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_draft_layer_equals_transformers(tmp_path: Path, family: str) -> None:
    """Hidden states of transformers, combined by hand, through transformers' layer: the logits are ours."""
    from transformers import AutoModelForCausalLM

    source = random_checkpoint(tmp_path / "m", family, seed=8, num_nextn_predict_layers=1)
    single = only_the_draft_layer(source, tmp_path / "draft", family)
    main, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, single))
    tokens = torch.randint(2, 320, (LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    stored, eps = load_file(source / "model.safetensors"), main.config.rms_norm_eps
    with torch.no_grad():
        hidden = main.model(tokens[None, :-1]).last_hidden_state[0]
        embedded = plain_rms(stored["model.embed_tokens.weight"][tokens[1:]], stored[DRAFT + "enorm.weight"], eps)
        halves = torch.cat((embedded, plain_rms(hidden, stored[DRAFT + "hnorm.weight"], eps)), dim=-1)
        expected = draft(inputs_embeds=(halves @ stored[DRAFT + "eh_proj.weight"].T)[None]).logits[0]

    config = ModelConfig.from_dir(source).with_draft()
    decoder = DsaDecoder(config, load_weights(source, config, torch.float32), None, torch.float32)
    layer, backend, positions = DraftLayer(decoder), DenseBackend(config), torch.arange(LENGTH)
    backend.begin([("only", LENGTH)])
    ours = layer.hidden(decoder.hidden(tokens[:-1], positions, backend), tokens[1:], positions, backend)
    torch.testing.assert_close(decoder.logits(ours), expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(layer.guess(ours[-5:]), expected[-5:].argmax(-1))


def test_rows_without_attention_are_the_rows_attention_caches(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path, "glm_moe_dsa", num_nextn_predict_layers=1)
    config = ModelConfig.from_dir(source).with_draft()
    decoder = DsaDecoder(config, load_weights(source, config, torch.float32), None, torch.float32)
    layer, backend, positions = DraftLayer(decoder), DenseBackend(config), torch.arange(9)
    hidden, tokens = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)), torch.arange(9) + 5
    backend.begin([("only", 9)])
    layer.hidden(hidden, tokens, positions, backend)
    rows = layer.kv_rows(hidden, tokens, positions)
    assert rows.index_key is not None
    assert torch.equal(torch.cat((rows.ckv, rows.k_rope), dim=-1), backend._main[layer.layer, "only"])
    assert torch.equal(rows.index_key, backend._index[layer.layer, "only"])


def test_embedding_and_head_are_the_models_own_unless_the_layer_brings_its_own(tmp_path: Path) -> None:
    settings = tiny_config("deepseek_v32", num_nextn_predict_layers=1)
    tensors = random_tensors(settings)
    write_checkpoint(tmp_path / "without", settings, tensors)
    own = {DRAFT + "embed_tokens.weight": torch.ones(320, 96), DRAFT + "shared_head.head.weight": torch.zeros(320, 96)}
    write_checkpoint(tmp_path / "with", settings, tensors | own)
    config = ModelConfig.from_dir(tmp_path / "with").with_draft()
    without = load_weights(tmp_path / "without", config, torch.float32)
    with_own = load_weights(tmp_path / "with", config, torch.float32).draft
    assert without.draft is not None and with_own is not None
    assert without.draft.embed is without.embed and without.draft.lm_head is without.lm_head
    assert bool(with_own.embed.eq(1).all()) and bool(with_own.lm_head.eq(0).all())


def test_a_draft_layer_is_numbered_behind_the_others_and_has_its_own_indexer() -> None:
    plain = ModelConfig.from_dict(tiny_config("glm_moe_dsa", indexer_types=["full", "shared"] * 2))
    with pytest.raises(ModelConfigError, match="num_nextn_predict_layers is 0; legal: 1 or more"):
        plain.with_draft()
    drafting = replace(plain, num_nextn_predict_layers=1).with_draft()
    assert (plain.num_layers, drafting.num_layers) == (4, 5)
    assert drafting.index_owners == (0, 0, 2, 2, 4)
    assert drafting.indexer_layers == (0, 2, 4)
    assert drafting.with_draft() == drafting


@pytest.mark.parametrize(
    ("fields", "is_moe"),
    [
        ({"first_k_dense_replace": 1}, True),
        ({"first_k_dense_replace": 5}, False),
        ({"mlp_layer_types": ["dense"] * 4}, False),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"]}, True),
        ({"mlp_layer_types": ["sparse"] * 4 + ["dense"]}, False),
    ],
)
def test_whether_the_draft_layer_has_experts(fields: dict[str, object], is_moe: bool) -> None:
    settings = json.loads(json.dumps(tiny_config("glm_moe_dsa", num_nextn_predict_layers=1, **fields)))
    assert ModelConfig.from_dict(settings).with_draft().moe_layers[4] is is_moe
