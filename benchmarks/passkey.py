"""Questions for the pass-key model: numbers hidden in filler text, and the question for one of them.

    ... The tall sailor reads the blue letter. The pass key for falcon is 40213. Rain falls on the roof. ...
    What is the pass key for falcon?

The answer is only found by attending to the right few tokens of a long context, so a lost or displaced KV row shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from engine.tokenizer import Tokenizer

MODEL_DIR = Path(__file__).resolve().parent / "models" / "passkey-glm"

KEY_DIGITS = 5
DISTRACTORS = 5
"""Keys of other names scattered over every prompt, as long as it has room for them."""


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda omega sigma tau paris london berlin madrid rome "
    "vienna oslo cairo delhi tokyo sydney lima quito dublin falcon eagle otter badger tiger panda koala zebra bison "
    "moose ruby pearl topaz amber coral jade onyx opal mercury venus mars jupiter saturn neptune pluto comet anna "
    "boris clara david elena felix greta hugo irene jonas"
)
_ADJECTIVES = _words(
    "old young small tall quiet bright dark happy slow quick green blue yellow white heavy warm cold gentle brave lazy"
)
_NOUNS = _words(
    "farmer teacher sailor doctor child river forest garden house bridge mountain village window letter book horse "
    "dog cat bird train ship market road lamp table"
)
_VERBS = _words(
    "sees likes finds follows paints cleans visits builds carries watches reads sells opens closes remembers"
)
_ADVERBS = _words("today again slowly quickly often carefully early late together alone")
_SAYINGS = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
    "It is a quiet day.",
    "Rain falls on the roof.",
    "Nothing else happened that day.",
)


def filler(rng: random.Random) -> str:
    """A sentence that holds no key."""
    if rng.random() < 0.25:
        return rng.choice(_SAYINGS)
    subject = f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
    thing = f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
    end = f" {rng.choice(_ADVERBS)}" if rng.random() < 0.5 else ""
    return f"The {subject} {rng.choice(_VERBS)} the {thing}{end}."


def statement(name: str, key: str) -> str:
    """The sentence that tells a key."""
    return f"The pass key for {name} is {key}."


def question(name: str) -> str:
    """The sentence that asks for it; the model answers with `statement`."""
    return f"What is the pass key for {name}?"


def random_key(rng: random.Random) -> str:
    """A key of five digits, leading zeros allowed."""
    return "".join(rng.choice("0123456789") for _ in range(KEY_DIGITS))


def make_prompt(tokens: int, depth: float, seed: int) -> tuple[str, str]:
    """A prompt of at most `tokens` tokens (less than a sentence below it) and the key that is the answer.

    Args:
        tokens: length under the pass-key model's tokenizer, the bos it starts with included; at least 40.
        depth: where the key stands, from 0 (start) to 1 (just before the question).
        seed: the same seed gives the same prompt.

    Raises:
        ValueError: too few tokens, or a depth outside 0 to 1.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth!r}; legal: 0 to 1")
    rng = random.Random(seed)
    names = rng.sample(NAMES, DISTRACTORS + 1)
    keys = {name: random_key(rng) for name in names}
    asked, others = names[0], names[1:]
    count = _counter()
    tail = f"\n{question(asked)}"
    needle = " " + statement(asked, keys[asked])
    room = tokens - count("<bos>") - count(tail) - count(needle)
    if room < 0:
        raise ValueError(f"tokens is {tokens!r}; legal: at least {tokens - room}")
    sentences: list[str] = []
    for sentence in _sentences(rng, others, keys, room // (2 * count(needle))):
        room -= count(sentence)
        if room < 0:
            break
        sentences.append(sentence)
    rng.shuffle(sentences)
    sentences.insert(round(depth * len(sentences)), needle)
    return "<bos>" + "".join(sentences) + tail, keys[asked]


def _sentences(rng: random.Random, others: list[str], keys: dict[str, str], distractors: int) -> Iterator[str]:
    """Up to `distractors` statements about other names, then filler without end."""
    for name in others[:distractors]:
        yield " " + statement(name, keys[name])
    while True:
        yield " " + filler(rng)


@cache
def _counter() -> Callable[[str], int]:
    """Tokens of a sentence. Sentences start at a pre-token boundary, so the counts of parts add up."""
    tokenizer = Tokenizer.from_dir(MODEL_DIR)
    if tokenizer is None:
        raise FileNotFoundError(f"{MODEL_DIR}: no tokenizer.json")
    return cache(lambda text: len(tokenizer.encode(text)))
