"""A short seed of chaos, and that chaos would notice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from sluice.v1 import wire_pb2

from engine.config import FaultsSection
from tests.chaos.__main__ import FAULTS
from tests.chaos.faults import injected_faults, of_messages
from tests.chaos.questions import Question, passkey_questions
from tests.chaos.run import run
from tests.checkpoints import PASSKEY_GLM
from tests.oracle import MIN_GAP, OracleResult
from transfer.faults import FaultyOutlet

SEED, SECONDS = 11, 15.0
QUESTIONS = 8


@pytest.mark.cluster
def test_a_short_seed_of_chaos_ends_without_violation(tmp_path: Path) -> None:
    """`make chaos` runs longer ones."""
    outcome = run(SEED, SECONDS, passkey_questions(PASSKEY_GLM)[:QUESTIONS], FAULTS, tmp_path / "events.log")
    assert not outcome.failed, "\n".join([*outcome.record.violations, "--- events ---", *outcome.record.events])
    assert outcome.record.counts["right"] >= QUESTIONS


def test_a_wrong_token_is_a_mistake_unless_the_oracle_is_not_sure_either() -> None:
    question = Question("q", [1], 3, OracleResult([5, 6, 7], [1.0, MIN_GAP / 2, 1.0]))
    assert question.mistake([5, 6, 7], whole=True) is None
    assert question.mistake([5], whole=False) is None
    assert question.mistake([5], whole=True) == "q: 1 tokens, not 3"
    assert question.mistake([4, 6, 7], whole=True) == "q: token 0 is 4, not 5"
    assert question.mistake([5, 9, 9], whole=True) is None


def test_injected_faults_are_counted_over_all_lives_of_a_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every line that `injected` writes counts, and no error that only names a knob."""
    out = FaultyOutlet(lambda: None, FaultsSection(message_drop=1), random.Random(1))
    for sequence in range(3):
        out.send(None, wire_pb2.ReadDone(sequence=sequence))  # type: ignore[arg-type]
    lines = [f"2026-01-01 00:00:00,000 w {each.levelname} {each.name}: {each.message}" for each in caplog.records]
    lines += ["2026-01-01 00:00:00,000 w WARNING decode_node.x: faults.read_failure: failed", "nonsense"]
    (tmp_path / "decode-0.dp0.tp0.log").write_text("\n".join(lines))
    (tmp_path / "quiet.log").write_text("nothing")
    faults = injected_faults(tmp_path)
    assert faults == {"decode-0.dp0.tp0": {"message_drop": 3}} and of_messages(faults) == 3
