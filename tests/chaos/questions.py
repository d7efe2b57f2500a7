"""What the clients ask, and the one right answer to each: the oracle's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.passkey import make_prompt
from engine.tokenizer import Tokenizer
from tests.oracle import MIN_GAP, Oracle, OracleResult

LENGTHS = (40, 64, 100, 150, 200, 333, 500, 700, 1000, 1500)
PER_LENGTH = 2
MAX_TOKENS = (1, 8, 24, 80)


@dataclass(frozen=True)
class Question:
    """A prompt, as token ids, and its greedy continuation."""

    name: str
    prompt: Sequence[int]
    max_tokens: int
    right: OracleResult

    def mistake(self, tokens: Sequence[int], whole: bool) -> str | None:
        """Why `tokens` cannot be the answer, or the beginning of it if not `whole`; None if they can.

        Behind a token of which the oracle is not sure, anything goes.
        """
        for step, (got, wanted, gap) in enumerate(zip(tokens, self.right.tokens, self.right.gaps, strict=False)):
            if got != wanted:
                return None if gap < MIN_GAP else f"{self.name}: token {step} is {got}, not {wanted}"
        if len(tokens) > len(self.right.tokens) or (whole and len(tokens) < len(self.right.tokens)):
            return f"{self.name}: {len(tokens)} tokens, not {len(self.right.tokens)}"
        return None


def passkey_questions(model_dir: Path) -> list[Question]:
    """The same for every seed, so that the oracle's answers are computed once per machine.

    Half of the prompts begin like another one, so that prefixes are found in the pool.
    """
    oracle, tokenizer = Oracle(model_dir), Tokenizer.from_dir(model_dir)
    if tokenizer is None:
        raise FileNotFoundError(f"{model_dir} has no tokenizer")
    rng = random.Random(0)
    questions = []
    for length in LENGTHS:
        for seed in range(PER_LENGTH):
            ids = tokenizer.encode(make_prompt(length, rng.random(), seed)[0])
            for name, prompt in ((f"{length}/{seed}", ids), (f"{length}/{seed}/cut", ids[: max(1, len(ids) * 3 // 4)])):
                max_tokens = rng.choice(MAX_TOKENS)
                questions.append(Question(name, prompt, max_tokens, oracle.greedy(prompt, max_tokens)))
    return questions
