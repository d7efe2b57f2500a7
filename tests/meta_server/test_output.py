"""Text of an answer: stop strings, stop tokens, pieces that add up."""

from __future__ import annotations

import pytest
from sluice.v1 import common_pb2

from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from meta_server.output import OutputText

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
EOS = 2


def run(
    output: OutputText, ids: list[int], reason: common_pb2.FinishReason.ValueType, batch: int = 1
) -> tuple[str, list[int]]:
    """All text and tokens given out for `ids`, delivered in batches."""
    text, given = "", []
    for start in range(0, len(ids), batch):
        chunk = output.push([common_pb2.Token(id=one) for one in ids[start : start + batch]])
        text += chunk.text
        given += [token.id for token in chunk.tokens]
        if output.stopped:
            return text, given
    return text + output.finish(reason), given


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("text", ["The pass key is 12.", "grün, 日本, 🙂!", ""])
def test_texts_add_up_to_the_answer(tokenizer: Tokenizer, text: str, batch: int) -> None:
    ids = tokenizer.encode(text)
    output = OutputText(tokenizer, SamplingParams(max_tokens=99, stop=("never seen",)), (EOS,))
    assert run(output, ids, LENGTH, batch) == (text, ids)
    assert output.stop_reason is None and output.count == len(ids)


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_stop_string_over_several_tokens(tokenizer: Tokenizer, batch: int) -> None:
    ids = tokenizer.encode("The pass key is 12. Remember it")
    output = OutputText(tokenizer, SamplingParams(max_tokens=99, stop=("12. R", "key is 13")), (EOS,))
    text, given = run(output, ids, LENGTH, batch)
    assert text == "The pass key is "
    assert (output.stopped, output.stop_reason) == (True, "12. R")
    assert given == ids[: len(given)] and "12. R" in tokenizer.decode(given)
    assert "12. R" not in tokenizer.decode(given[:-1]), "tokens after the match are dropped"


def test_stop_string_counts_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a.b.c.")
    output = OutputText(tokenizer, SamplingParams(max_tokens=99, min_tokens=4, stop=(".",)), (EOS,))
    assert run(output, ids, LENGTH)[0] == "a.b"


def test_stop_token_text_does_not_leak(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("he is tall")
    output = OutputText(tokenizer, SamplingParams(max_tokens=99, stop_token_ids=(ids[-1],)), (EOS,))
    text, given = run(output, ids, STOP)
    assert (text, given) == (tokenizer.decode(ids[:-1]), ids)
    assert output.stop_reason == ids[-1]


def test_stop_token_that_did_not_end_the_answer_is_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("he is tall")
    output = OutputText(tokenizer, SamplingParams(max_tokens=99, stop_token_ids=(ids[0],)), (EOS,))
    assert run(output, ids, LENGTH)[0] == "he is tall"


def test_end_of_sequence_has_no_text_and_no_stop_reason(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("he is")
    output = OutputText(tokenizer, SamplingParams(max_tokens=99), (EOS,))
    assert run(output, [*ids, EOS], STOP) == ("he is", [*ids, EOS])
    assert output.stop_reason is None


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    output = OutputText(None, SamplingParams(max_tokens=9), (EOS,))
    assert run(output, [5, 6, EOS], STOP) == ("", [5, 6, EOS])
