"""What a decode step moves from the host to the device, by three accounts that know nothing of each other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.device import Device
from engine.model.attention import IndexerQuery
from tests.checkpoints import drafting_checkpoint, random_checkpoint
from tests.decode_node.local_node import LocalNode
from tests.decode_node.test_decode_exact import greedy, prompt_of
from tests.oracle import Oracle, assert_tokens_match
from tests.transfer.hostcann_worker import Worker
from transfer import hostcann

TOPK, TOKENS = 64, 40
LENGTHS = (40, 150, 260)
REUSE = ["full", "shared", "full", "shared"]


class Accounts:
    """A node in device memory of the emulated driver, whose every attention is watched from outside.

    Rows of the host pool are all different. So a cache slot whose bytes changed has been written, and with nothing but
    fetches writing cache slots, the changed slots are the rows that arrived.
    """

    def __init__(self, node: LocalNode, root: Path) -> None:
        self._node, self._root = node, root
        self._attend = node.backend.attend
        node.backend.attend = self._watched  # type: ignore[method-assign]
        geometry = node.geometry
        self.row_bytes = (geometry.kv_lora_rank + geometry.rope_dim) * geometry.item_bytes
        self.passes: list[tuple[int, int, int]] = []
        """Per attention: bytes by the driver's counter, misses of the selection, cache slots whose bytes changed."""

    def _slots(self, layer: int) -> Tensor:
        hot = self._node.geometry.hot
        caches = self._node.memory.hot_ckv[layer], self._node.memory.hot_k_rope[layer]
        rows = torch.cat([cache.view(hot.rows, hot.stride, -1)[:, : hot.tokens] for cache in caches], -1)
        return rows.flatten(0, 1).view(torch.int32)

    def copied(self) -> int:
        """Bytes from host to device since the driver's start, by its own counter."""
        return hostcann.counters(self._root)[0].copied_bytes["h2d"]

    def _watched(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, indexer: IndexerQuery | None
    ) -> Tensor:
        counters, slots, copied = self._node.backend.counters, self._slots(layer), self.copied()
        misses = counters.misses
        out = self._attend(layer, q_nope, q_rope, ckv, k_rope, indexer)
        changed = int((self._slots(layer) != slots).any(-1).sum())
        self.passes.append((self.copied() - copied, counters.misses - misses, changed))
        return out


def check_copied_bytes(root: str, checkpoint: str, drafts: int, indexer_dtype: str, selection: str) -> list[list[int]]:
    """Runs in a process of its own, over the emulated driver; returns the answers."""
    device = Device(0)
    folder = Path(checkpoint).parent
    node = LocalNode(
        Path(checkpoint),
        folder,
        device=device,
        indexer_dtype=indexer_dtype,
        speculative_tokens=drafts,
        selection=selection,
        hot_tokens=(1 + drafts) * TOPK,
    )
    for cache in (*node.memory.hot_ckv, *node.memory.hot_k_rope):
        cache.fill_(float("nan"))
    accounts = Accounts(node, Path(root))
    before = accounts.copied()
    sessions = [node.start(f"r{length}", prompt_of(length), greedy(TOKENS)) for length in LENGTHS]
    node.finish(*sessions)
    assert len(accounts.passes) >= node.model.num_hidden_layers * node.rank.counters.steps
    for copied, misses, changed in accounts.passes:
        assert copied == misses * accounts.row_bytes
        if selection == "residency":  # LIM puts new rows of short requests into cache slots, too
            assert changed == misses
    counters = node.backend.counters
    assert accounts.copied() - before == counters.misses * accounts.row_bytes == counters.bytes_host_to_device
    assert counters.misses > 0 and counters.hits > 0
    if drafts:
        assert node.rank.counters.accepted_tokens > 0
    device.close()
    return [session.tokens for session in sessions]


@pytest.fixture(scope="module")
def driver() -> Iterator[tuple[Worker, Path]]:
    """A process over the emulated driver, and the driver's folder."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostcann-test-") as folder:
        root = Path(folder) / "root"
        with Worker(root, devices=1, hbm_bytes=512 << 20) as child:
            child.run("from tests.decode_node.test_copied_bytes import check_copied_bytes")
            yield child, root


@pytest.mark.parametrize(
    ("family", "drafts", "indexer_dtype", "reuse", "selection"),
    [
        ("deepseek_v32", 0, "model", False, "residency"),
        ("deepseek_v32", 1, "model", False, "residency"),
        ("glm_moe_dsa", 2, "model", True, "residency"),
        ("deepseek_v32", 3, "int8", False, "residency"),
        ("glm_moe_dsa", 3, "int8", True, "residency"),
        ("glm_moe_dsa", 0, "int8", True, "residency"),
        ("glm_moe_dsa", 2, "model", True, "lim"),
    ],
)
def test_bytes_copied_per_step_are_misses_times_row_bytes(
    driver: tuple[Worker, Path],
    tmp_path: Path,
    family: str,
    drafts: int,
    indexer_dtype: str,
    reuse: bool,
    selection: str,
) -> None:
    """By the driver's counter, the selection's misses, and the slots whose contents changed; in every attention."""
    make = drafting_checkpoint if drafts else random_checkpoint
    checkpoint = make(tmp_path / "m", family, seed=3, **({"indexer_types": REUSE} if reuse else {}))
    child, root = driver
    call = f"check_copied_bytes({str(root)!r}, {str(checkpoint)!r}, {drafts}, {indexer_dtype!r}, {selection!r})"
    answers = child.value(call, 120.0)
    if indexer_dtype == "model":
        for length, answer in zip(LENGTHS, answers, strict=True):
            assert_tokens_match(answer, Oracle(checkpoint).greedy(prompt_of(length), TOKENS))
