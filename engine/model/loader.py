"""From a checkpoint to the weights one tensor-parallel rank computes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelConfig
from engine.model.shard import Shard, check_divisible
from engine.model.weight_files import CheckpointError
from engine.model.weights import (
    AttentionWeights,
    DraftWeights,
    IndexerWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all) after each layer."""


def load_weights(
    model_dir: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    shard: Shard | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> ModelWeights:
    """Load this rank's part of the checkpoint; slices of other ranks are never read.

    Attention heads, routed experts and the intermediate width of dense and shared blocks are split over the ranks
    of `shard` (None: a single rank). Indexers of layers that reuse another's top-k are not loaded, and of the layers
    past `num_hidden_layers` (multi-token prediction) the first one only if `config.draft_layers` asks for it.

    Raises:
        CheckpointError: a tensor is missing or mis-shaped.
        TensorParallelError: the number of ranks does not divide heads, experts or intermediate sizes.
    """
    shard = shard or Shard(rank=0, size=1)
    check_divisible(config, shard)
    with Checkpoint(model_dir, config.quant_block) as checkpoint:
        loader = _Loader(checkpoint, config, dtype, shard, torch.device(device))
        embed = loader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = []
        for layer in range(config.num_hidden_layers):
            layers.append(loader.layer(layer))
            if progress is not None:
                progress(layer + 1, config.num_layers)
        norm = loader.vector("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            lm_head = embed
        else:
            lm_head = loader.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
        draft = loader.draft(embed, lm_head) if config.draft_layers else None
        if progress is not None and draft is not None:
            progress(config.num_layers, config.num_layers)
    return ModelWeights(embed=embed, layers=tuple(layers), norm=norm, lm_head=lm_head, draft=draft)


@dataclass(frozen=True)
class _Loader:
    """Reads groups of tensors under their checkpoint names."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    shard: Shard
    device: torch.device

    def matrix(
        self,
        name: str,
        height: int,
        width: int,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return self.checkpoint.read(name, (height, width), dtype or self.dtype, rows, columns).to(self.device)

    def vector(self, name: str, length: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.checkpoint.read(name, (length,), dtype or self.dtype).to(self.device)

    def layer(self, layer: int) -> LayerWeights:
        prefix, hidden = f"model.layers.{layer}.", self.config.hidden_size
        return LayerWeights(
            input_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            attention=self._attention(prefix + "self_attn.", self.config.has_indexer(layer)),
            post_attention_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            mlp=self._moe(prefix + "mlp.")
            if self.config.moe_layers[layer]
            else self._split_mlp(prefix + "mlp.", self.config.intermediate_size),
        )

    def draft(self, embed: Tensor, lm_head: Tensor) -> DraftWeights:
        """The first multi-token-prediction layer, with the model's embedding and head unless it brings its own."""
        layer, hidden, vocab = self.config.num_hidden_layers, self.config.hidden_size, self.config.vocab_size
        prefix = f"model.layers.{layer}."
        if prefix + "eh_proj.weight" not in self.checkpoint:
            raise CheckpointError(
                f"decode.speculative_tokens: the checkpoint holds no weights of its multi-token-prediction layer "
                f"({prefix}eh_proj.weight is missing); legal: 0"
            )
        own_embed, own_head = prefix + "embed_tokens.weight", prefix + "shared_head.head.weight"
        return DraftWeights(
            embed=self.matrix(own_embed, vocab, hidden) if own_embed in self.checkpoint else embed,
            embed_norm=self.vector(prefix + "enorm.weight", hidden),
            hidden_norm=self.vector(prefix + "hnorm.weight", hidden),
            project=self.matrix(prefix + "eh_proj.weight", hidden, 2 * hidden),
            layer=self.layer(layer),
            norm=self.vector(prefix + "shared_head.norm.weight", hidden),
            lm_head=self.matrix(own_head, vocab, hidden) if own_head in self.checkpoint else lm_head,
        )

    def _attention(self, prefix: str, has_indexer: bool) -> AttentionWeights:
        c = self.config
        first, last = self.shard.split("num_attention_heads", c.num_attention_heads)
        value_width, kv_width = c.v_head_dim, c.qk_nope_head_dim + c.v_head_dim
        kv_b = self.matrix(
            prefix + "kv_b_proj.weight",
            c.num_attention_heads * kv_width,
            c.kv_lora_rank,
            rows=(first * kv_width, last * kv_width),
        ).view(last - first, kv_width, c.kv_lora_rank)
        return AttentionWeights(
            q_a_proj=self.matrix(prefix + "q_a_proj.weight", c.q_lora_rank, c.hidden_size),
            q_a_norm=self.vector(prefix + "q_a_layernorm.weight", c.q_lora_rank),
            q_b_proj=self.matrix(
                prefix + "q_b_proj.weight",
                c.num_attention_heads * c.qk_head_dim,
                c.q_lora_rank,
                rows=(first * c.qk_head_dim, last * c.qk_head_dim),
            ),
            kv_a_proj=self.matrix(
                prefix + "kv_a_proj_with_mqa.weight", c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size
            ),
            kv_a_norm=self.vector(prefix + "kv_a_layernorm.weight", c.kv_lora_rank),
            w_uk=kv_b[:, : c.qk_nope_head_dim].contiguous(),
            w_uv=kv_b[:, c.qk_nope_head_dim :].transpose(1, 2).contiguous(),
            o_proj=self.matrix(
                prefix + "o_proj.weight",
                c.hidden_size,
                c.num_attention_heads * value_width,
                columns=(first * value_width, last * value_width),
            ),
            indexer=self._indexer(prefix + "indexer.") if has_indexer else None,
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        c = self.config
        return IndexerWeights(
            wq_b=self.matrix(prefix + "wq_b.weight", c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            wk=self.matrix(prefix + "wk.weight", c.index_head_dim, c.hidden_size),
            k_norm_weight=self.vector(prefix + "k_norm.weight", c.index_head_dim),
            k_norm_bias=self.vector(prefix + "k_norm.bias", c.index_head_dim),
            weights_proj=self.matrix(prefix + "weights_proj.weight", c.index_n_heads, c.hidden_size),
        )

    def _moe(self, prefix: str) -> MoeWeights:
        c = self.config
        first, last = self.shard.split("n_routed_experts", c.n_routed_experts)
        whole = (0, c.moe_intermediate_size)
        return MoeWeights(
            gate=self.matrix(prefix + "gate.weight", c.n_routed_experts, c.hidden_size, dtype=torch.float32),
            correction_bias=self.vector(
                prefix + "gate.e_score_correction_bias", c.n_routed_experts, dtype=torch.float32
            ),
            first_expert=first,
            experts=tuple(
                self._mlp(f"{prefix}experts.{expert}.", c.moe_intermediate_size, whole) for expert in range(first, last)
            ),
            shared=self._split_mlp(prefix + "shared_experts.", c.moe_intermediate_size * c.n_shared_experts),
        )

    def _split_mlp(self, prefix: str, width: int) -> MlpWeights:
        return self._mlp(prefix, width, self.shard.split("intermediate size", width))

    def _mlp(self, prefix: str, width: int, part: tuple[int, int]) -> MlpWeights:
        hidden = self.config.hidden_size
        gate = self.matrix(prefix + "gate_proj.weight", width, hidden, rows=part)
        up = self.matrix(prefix + "up_proj.weight", width, hidden, rows=part)
        return MlpWeights(
            gate_up=torch.cat((gate, up)),
            down=self.matrix(prefix + "down_proj.weight", hidden, width, columns=part),
        )
