"""Speculative decoding changes how many steps an answer takes, never the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_node.commands import StepRow
from decode_node.finish import FinishReason
from decode_node.verify import verify
from engine.config import ConfigError, SluiceConfig
from engine.config_check import check_against_model, served_model
from engine.model.config import ModelConfig
from engine.model.decoder import DsaDecoder
from engine.model.draft import DraftLayer
from engine.model.loader import load_weights
from engine.model.weight_files import CheckpointError
from engine.sampling_params import SamplingParams
from tests.checkpoints import drafting_checkpoint, random_checkpoint, tiny_config
from tests.decode_node.local_node import GREEDY, LocalNode
from tests.decode_node.test_decode_exact import greedy, prompt_of
from tests.model.dense_backend import DenseBackend
from tests.oracle import Oracle, assert_tokens_match

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
BLOCK, TOPK = 16, 64
BORDERS = [k * BLOCK + around for k in (1, 4, 9) for around in (-1, 0, 1)]
"""Prompt lengths around whole blocks, below and above index_topk."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft layer that is often right."""
    return drafting_checkpoint(tmp_path_factory.mktemp("model") / "m", request.param, seed=3)


def node_of(checkpoint: Path, run_dir: Path, drafts: int, **options: Any) -> LocalNode:
    """With the smallest hot buffer that is legal."""
    options.setdefault("hot_tokens", (1 + drafts) * TOPK)
    return LocalNode(checkpoint, run_dir, speculative_tokens=drafts, **options)


@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_answers_equal_transformers_at_block_borders(checkpoint: Path, tmp_path: Path, drafts: int) -> None:
    node, oracle = node_of(checkpoint, tmp_path, drafts), Oracle(checkpoint)
    sessions = [node.start(f"r{length}", prompt_of(length), greedy(40)) for length in BORDERS]
    node.finish(*sessions)
    for session in sessions:
        assert_tokens_match(session.tokens, oracle.greedy(session.prompt, 40))
    counters = node.rank.counters
    assert counters.tokens >= 39 * len(BORDERS)
    if drafts:
        assert 0 < counters.accepted_tokens < counters.draft_tokens
        assert counters.steps < 39 * len(BORDERS)


class Reference:
    """The model over plain dense attention, which drafts behind a text from scratch."""

    def __init__(self, checkpoint: Path) -> None:
        self._config = ModelConfig.from_dir(checkpoint).with_draft()
        self._decoder = DsaDecoder(
            self._config, load_weights(checkpoint, self._config, torch.float32), None, torch.float32
        )
        self._draft = DraftLayer(self._decoder)

    def drafts(self, text: list[int], count: int) -> list[int]:
        """`count` guesses of what follows behind `text` and the model's next token, the last one of `text`."""
        backend, known = DenseBackend(self._config), len(text) - 1
        backend.begin([("only", known)])
        positions = torch.arange(known)
        hidden = self._decoder.hidden(torch.tensor(text[:known]), positions, backend)
        state = self._draft.hidden(hidden, torch.tensor(text[1:]), positions, backend)[-1:]
        drafts = [int(self._draft.guess(state))]
        while len(drafts) < count:
            backend.begin([("only", 1)])
            at = torch.tensor([known + len(drafts) - 1])
            state = self._draft.hidden(state, torch.tensor(drafts[-1:]), at, backend)
            drafts.append(int(self._draft.guess(state)))
        return drafts


@pytest.mark.parametrize("kind", ["often right", "random"])
def test_drafts_equal_a_dense_reference(tmp_path: Path, kind: str) -> None:
    """What is drafted from the hot buffer is what the draft layer guesses with all its rows at hand (C13)."""
    make = drafting_checkpoint if kind == "often right" else partial(random_checkpoint, num_nextn_predict_layers=1)
    checkpoint = make(tmp_path / "m", "glm_moe_dsa", seed=5)
    node, reference = node_of(checkpoint, tmp_path, 3, max_requests=2), Reference(checkpoint)
    drafted: list[tuple[list[int], tuple[int, ...]]] = []

    def keep_drafts(request_id: str, tokens: tuple[int, ...]) -> None:
        generated = [state.tokens for state in node.scheduler.running() if state.request.request_id == request_id]
        drafted.extend((sessions[request_id].prompt + tokens_so_far[:], tokens) for tokens_so_far in generated)
        draft(request_id, tokens)

    draft = node.scheduler.draft
    node.scheduler.draft = keep_drafts  # type: ignore[method-assign]
    sessions = {f"r{length}": node.start(f"r{length}", prompt_of(length), greedy(24)) for length in (70, 145)}
    node.finish(*sessions.values())
    assert {len(tokens) for _, tokens in drafted} == {0, 1, 2, 3}, "fewer drafts near the end"
    for text, tokens in drafted:
        assert list(tokens) == (reference.drafts(text, len(tokens)) if tokens else [])


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_acceptance_equals_that_without_offload(checkpoint: Path, tmp_path: Path, drafts: int) -> None:
    """Low acceptance is how wrong rows in the hot buffer first show (C13). A prompt decoded with the smallest hot
    buffer, past its size, and with one that holds all of the context: as many drafts, as many of them right."""
    family = json.loads((checkpoint / "config.json").read_text())["model_type"]
    length, tokens = (1 + drafts) * TOPK - 30, 320 if (family, drafts) == ("deepseek_v32", 3) else 90
    drafted, nodes = [], []
    for hot_tokens in ((1 + drafts) * TOPK, 10 * TOPK):
        node = node_of(checkpoint, tmp_path, drafts, hot_tokens=hot_tokens)
        session = node.start("r", prompt_of(length), greedy(tokens))
        node.finish(session)
        assert_tokens_match(session.tokens, Oracle(checkpoint).greedy(session.prompt, tokens))
        drafted.append((node.rank.counters.draft_tokens, node.rank.counters.accepted_tokens))
        nodes.append(node)
    assert drafted[0] == drafted[1]
    assert 0 < drafted[0][1] < drafted[0][0]
    assert nodes[0].backend.counters.misses > nodes[1].backend.counters.misses, "the small buffer never evicted"


@pytest.mark.parametrize("length", [20, 300])
def test_drafts_that_share_a_top_k_run_one_indexer_for_all(tmp_path: Path, length: int) -> None:
    """index_share_for_mtp_iteration: the same answer, from one selection of the draft layer per step.

    While all positions fit the top-k, sharing it makes no difference to the drafts.
    """
    counted: dict[bool, list[int]] = {}
    for shares in (False, True):
        options = {"index_share_for_mtp_iteration": shares}
        checkpoint = drafting_checkpoint(tmp_path / f"shares-{shares}", "glm_moe_dsa", seed=5, **options)
        node = node_of(checkpoint, tmp_path, 3)
        draft_layer = node.model.num_hidden_layers
        keys, selections = node.memory.indexers[draft_layer], 0
        select = keys.select

        def counting(*arguments: Any, select: Any = select) -> torch.Tensor:
            nonlocal selections
            selections += 1
            return select(*arguments)

        object.__setattr__(keys, "select", counting)
        session = node.start("r", prompt_of(length), greedy(40))
        node.finish(session)
        assert_tokens_match(session.tokens, Oracle(checkpoint).greedy(session.prompt, 40))
        counters = node.rank.counters
        assert counters.accepted_tokens > 0
        assert (selections <= counters.steps) == shares
        counted[shares] = [counters.draft_tokens, counters.accepted_tokens]
    if length + 40 < TOPK:
        assert counted[True] == counted[False]


def test_of_several_draft_layers_the_first_drafts_all(tmp_path: Path) -> None:
    """Further layers of a checkpoint are not loaded, and nothing is kept for them."""
    kept = drafting_checkpoint(tmp_path / "one", "glm_moe_dsa", seed=5)
    more = drafting_checkpoint(tmp_path / "two", "glm_moe_dsa", seed=5)
    config = json.loads((more / "config.json").read_text())
    config["num_nextn_predict_layers"] = 2
    (more / "config.json").write_text(json.dumps(config))
    answers = []
    for checkpoint in (kept, more):
        node = node_of(checkpoint, tmp_path, 2)
        session = node.start("r", prompt_of(90), greedy(30))
        node.finish(session)
        answers.append((session.tokens, node.rank.counters.accepted_tokens, node.geometry))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("drafts", [1, 3])
def test_output_does_not_depend_on_the_drafts(checkpoint: Path, tmp_path: Path, drafts: int) -> None:
    """Seeded sampling at several temperatures: the same tokens, and log-probabilities, with drafts and without."""
    sampling = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=seed, ignore_eos=True, logprobs=2, top_k=top_k)
        for temperature, seed, top_k in ((0.2, 5, 0), (0.7, 11, 0), (1.0, 3, 20), (0, None, 0))
    ]
    answers = {}
    for count in (0, drafts):
        node = node_of(checkpoint, tmp_path, count)
        sessions = [node.start(f"r{index}", prompt_of(90), how) for index, how in enumerate(sampling)]
        node.finish(*sessions)
        answers[count] = [session.tokens for session in sessions]
    assert node.rank.counters.accepted_tokens > 0
    assert answers[drafts] == answers[0]
    assert len({tuple(answer) for answer in answers[0]}) == len(sampling)


def test_wrong_drafts_are_cut_off_where_they_go_wrong() -> None:
    """Logits that name token 10 + i behind the i-th token, for drafts that are right for a while."""
    rows = [
        StepRow("a", 0, 1, (9, 10, 11, 99, 13), 50, 100, GREEDY),
        StepRow("b", 1, 2, (7,), 3, 100, GREEDY),
        StepRow("c", 2, 3, (7, 10), 3, 100, GREEDY),
        StepRow("d", 3, 4, (7, 10), 3, 100, GREEDY),
        StepRow("e", 4, 5, (7, 10, 11), 3, 100, GREEDY),
        StepRow("f", 5, 6, (7, 99), 3, 100, GREEDY),
    ]
    logits = torch.zeros(15, 120)
    for index, token in enumerate([10, 11, 12, 13, 14, 10, 10, 11, 10, 11, 10, 11, 12, 10, 11]):
        logits[index, token] = 1.0
    logits[[8, 12, 14]] = float("nan")
    a, b, c, d, e, f = verify(rows, logits)
    assert [token.token for token in a.tokens] == [10, 11, 12]
    assert [token.token for token in b.tokens] == [10]
    assert [token.token for token in c.tokens] == [10, 11]
    assert (a.confirmed, b.confirmed, c.confirmed) == (2, 0, 1)
    assert d.tokens == () and d.error == "request d: the model's logits are not finite numbers"
    assert [token.token for token in e.tokens] == [10, 11] and e.error.startswith("request e: ")
    assert [token.token for token in f.tokens] == [10] and not f.error, (
        "what lies behind a wrong draft is not looked at"
    )
    assert (d.confirmed, e.confirmed, f.confirmed) == (0, 2, 0)


def test_a_stop_token_among_right_drafts_is_the_last_one(checkpoint: Path, tmp_path: Path) -> None:
    """Tokens confirmed behind it in the same step are dropped, and everything is given back."""
    for drafts in (0, 3):
        node = node_of(checkpoint, tmp_path, drafts)
        whole = node.start("whole", prompt_of(80), greedy(30))
        node.finish(whole)
        stops = sorted(set(whole.tokens))
        sessions = [node.start(f"s{stop}", whole.prompt, replace(greedy(30), stop_token_ids=(stop,))) for stop in stops]
        node.finish(*sessions)
        for stop, session in zip(stops, sessions, strict=True):
            assert session.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
            assert session.ended is not None and session.ended.outcome is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 17])
def test_max_tokens_and_the_end_of_the_context_are_met_exactly(
    checkpoint: Path, tmp_path: Path, max_tokens: int
) -> None:
    """No draft reaches behind the blocks of a request that fills the longest context."""
    length = 160 - max_tokens
    node = node_of(checkpoint, tmp_path, 3, max_model_len=160)
    session = node.start("r", prompt_of(length), greedy(max_tokens))
    node.finish(session)
    assert_tokens_match(session.tokens, Oracle(checkpoint).greedy(session.prompt, max_tokens))
    assert session.ended is not None and session.ended.outcome is FinishReason.LENGTH


@pytest.mark.parametrize("drafts", [1, 3])
def test_a_step_writes_only_into_blocks_its_request_holds(checkpoint: Path, tmp_path: Path, drafts: int) -> None:
    """With so little memory that requests grow block by block and push each other out."""
    memory = {"host_pool_bytes": 24 * BLOCK * 5 * (48 + 16) * 4, "headroom_tokens": BLOCK}  # 24 blocks of five layers
    node, oracle = node_of(checkpoint, tmp_path, drafts, **memory), Oracle(checkpoint)
    begin = node.backend.begin

    def checked(rows: torch.Tensor, *arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        positions = begin(rows, *arguments, **named)
        step = node.backend._step
        assert step is not None
        counts = arguments[2] if len(arguments) > 2 else named.get("counts")
        ends = [0, *(torch.ones(len(rows)) if counts is None else counts).cumsum(0).int().tolist()]
        held = {
            state.row: node.scheduler._room._kv.blocks(state.request.request_id) for state in node.scheduler.running()
        }
        for index, row in enumerate(rows.tolist()):
            part = slice(ends[index], ends[index + 1])
            blocks = held[row]
            for slots, kind in ((step.host_slots, "main"), (step.index_slots, "indexer")):
                expected = [blocks[kind][position // BLOCK] for position in positions[part].tolist()]
                assert (slots[part] // BLOCK).tolist() == expected
        return positions

    node.backend.begin = checked  # type: ignore[method-assign]
    sessions = [node.start(f"r{length}", prompt_of(length), greedy(60)) for length in (15, 31, 79, 100, 17, 33)]
    node.finish(*sessions)
    assert node.scheduler.preemptions > 0
    for session in sessions:
        assert session.ended is not None
        if session.ended.outcome is not FinishReason.PREEMPTED:
            assert_tokens_match(session.tokens, oracle.greedy(session.prompt, 60))
        assert session.tokens == oracle.greedy(session.prompt, 60).tokens[: len(session.tokens)]


def test_requests_join_and_leave_a_drafting_batch(checkpoint: Path, tmp_path: Path) -> None:
    """More requests than hot rows, of many lengths and ends: each answer is the one it gets alone."""
    node, oracle = node_of(checkpoint, tmp_path, 2, max_requests=3), Oracle(checkpoint)
    wanted = {length: 5 + 7 * (index % 4) for index, length in enumerate((1, 2, *BORDERS))}
    sessions = {}
    for length, tokens in wanted.items():
        sessions[length] = node.start(f"r{length}", prompt_of(length), greedy(tokens))
        for _ in range(3):
            node.loop.turn(0.0)
    node.finish(*sessions.values())
    for length, session in sessions.items():
        assert_tokens_match(session.tokens, oracle.greedy(session.prompt, wanted[length]))


def test_drafts_that_are_never_right_cost_nothing_but_time(tmp_path: Path) -> None:
    """A random draft layer, index reuse, and an answer twice as long as the hot buffer."""
    kinds = ["full", "shared", "full", "shared"]
    options = {"indexer_types": kinds, "num_nextn_predict_layers": 1}
    checkpoint = random_checkpoint(tmp_path / "m", "glm_moe_dsa", seed=4, **options)
    node, oracle = node_of(checkpoint, tmp_path, 1), Oracle(checkpoint)
    session = node.start("r", prompt_of(33), greedy(4 * TOPK))
    node.finish(session)
    assert_tokens_match(session.tokens, oracle.greedy(session.prompt, 4 * TOPK))
    assert node.rank.counters.accepted_tokens < node.rank.counters.draft_tokens // 4
    assert node.backend.counters.misses > 0


def test_a_checkpoint_without_a_draft_layer_is_refused(tmp_path: Path) -> None:
    plain = random_checkpoint(tmp_path / "plain", "glm_moe_dsa")
    config = SluiceConfig.model_validate(
        {"model": {"path": str(plain)}, "decode": {"speculative_tokens": 2, "hot_tokens": 192}}
    )
    with pytest.raises(ConfigError, match=r"decode.speculative_tokens = 2: the checkpoint has no multi-token-pred"):
        served_model(config)
    (plain / "config.json").write_text(json.dumps(tiny_config("glm_moe_dsa", num_nextn_predict_layers=1)))
    model = served_model(config)  # config.json promises what the weights do not hold
    with pytest.raises(CheckpointError, match=r"decode.speculative_tokens: .*layers.4.eh_proj.weight is missing"):
        load_weights(plain, model, torch.float32)
    with pytest.raises(ConfigError, match=r"decode.hot_tokens = 128: .*1 \+ 2 \(decode.speculative_tokens\).*use 192"):
        small = {"model": {"path": str(plain)}, "decode": {"speculative_tokens": 2, "hot_tokens": 128}}
        check_against_model(SluiceConfig.model_validate(small), model)
    with pytest.raises(ValueError, match=r"decode.speculative_tokens = 13: .*kv.block_size = 8; legal: 0 to 7"):
        SluiceConfig.model_validate({**small, "decode": {"speculative_tokens": 13}, "kv": {"block_size": 8}})
