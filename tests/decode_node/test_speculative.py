"""Speculative decoding changes how many steps an answer takes, never the answer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from decode_node.commands import StepRow
from decode_node.finish import FinishReason
from decode_node.verify import verify
from engine.model.config import ModelConfig
from engine.model.decoder import DsaDecoder
from engine.model.draft import DraftLayer
from engine.model.loader import load_weights
from engine.sampling_params import SamplingParams
from tests.checkpoints import drafting_checkpoint, random_checkpoint
from tests.decode_node.local_node import LocalNode, Session
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


def node_of(checkpoint: Path, run_dir: Path, drafts: int, **options: int) -> LocalNode:
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
