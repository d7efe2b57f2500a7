"""Train the pass-key model from scratch on one CPU core: `python -m benchmarks.train_passkey.train OUT`."""

from __future__ import annotations

import argparse
import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GlmMoeDsaForCausalLM

from benchmarks.passkey import MODEL_DIR, make_prompt
from benchmarks.train_passkey.data import PasskeyData
from benchmarks.train_passkey.indexer_loss import IndexerInputs
from benchmarks.train_passkey.model import INDEX_TOPK, new_model, run, set_topk
from engine.tokenizer import Tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_DENSE = 1 << 20


@dataclass(frozen=True)
class Stage:
    """One stretch of training: how long, on what text, at which learning rate, and which weights.

    Its length is a number of steps, not of minutes, so that a busy machine trains the same model.
    """

    name: str
    steps: int
    batch: int
    length: int
    needles: int
    span: int  # largest position; beyond `length` the text's positions jump
    rate: float
    trains_indexer: bool = False

    def shortened(self, steps: int | None) -> Stage:
        """The same stage with at most `steps` steps."""
        return self if steps is None else replace(self, steps=min(self.steps, steps))


RECIPE = (
    Stage("copy", 900, batch=16, length=112, needles=3, span=112, rate=1.2e-3),
    Stage("select", 300, batch=8, length=256, needles=6, span=4096, rate=1.2e-3),
    Stage("reach", 100, batch=4, length=768, needles=8, span=32768, rate=6e-4),
    Stage("index", 250, batch=2, length=768, needles=8, span=32768, rate=2e-3, trains_indexer=True),
)
"""Dense attention on ever longer text, then the indexer alone on the finished model's attention."""


def train_stage(model: GlmMoeDsaForCausalLM, data: PasskeyData, stage: Stage) -> float:
    """Run one stage; returns the smoothed loss at its end."""
    parameters = [
        parameter for name, parameter in model.named_parameters() if (".indexer." in name) == stage.trains_indexer
    ]
    model.set_attn_implementation("eager" if stage.trains_indexer else "sdpa")
    set_topk(model, _DENSE)
    optimiser = torch.optim.AdamW(parameters, lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01)
    started, smooth = time.monotonic(), math.nan
    for step in range(stage.steps):
        rate = stage.rate * min(1.0, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / stage.steps)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        tokens, weights = data.batch(stage.batch, stage.length, stage.needles)
        positions = data.positions(stage.batch, stage.length, stage.span)
        loss = (index_loss if stage.trains_indexer else text_loss)(model, tokens, weights, positions)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        smooth = loss.item() if step == 0 else 0.95 * smooth + 0.05 * loss.item()
        if (step + 1) % 50 == 0 or step + 1 == stage.steps:
            minutes = (time.monotonic() - started) / 60
            print(f"{stage.name}: {step + 1} / {stage.steps} steps, {minutes:.1f} min, loss {smooth:.4f}", flush=True)
    return smooth


def text_loss(model: GlmMoeDsaForCausalLM, tokens: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
    """Weighted mean cross-entropy of the next token."""
    logits = run(model, tokens[:, :-1], positions).logits
    losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()


def index_loss(model: GlmMoeDsaForCausalLM, tokens: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
    """How far the indexers are from the model's own attention; every token counts alike."""
    with torch.no_grad(), IndexerInputs(model) as inputs:
        attentions = run(model, tokens[:, :-1], positions, attentions=True).attentions
    return inputs.loss(attentions)


@torch.no_grad()
def accuracy(model: GlmMoeDsaForCausalLM, tokenizer: Tokenizer, length: int, prompts: int = 20) -> float:
    """Share of prompts of `length` tokens answered exactly, each token attending to INDEX_TOPK others."""
    model.set_attn_implementation("sdpa")
    set_topk(model, INDEX_TOPK)
    right = 0
    for seed in range(prompts):
        prompt, key = make_prompt(length, depth=seed / prompts, seed=10_000 + seed)
        name = prompt.rsplit(" ", 1)[1].rstrip("?")
        ids = tokenizer.encode(f"{prompt} The pass key for {name} is {key}")
        logits = run(model, torch.tensor([ids]), torch.arange(len(ids))[None]).logits[0]
        right += logits[-len(key) - 1 : -1].argmax(-1).tolist() == ids[-len(key) :]
    return right / prompts


def main() -> None:
    """Train by RECIPE and write a Hugging Face directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="at most this many steps per stage (a quick check)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_dir(MODEL_DIR)
    if tokenizer is None:
        raise SystemExit(f"{MODEL_DIR}: no tokenizer.json")
    model = new_model(tokenizer.vocab_size, arguments.seed)
    data = PasskeyData(tokenizer, arguments.seed + 1)
    for stage in RECIPE:
        train_stage(model, data, stage.shortened(arguments.steps))
    for length in (128, 512, 1024):
        print(f"exact answers at {length} tokens: {accuracy(model, tokenizer, length):.0%}", flush=True)
    model.save_pretrained(arguments.out)
    for file in _TOKENIZER_FILES:
        shutil.copy(MODEL_DIR / file, arguments.out / file)


if __name__ == "__main__":
    main()
