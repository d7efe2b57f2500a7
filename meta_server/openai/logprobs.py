"""Log-probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.v1 import common_pb2

from engine.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no minus infinity


class TokenNames:
    """How a token is shown: its text, or `token_id:N` where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)


def completion_logprobs(names: TokenNames, tokens: Sequence[common_pb2.Token], offset: int) -> dict[str, Any]:
    """The `logprobs` object of a completion choice; `offset` is the characters before the first token.

    `top_logprobs` holds the chosen token too, even when it is not among the best.
    """
    shown = [names(token.id) for token in tokens]
    tops = []
    offsets = []
    for token, text in zip(tokens, shown, strict=True):
        top: dict[str, float] = {}
        for one in token.top:
            top.setdefault(names(one.token_id), _finite(one.logprob))
        top.setdefault(text, _finite(token.logprob))
        tops.append(top)
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": shown,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(names: TokenNames, tokens: Sequence[common_pb2.Token]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {
        "content": [
            {
                **_entry(names, token.id, token.logprob),
                "top_logprobs": [_entry(names, one.token_id, one.logprob) for one in token.top],
            }
            for token in tokens
        ]
    }


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    text = names(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST) if logprob == logprob else _LOWEST
