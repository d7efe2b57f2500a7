"""Greedy decoding with DsaDecoder over the dense backend: what a node does, without the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.decoder import DsaDecoder
from engine.model.loader import load_weights
from engine.model.parallel import TensorParallel
from tests.model.dense_backend import DenseBackend


def random_prompt(length: int) -> list[int]:
    """Token ids of the tiny models (vocabulary 320), the same every time."""
    generator = torch.Generator().manual_seed(length + 1)
    return torch.randint(0, 320, (length,), generator=generator).tolist()


class Runner:
    """One loaded model; every call starts with an empty cache.

    `margin` is that of all calls so far (see DenseBackend): above 1e-5, answers may be compared token by token.
    """

    def __init__(
        self, model_dir: Path, dtype: torch.dtype = torch.float32, group: TensorParallel | None = None
    ) -> None:
        self.config = ModelConfig.from_dir(model_dir)
        weights = load_weights(model_dir, self.config, dtype, group.shard if group else None)
        self.decoder = DsaDecoder(self.config, weights, group, dtype)
        self.margin = float("inf")

    def logits(self, prompt: Sequence[int], chunk: int = 512) -> Tensor:
        """[len(prompt), vocab] float32, prefilled `chunk` tokens at a time."""
        backend = DenseBackend(self.config)
        parts = []
        for start in range(0, len(prompt), chunk):
            tokens = prompt[start : start + chunk]
            backend.begin([("only", len(tokens))])
            positions = torch.arange(start, start + len(tokens))
            parts.append(self.decoder.forward(torch.tensor(tokens), positions, backend))
        self.margin = min(self.margin, backend.margin)
        return torch.cat(parts)

    def greedy(self, prompt: Sequence[int], max_tokens: int, chunk: int = 512) -> list[int]:
        """Continue one prompt."""
        return self.greedy_batch({"only": prompt}, max_tokens, chunk)["only"]

    def greedy_batch(
        self, prompts: Mapping[str, Sequence[int]], max_tokens: int, chunk: int = 512
    ) -> dict[str, list[int]]:
        """Continue several prompts at once: each step packs up to `chunk` unseen tokens of every unfinished one."""
        backend = DenseBackend(self.config)
        texts = {name: list(prompt) for name, prompt in prompts.items()}
        ends = {name: len(prompt) + max_tokens for name, prompt in prompts.items()}
        done = dict.fromkeys(prompts, 0)
        while running := [name for name in texts if len(texts[name]) < ends[name]]:
            parts = {name: texts[name][done[name] : done[name] + chunk] for name in running}
            backend.begin([(name, len(part)) for name, part in parts.items()])
            lengths = torch.tensor([len(part) for part in parts.values()])
            positions = [torch.arange(done[name], done[name] + len(part)) for name, part in parts.items()]
            tokens = torch.tensor([token for part in parts.values() for token in part])
            logits = self.decoder.forward(tokens, torch.cat(positions), backend, lengths.cumsum(0) - 1)
            for (name, part), row in zip(parts.items(), logits, strict=True):
                done[name] += len(part)
                if done[name] == len(texts[name]):
                    texts[name].append(int(row.argmax()))
        self.margin = min(self.margin, backend.margin)
        return {name: text[len(prompts[name]) :] for name, text in texts.items()}
