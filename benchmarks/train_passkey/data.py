"""Training text: keys hidden in filler, then questions with their answers, as token ids with loss weights."""

from __future__ import annotations

import random
from functools import cache

import torch
from torch import Tensor

from benchmarks.passkey import KEY_DIGITS, NAMES, filler, question, random_key, statement
from engine.tokenizer import Tokenizer

_FILLER_WEIGHT = 0.1
_ANSWER_WEIGHT = 0.5
_DIGIT_WEIGHTS = (8.0, 4.0, 2.0, 2.0, 2.0)
"""The first digit decides which key is copied, so it counts most."""

_FILLER_SENTENCES = 6000


class PasskeyData:
    """An endless source of batches; the same seed gives the same ones."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        self._encode = cache(tokenizer.encode)
        self._filler = [tokenizer.encode(" " + filler(self._rng)) for _ in range(_FILLER_SENTENCES)]

    def batch(self, size: int, length: int, needles: int) -> tuple[Tensor, Tensor]:
        """Tokens [size, length + 1] int64 and the loss weight of predicting each [size, length + 1] float32.

        Every text holds and asks for `needles` keys, in different orders.
        """
        texts, weights = zip(*(self._text(length + 1, needles) for _ in range(size)), strict=True)
        return torch.tensor(texts), torch.tensor(weights)

    def positions(self, size: int, length: int, span: int) -> Tensor:
        """[size, length] rising positions below `span`, with up to four random jumps.

        So short texts teach distances of long ones (positional skip-wise training, arXiv 2309.10400).
        """
        rows = []
        for _ in range(size):
            jumps = torch.zeros(length, dtype=torch.int64)
            cuts = self._rng.sample(range(1, length), self._rng.randint(1, 4))
            left = self._rng.randint(0, max(span - length, 0))
            for cut in cuts:
                jump = self._rng.randint(0, left)
                jumps[cut] = jump
                left -= jump
            rows.append(torch.arange(length) + jumps.cumsum(0))
        return torch.stack(rows)

    def _text(self, length: int, needles: int) -> tuple[list[int], list[float]]:
        keys = {name: random_key(self._rng) for name in self._rng.sample(NAMES, needles)}
        hidden = [self._weighted_statement(name, key, digits=(0.0,) * KEY_DIGITS, rest=_FILLER_WEIGHT)
                  for name, key in keys.items()]  # fmt: skip
        tail: list[tuple[int, float]] = []
        for name in self._rng.sample(sorted(keys), needles):
            tail += [(token, _FILLER_WEIGHT) for token in self._encode(f"\n{question(name)}")]
            tail += self._weighted_statement(name, keys[name], _DIGIT_WEIGHTS, _ANSWER_WEIGHT)
        room = length - 1 - len(tail) - sum(len(sentence) for sentence in hidden)
        if room < 0:
            raise ValueError(f"length {length} has no room for {needles} needles; {-room} tokens too short")
        sentences = list(hidden)
        while room > 0:
            tokens = self._rng.choice(self._filler)[:room]
            sentences.append([(token, _FILLER_WEIGHT) for token in tokens])
            room -= len(tokens)
        self._rng.shuffle(sentences)
        bos = self._encode("<bos>")[0]
        text = [(bos, 0.0), *(pair for sentence in sentences for pair in sentence), *tail]
        return [token for token, _ in text], [weight for _, weight in text]

    def _weighted_statement(
        self, name: str, key: str, digits: tuple[float, ...], rest: float
    ) -> list[tuple[int, float]]:
        """Tokens of the sentence that tells a key; it ends with five digits, one token each, and a full stop."""
        tokens = self._encode(" " + statement(name, key))
        weights = [rest] * (len(tokens) - KEY_DIGITS - 1) + list(digits) + [rest]
        return list(zip(tokens, weights, strict=True))
