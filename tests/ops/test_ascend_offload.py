"""Copies between host pool and device by the real MemFabric wheel over the emulated driver, in a child process."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ops.ascend_case import LATENT, ROPE
from tests.transfer.hostcann_worker import Worker, WorkerError
from transfer import hostcann

DEVICE = 1
SETUP = """
import math
import os
import torch
from engine.device import Device
from engine.ops import ascend_offload, fused_scatter_copy_sparse_flash_attention, set_device
from engine.ops.ascend_copy_sfa import copy_then_attend
from tests.ops import ascend_emulation
from tests.ops.ascend_case import DecodeCase, with_clones
from transfer import hostcann
from transfer.host_pool import HostPool
def copied_to_device():
    return hostcann.counters(os.environ["HOSTCANN_ROOT"])[{device}].copied_bytes["h2d"]
set_device({device})
device = Device({device})
pool = HostPool.create(rank=0, world_size=1, nbytes=64 << 20, store_url={url!r}, device_id={device})
used = 0
def in_pool(shape):
    global used
    start, used = used, used + 2 * math.prod(shape)
    return pool.tensor(start, shape, torch.bfloat16)
def on_device(shape):
    return device.empty(shape, torch.bfloat16)
"""


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostcann-test-") as folder:
        yield Path(folder) / "root"


@pytest.fixture
def worker(root: Path) -> Iterator[Worker]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with Worker(root, devices=2) as child:
        child.run(SETUP.format(device=DEVICE, url=url))
        yield child


def test_the_unfused_route_copies_misses_and_attends_exactly(worker: Worker) -> None:
    """Three decode steps; host-to-device bytes are those of the misses, to the byte."""
    worker.run("ascend_emulation.install()")
    worker.run("case = DecodeCase.random(8, host=in_pool, device=on_device)")
    worker.run(
        f"""
reported, missed = torch.zeros(1, dtype=torch.int64), []
for arguments in case.steps(3):
    ours = with_clones(arguments)
    fused_scatter_copy_sparse_flash_attention(**ours)
    before = copied_to_device()
    copy_then_attend(**arguments, copied_bytes=reported)
    torch.testing.assert_close(arguments["attention_out"], ours["attention_out"], atol=2e-2, rtol=2e-2)
    for cache in ("hbm_k_rope", "hbm_kv_cache"):
        assert torch.equal(arguments[cache].view(torch.int16), ours[cache].view(torch.int16))
    missed.append(int(arguments["miss_counts"].sum()))
    assert copied_to_device() - before == int(reported) == missed[-1] * {2 * (LATENT + ROPE)}
"""
    )
    first, *later = worker.value("missed")
    assert first > 2047 and all(0 < misses < 2047 for misses in later)


def test_new_rows_reach_the_host_pool(worker: Worker, root: Path) -> None:
    """A row without a slot is not written."""
    worker.run(
        """
rows, cache = on_device((3, 64)), in_pool((2, 128, 64))
rows.copy_(torch.arange(192.0).view(3, 64)), cache.zero_()
copies = ascend_offload.new_row_copies(rows, torch.tensor([200, -1, 5]), cache)
ascend_offload.sparse_copy(copies, torch.device("cpu"))
flat = cache.view(256, 64)
assert torch.equal(flat[200], rows[0]) and torch.equal(flat[5], rows[2])
assert flat.any(-1).sum() == 2
"""
    )
    assert hostcann.counters(root)[DEVICE].copied_bytes["d2h"] == 2 * 64 * 2


def test_a_copy_without_a_pool_is_an_error(worker: Worker) -> None:
    worker.run(
        """
rows, cache = on_device((1, 64)), torch.zeros(1, 128, 64).bfloat16()
copies = ascend_offload.new_row_copies(rows, torch.tensor([0]), cache)
pool.close()
"""
    )
    with pytest.raises(WorkerError, match=r"offload.sparse_copy of 1 ranges failed on cpu:1 with code -1") as caught:
        worker.run("ascend_offload.sparse_copy(copies, torch.device('cpu'))")
    assert caught.value.kind == "AscendOperatorError"
