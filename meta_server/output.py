"""From the tokens decode delivers to what the client sees: text, and an end at a stop string."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sluice.v1 import common_pb2

from engine.detokenizer import IncrementalDetokenizer, StopStringMatcher
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from meta_server.request import TokenChunk


class OutputText:
    """The text of one request's answer.

    Invariants:
        * The texts of all chunks and `finish` add up to the text of the tokens, without the stop string and without
          the token that ended the answer (test_texts_add_up_to_the_answer, test_stop_token_text_does_not_leak).
        * Tokens are given out in the chunk of their arrival, even while their text is held back.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, eos_token_ids: Collection[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer is not None else None
        self._matcher = StopStringMatcher(sampling.stop)
        self._sampling = sampling
        self._eos = eos_token_ids
        self._held: int | None = None  # a token that ends the answer unless another one follows
        self.count = 0
        self.stop_reason: str | int | None = None
        self.stopped = False

    def push(self, tokens: Iterable[common_pb2.Token]) -> TokenChunk:
        """Takes new tokens. A stop string sets `stopped`; the tokens after it are dropped."""
        given: list[common_pb2.Token] = []
        text = ""
        for token in tokens:
            text += self._take_held()
            if self.stopped:
                break
            given.append(token)
            self.count += 1
            if self._sampling.stops_at(token.id, self.count, self._eos):
                self._held = token.id
            else:
                text += self._text_of(token.id)
            if self.stopped:
                break
        return TokenChunk(tuple(given), text)

    def finish(self, reason: common_pb2.FinishReason.ValueType) -> str:
        """The answer ended for `reason`; returns the text that was still held back."""
        if self.stopped:
            return ""
        text = ""
        if reason == common_pb2.FINISH_REASON_STOP:
            if self._held in self._sampling.stop_token_ids:
                self.stop_reason = self._held
            self._held = None
        else:
            text = self._take_held()
        if self._detokenizer is None or self.stopped:
            return text
        tail = self._matcher.push(self._detokenizer.flush())
        self.stop_reason = tail.stop or self.stop_reason
        return text + tail.text + ("" if tail.stop else self._matcher.flush())

    def _take_held(self) -> str:
        token, self._held = self._held, None
        return "" if token is None else self._text_of(token)

    def _text_of(self, token_id: int) -> str:
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.push(token_id)
        if self.count < self._sampling.min_tokens:
            return piece
        result = self._matcher.push(piece)
        if result.stop is not None:
            self.stopped = True
            self.stop_reason = result.stop
        return result.text
