"""Text survives the way through tokens, also one token at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models

from engine.detokenizer import IncrementalDetokenizer, StopStringMatcher
from engine.tokenizer import Tokenizer, TokenizerError
from tests.checkpoints import PASSKEY_GLM


def load(path: Path = PASSKEY_GLM) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer is not None
    return tokenizer


TOKENIZER = load()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the demo model's tokenizer without a chat template."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PASSKEY_GLM / file, tmp_path / file)
    return tmp_path


def test_directory_without_tokenizer_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.from_dir(tmp_path) is None


def test_ids_equal_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(PASSKEY_GLM)
    text = "<bos> The pass key for otter is 40213.\nNaïve café: 漢字 👋"
    assert TOKENIZER.encode(text) == theirs(text)["input_ids"]
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == theirs.decode(
        theirs(text)["input_ids"], skip_special_tokens=True
    )


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = TOKENIZER.encode("<bos>a<eos>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert TOKENIZER.eos_token_id == 2
    assert TOKENIZER.decode(ids) == "a"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<bos>a<eos>"
    assert TOKENIZER.token_text(2) == "<eos>"


@given(st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_encoding_and_decoding_is_the_identity(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=80))
@settings(max_examples=300, deadline=None)
def test_streamed_pieces_add_up_to_the_whole_text(ids: list[int]) -> None:
    """Any tokens at all: broken UTF-8, special tokens, single bytes."""
    stream = IncrementalDetokenizer(TOKENIZER)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == TOKENIZER.decode(ids)


@given(st.text(alphabet=st.sampled_from("aé漢👋\N{ZERO WIDTH JOINER} 1"), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_piece_holds_a_broken_character(text: str) -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    pieces = [stream.push(token) for token in TOKENIZER.encode(text)]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_character_comes_out_with_its_last_byte() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    ids = TOKENIZER.encode("👋")
    assert len(ids) == 4
    assert [stream.push(token) for token in ids] == ["", "", "", "👋"]


def test_truncated_character_comes_out_at_the_end() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    assert [stream.push(token) for token in TOKENIZER.encode("漢")[:2]] == ["", ""]
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


def run_matcher(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopStringMatcher(stops), ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def test_stop_string_ends_the_text_before_it() -> None:
    assert run_matcher(["STOP"], ["one ST", "OP two"]) == ("one ", "STOP")


def test_possible_beginning_is_held_back_and_let_go() -> None:
    matcher = StopStringMatcher(["\n\nQ", "END"])
    assert matcher.push("a\n").text == "a"
    assert matcher.push("\n").text == ""
    assert matcher.push("bE").text == "\n\nb"
    assert matcher.push("N").text == ""
    assert matcher.flush() == "EN"


def test_of_several_stops_the_first_to_end_wins() -> None:
    assert run_matcher(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run_matcher(["c", "bc"], ["abcd"]) == ("a", "bc")


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.lists(st.text(alphabet="ab", max_size=4))
)
@settings(max_examples=300, deadline=None)
def test_stop_matching_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert run_matcher(stops, pieces) == run_matcher(stops, [text])
    shown, stop = run_matcher(stops, pieces)
    assert text.startswith(shown + (stop or ""))
    assert not any(candidate in shown for candidate in stops)
    if stop is None:
        assert shown == text


CHAT = [{"role": "user", "content": "What is the pass key for otter?"}]


def test_default_chat_template_names_the_roles(directory: Path) -> None:
    assert load(directory).render_chat(CHAT) == "<bos>user: What is the pass key for otter?\nassistant:"
    assert load(directory).render_chat(CHAT, add_generation_prompt=False).endswith("otter?\n")


def test_chat_template_file_beats_tokenizer_config(directory: Path) -> None:
    config = directory / "tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    config.write_text(json.dumps({**values, "chat_template": named}))
    assert load(directory).render_chat(CHAT) == CHAT[0]["content"]
    (directory / "chat_template.jinja").write_text("{{ eos_token }}{{ messages | tojson }}")
    assert load(directory).render_chat(CHAT) == "<eos>" + json.dumps(CHAT)


def test_demo_model_answers_chats_in_its_own_format() -> None:
    assert TOKENIZER.encode(TOKENIZER.render_chat(CHAT), add_special_tokens=False) == TOKENIZER.encode(
        "<bos>What is the pass key for otter?"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for %}",
    ],
)
def test_refusing_hostile_and_broken_templates_are_errors(directory: Path, template: str) -> None:
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(TokenizerError, match="chat template: "):
        load(directory).render_chat(CHAT)


def test_damaged_files_are_named(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(directory)


@given(st.text(min_size=1, max_size=300))
def test_least_tokens_is_a_lower_bound(text: str) -> None:
    assert TOKENIZER.least_tokens(text) <= len(TOKENIZER.encode(text))


def test_least_tokens_of_a_long_text_is_not_zero() -> None:
    assert TOKENIZER.least_tokens("key " * 100_000) > 10_000


def test_a_tokenizer_that_drops_text_has_no_lower_bound(directory: Path) -> None:
    """Words it does not know, however long, become one token."""
    backend = BackendTokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    assert Tokenizer(backend, {}, None).least_tokens("b" * 10_000) == 0
