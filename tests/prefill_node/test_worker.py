"""The engine thread of a prefill worker."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest

from engine.config import build_config
from prefill_node import worker as module
from prefill_node.worker import PrefillWorker


def test_a_failure_is_told_before_anything_that_may_hang_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a rank that has failed would sit there, silent, until a peer or the pool lets it go."""
    closed, left, failures = threading.Event(), threading.Event(), queue.SimpleQueue()

    def assemble(plan, stack, farewell, progress):
        stack.callback(closed.wait, 10)
        farewell.callback(left.set)
        raise RuntimeError("the pool did not answer")

    monkeypatch.setattr(module, "assemble", assemble)
    config = build_config({"model": {"path": "unused"}})
    plan = SimpleNamespace(
        info=SimpleNamespace(tp_rank=1, layout=None), config=config, model=SimpleNamespace(vocab_size=8)
    )
    worker = PrefillWorker(plan)
    worker.start(on_ready=lambda: failures.put("ready"), on_failure=failures.put)
    assert failures.get(timeout=5) == "RuntimeError: the pool did not answer"
    assert not worker.stop(timeout_s=0.05), "it is still closing"
    closed.set()
    assert worker.stop(timeout_s=5) and not left.is_set()
    worker.leave_pool()
    assert left.is_set()
    assert failures.empty(), "told once"
