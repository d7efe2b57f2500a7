"""Streaming text: token by token without broken characters, and without leaking what may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 3
"""A UTF-8 character has at most four bytes, so at most three U+FFFD may still turn into one."""

_MAX_WINDOW = 32
"""Context is kept past tokens without text (skipped special ones), but not for ever: decoding it costs time."""


class IncrementalDetokenizer:
    """Turns one request's tokens into text as they come.

    Invariant: each `push` takes one token and gives the text it completes (perhaps none), and the pieces, `flush`
    included, add up to the text of all tokens decoded at once. A character whose bytes are spread over tokens comes
    out whole, with its last token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # tokens decoded together: context, then those not fully given out
        self._context = 0  # how many of them are context, given out before
        self._given = 0  # characters of the window's text given out

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text)
        while stable > 0 and len(text) - stable < _MAX_HELD and text[stable - 1] == _INCOMPLETE:
            stable -= 1
        piece = text[self._given : stable]
        self._given = max(self._given, stable)
        if stable == len(text) and (piece or len(self._window) > _MAX_WINDOW):
            self._forget()
        return piece

    def flush(self) -> str:
        """What is still held back: at the end of the answer, bytes that form no character."""
        text = self._decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _forget(self) -> None:
        """All of the window is given out: keep its newest part as the context of what follows."""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._given = len(self._decode(self._window))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)


class StopResult(NamedTuple):
    """Text that may be shown, and the stop string that ended the answer, if one did."""

    text: str
    stop: str | None


class StopStringMatcher:
    """Finds the first stop string in streamed text; the stop string itself is never given out.

    The first is the one that ends first (of several the longest), so the result does not depend on how the text was
    cut into pieces.

    Invariant: text is held back only while it is the beginning of some stop string, and nothing is lost: without a
    match the pieces, `flush` included, add up to what was pushed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are strings that are not empty."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Add text; after a match no more may be pushed."""
        self._held += text
        found = [(self._held.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            end, _, stop = min(found)
            return StopResult(self._held[: end - len(stop)], stop)
        keep = self._possible_start()
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return StopResult(ready, None)

    def flush(self) -> str:
        """What was held back, at the end of an answer without a match."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
