"""Mixture of experts with sigmoid routing in groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.layers import swiglu
from engine.model.weights import MoeWeights


def route(x: Tensor, weights: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Choose `num_experts_per_tok` experts for each row of x [T, H].

    The correction bias takes part in the choice only; weights are the unbiased scores (DeepSeek-V3, section 2.1.2).

    Returns:
        experts [T, k] int64 and their weights [T, k] float32.
    """
    scores = F.linear(x.to(torch.float32), weights.gate).sigmoid()
    choice = scores + weights.correction_bias
    if config.topk_group < config.n_group:
        grouped = choice.view(x.shape[0], config.n_group, -1)
        best_groups = grouped.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best_groups, False)
        choice = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
    experts = choice.topk(config.num_experts_per_tok, dim=-1).indices
    chosen = scores.gather(1, experts)
    if config.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return experts, chosen * config.routed_scaling_factor


def mixture(x: Tensor, weights: MoeWeights, config: ModelConfig) -> Tensor:
    """This rank's experts and its part of the shared ones: x [T, H] -> [T, H], to be summed over ranks.

    Rows are sorted by expert, so only experts with rows compute, and only on their rows.
    """
    experts, routing = route(x, weights, config)
    routed = torch.zeros_like(x)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    bounds = torch.searchsorted(flat[order], torch.arange(config.n_routed_experts + 1, device=x.device)).tolist()
    for local, expert_weights in enumerate(weights.experts):
        start, end = bounds[weights.first_expert + local : weights.first_expert + local + 2]
        if start == end:
            continue
        picks = order[start:end]
        rows = picks // config.num_experts_per_tok
        output = swiglu(x.index_select(0, rows), expert_weights)
        output = (output * routing.flatten()[picks, None]).to(x.dtype)
        routed.index_add_(0, rows, output)
    return routed + swiglu(x, weights.shared)
