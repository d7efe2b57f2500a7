from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.ops import set_device, set_num_threads

SCRIPT = """
import os, threading
import torch
from engine.ops import lightning_indexer, set_num_threads
from tests.ops.paged_case import IndexerCase

set_num_threads(3)
case = IndexerCase.random([(60, 300)], heads=4, dims=16, block_size=8, dtype=torch.float32, seed=1)
expected = lightning_indexer(*case.args(), 32)
wrong = []

def call():
    for _ in range(20):
        if not torch.equal(lightning_indexer(*case.args(), 32), expected):
            wrong.append(1)

callers = [threading.Thread(target=call) for _ in range(4)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join(60)
assert not wrong and not any(caller.is_alive() for caller in callers)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(lightning_indexer(*case.args(), 32), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_the_pool_serves_concurrent_callers_and_survives_a_fork() -> None:
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120, cwd=root)


def test_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="count is 0; legal: 1 or more"):
        set_num_threads(0)
    with pytest.raises(ValueError, match="index is -1; legal: 0 or more"):
        set_device(-1)
