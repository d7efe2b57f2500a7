"""The host pool shared by TP ranks: same address, same bytes, a legal destination of device reads."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.hostcann_worker import Worker, WorkerError
from transfer.host_pool import HostPool

MIB = 1 << 20
NBYTES = 16 * MIB


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostcann-test-") as folder:
        yield Path(folder) / "root"


def free_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def pool_of_two(root: Path) -> tuple[Worker, Worker]:
    """Two ranks that share a pool; rank 0's address reaches rank 1 through a file."""
    url, message = free_url(), root.parent / "address"
    ranks = (Worker(root), Worker(root))
    for rank, child in enumerate(ranks):
        child.start(
            f"""
import ctypes, pathlib, time, torch
from transfer.host_pool import HostPool
def broadcast(value):
    path = pathlib.Path({str(message)!r})
    if {rank} == 0:
        path.with_suffix(".new").write_text(str(value))
        path.with_suffix(".new").rename(path)
        return value
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())
ranks = dict(rank={rank}, world_size=2, device_id={2 + rank}, broadcast=broadcast)
pool = HostPool.create(**ranks, nbytes={NBYTES}, store_url={url!r})
rows = pool.tensor(4096, (4, 8), torch.bfloat16)
"""
        )
    for child in ranks:
        child.wait()
    return ranks


def test_ranks_see_the_same_bytes_at_the_same_address(root: Path) -> None:
    first, second = pool_of_two(root)
    with first, second:
        assert first.value("pool.address") == second.value("pool.address")
        first.run("rows[:] = torch.arange(32).reshape(4, 8)")
        assert second.value("rows.sum().item()") == 496
        second.run("rows[3] = -1")
        assert first.value("rows[3].tolist()") == [-1.0] * 8
        second.run("pool.close()")
        first.run("pool.close()")
        assert [first.end(), second.end()] == [0, 0]
    assert not list((root / "processes").iterdir())


def test_devices_read_into_the_pool_and_kernels_copy_within_it(root: Path) -> None:
    first, second = pool_of_two(root)
    with first, second, Worker(root) as source:
        source.run(
            """
import ctypes
from transfer.hostcann import runtime
from transfer.memfabric import MemFabricEngine
memory = runtime.malloc(0, 1 << 20)
ctypes.memset(memory, 0x40, 1 << 20)
where = dict(host="127.0.0.1", device_id=0, store_url="tcp://127.0.0.1:1")
engine = MemFabricEngine(**where, role="prefill", protocol="sdma")
engine.register(memory, 1 << 20)
"""
        )
        session, remote = source.value("engine.session_id"), source.value("memory")
        for rank, child in enumerate((first, second)):
            child.run(
                f"""
from transfer.memfabric import Copies, MemFabricEngine
where = dict(host="127.0.0.1", device_id={2 + rank}, store_url="tcp://127.0.0.1:1")
engine = MemFabricEngine(**where, role="decode", protocol="sdma")
engine.register(pool.address, pool.nbytes)
engine.read("{session}", Copies([pool.address + {4096 + rank * 32}], [{remote}], [32]), deadline_s=20)
"""
            )
        assert first.value("rows[:, 0].tolist()") == [3.0, 3.0, 3.0, 3.0], "0x4040 is 3 in bfloat16"
        first.run(
            """
from memfabric_hybrid import offload
def word(value): return torch.tensor([value], dtype=torch.uint64)
def count(value): return torch.tensor([value], dtype=torch.uint32)
source, target = word(pool.address + 4096), word(pool.address + 8192)
assert offload.sparse_copy(source, target, count(10), count(1), torch.device("cpu", 0)) == 0
"""
        )
        assert second.value("pool.tensor(8192, (12,), torch.uint8).tolist()") == [0x40] * 10 + [0] * 2


def test_a_tensor_stays_inside_the_pool(root: Path) -> None:
    with Worker(root) as child:
        child.run("import torch; from transfer.host_pool import HostPool")
        child.run(f"pool = HostPool.create(rank=0, world_size=1, nbytes=4096, store_url={free_url()!r}, device_id=0)")
        assert child.value("pool.tensor(0, (1024,), torch.float32).shape[0]") == 1024
        for arguments in ("0, (1025,), torch.float32", "-4, (1,), torch.float32", "4096, (1,), torch.uint8"):
            with pytest.raises(WorkerError, match="does not lie in the host pool of 4096 bytes"):
                child.run(f"pool.tensor({arguments})")
        child.run("pool.close(); pool.close()")
        with pytest.raises(WorkerError, match="closed"):
            child.run("pool.tensor(0, (1,), torch.uint8)")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 2}, r"rank: 2 is not in 0\.\.1"),
        ({"nbytes": 0}, "nbytes: 0 is not positive"),
        ({}, "broadcast: needed when 2 ranks share the pool"),
    ],
)
def test_arguments_are_checked(changed: dict[str, int], message: str) -> None:
    arguments = {"rank": 0, "world_size": 2, "nbytes": 4096, "device_id": 0, **changed}
    with pytest.raises(ValueError, match=message):
        HostPool.create(store_url="tcp://127.0.0.1:1", **arguments)
