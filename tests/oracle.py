"""The slow, independent reference: greedy decoding by transformers, step by step with its certainty."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine.model.fingerprint import fingerprint

MIN_GAP = 1e-3
"""Where the two best logits are closer than this, two correct programs may pick different tokens."""

_PREFILL_CHUNK = 512
_VERSION = 1


@dataclass(frozen=True)
class OracleResult:
    """Greedy tokens and, for each, the best logit minus the second best."""

    tokens: list[int]
    gaps: list[float]


class Oracle:
    """transformers' own model of a checkpoint, in float32 on the CPU; loaded at the first question not yet cached.

    Answers are kept under the system's temporary directory, keyed by the checkpoint's fingerprint, so that repeated
    test runs cost nothing.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self._dir = Path(model_dir)
        self._fingerprint = fingerprint(model_dir)
        self._cache = Path(tempfile.gettempdir()) / f"sluice-oracle-{os.getuid()}"

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int, eos: bool = False) -> OracleResult:
        """Continue the prompt by up to `max_tokens` tokens; with `eos`, stop after an end-of-sequence token."""
        question = json.dumps([_VERSION, self._fingerprint, list(prompt_ids), max_tokens, eos])
        path = self._cache / (hashlib.sha256(question.encode()).hexdigest() + ".json")
        if path.is_file():
            return OracleResult(**json.loads(path.read_text(encoding="utf-8")))
        result = self._generate(list(prompt_ids), max_tokens, eos)
        self._cache.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._cache, delete=False, encoding="utf-8") as file:
            json.dump(asdict(result), file)
        os.replace(file.name, path)
        return result

    @torch.no_grad()
    def logits(self, prompt_ids: Sequence[int]) -> torch.Tensor:
        """[len(prompt_ids), vocab] float32, computed in one piece; for prompts up to a few thousand tokens."""
        logits: torch.Tensor = self._model(torch.tensor([list(prompt_ids)])).logits[0]
        return logits

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._dir, dtype=torch.float32)  # comes in eval mode

    @torch.no_grad()
    def _generate(self, prompt: list[int], max_tokens: int, eos: bool) -> OracleResult:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        stop = self._eos_ids() if eos else set()
        result = OracleResult([], [])
        for start in range(0, len(prompt), _PREFILL_CHUNK):
            logits = self._step(prompt[start : start + _PREFILL_CHUNK], cache)
        for remaining in reversed(range(max_tokens)):
            best = logits.topk(2)
            token = int(logits.argmax())
            result.tokens.append(token)
            result.gaps.append(float(best.values[0] - best.values[1]))
            if token in stop or remaining == 0:
                break
            logits = self._step([token], cache)
        return result

    def _step(self, tokens: list[int], cache: Any) -> torch.Tensor:
        output = self._model(torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _eos_ids(self) -> set[int]:
        eos = self._model.generation_config.eos_token_id
        return set(eos) if isinstance(eos, list) else {eos} - {None}


def assert_tokens_match(got: Sequence[int], oracle: OracleResult) -> None:
    """Fail unless `got` equals the oracle's tokens up to the first step the oracle itself was not sure of.

    After a legal difference the texts part, so nothing later is compared.
    """
    for step, (token, expected, gap) in enumerate(zip(got, oracle.tokens, oracle.gaps, strict=False)):
        if token != expected:
            if gap < MIN_GAP:
                return
            raise AssertionError(f"step {step}: got token {token}, oracle {expected} (gap {gap:.4f}); got {list(got)}")
    if len(got) != len(oracle.tokens):
        raise AssertionError(f"got {len(got)} tokens, oracle {len(oracle.tokens)}: {list(got)}, {oracle.tokens}")
