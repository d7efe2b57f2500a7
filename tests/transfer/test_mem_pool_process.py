"""The pool through a client in a process of its own, over the real wheel."""

from __future__ import annotations

import psutil
import pytest

from tests.transfer.hostcann_worker import Worker, WorkerError
from tests.transfer.pool_service import DEVICES, HBM_BYTES, Service


def worker_of(service: Service, call_s: float) -> Worker:
    """A process with 8 MiB of device memory, and a pool client in a process of its own that has the same memory."""
    worker = Worker(service.root, devices=DEVICES, hbm_bytes=HBM_BYTES)
    worker.run(
        f"""
import ctypes, os, signal, threading, time
from transfer.hostcann import runtime
from transfer.mem_pool_process import PoolProcess
SIZE = 8 << 20
memory = runtime.malloc(0, SIZE)
ctypes.memset(memory, 1, SIZE)
options = dict(meta_url={service.meta!r}, config_store_url={service.config_store!r}, device_id=0,
               dram_bytes=64 << 20, world_size=8, protocol="host_shm", timeout_s=5)
def join(): return PoolProcess(options, [(memory, SIZE)], call_s={call_s})
pool = join()
def byte(at): return ctypes.string_at(memory + at, 1)[0]
"""
    )
    return worker


def test_a_pool_client_in_another_process_copies_this_ones_device_memory(service: Service) -> None:
    with worker_of(service, call_s=20) as worker:
        worker.run("a, = pool.alloc(['a'], [4096]); pool.save([a], [memory + 8192], [4096]); pool.finish(['a'])")
        worker.run("ctypes.memset(memory, 2, SIZE); pool.lease(['a'], 3000)")
        worker.run("pool.load([a], [memory + 4096], [4000])")
        assert worker.value("[byte(4095), byte(4096), byte(8095), byte(8096)]") == [2, 1, 1, 2]
        with pytest.raises(WorkerError, match="already in the pool: a") as exists:
            worker.run("pool.alloc(['a'], [4096])")
        assert exists.value.kind == "PoolKeyExists"
        with pytest.raises(WorkerError, match="2 keys for 1 sizes") as wrong:
            worker.run("pool.alloc(['b', 'c'], [4096])")
        assert wrong.value.kind == "ValueError"
        worker.run("client = pool.pid; pool.close(); pool.close()")
        assert not psutil.pid_exists(worker.value("client"))


def test_a_call_that_hangs_ends_its_process_and_nothing_is_copied_later(service: Service) -> None:
    with worker_of(service, call_s=5) as worker:
        worker.run("a, = pool.alloc(['a'], [SIZE]); pool.finish(['a'])")
        worker.run("client = pool.pid; os.kill(client, signal.SIGSTOP)")  # as if it hung
        with pytest.raises(WorkerError, match="load: the pool did not answer in time; its client was ended") as lost:
            worker.run("pool.load([a], [memory], [SIZE])")
        assert lost.value.kind == "PoolLost"
        assert not psutil.pid_exists(worker.value("client")), "it might copy at any time"
        with pytest.raises(WorkerError, match="exists: the pool's client has ended with status -9"):
            worker.run("pool.exists(['a'])")
        worker.run("pool.close()")
        with pytest.raises(WorkerError, match="the pool's client has ended"):
            worker.run("pool.exists(['a'])")


def test_a_long_call_to_a_client_that_hangs_ends_too(service: Service) -> None:
    """It has more to say than the pipe can hold."""
    with worker_of(service, call_s=2) as worker:
        worker.run("os.kill(pool.pid, signal.SIGSTOP)")
        with pytest.raises(WorkerError, match="load: the pool did not answer in time; its client was ended"):
            worker.run("pool.load([1] * 100_000, [memory] * 100_000, [16] * 100_000)")
        assert "ended with status -9" in worker.value("pool.ended()")
        worker.run("pool.close()")


def test_an_idle_client_that_hangs_is_ended(service: Service) -> None:
    """One that answers, or is busy for longer than that, is left alone."""
    with worker_of(service, call_s=20) as worker:
        worker.run("client = pool.pid; began = time.monotonic(); pool.probe()")
        assert worker.value("time.monotonic() - began") < 2
        assert worker.value("pool.ended()") == ""
        worker.run("slow = threading.Thread(target=lambda: pool.alloc(['a'], [100 << 20], wait_s=7)); slow.start()")
        worker.run("os.kill(client, signal.SIGSTOP); time.sleep(0.2); began = time.monotonic(); pool.probe()")
        assert worker.value("time.monotonic() - began") < 2
        worker.run("os.kill(client, signal.SIGCONT); slow.join()")
        assert worker.value("pool.ended()") == ""
        worker.run("os.kill(client, signal.SIGSTOP); time.sleep(0.2); began = time.monotonic(); pool.probe()")
        assert 4 < worker.value("time.monotonic() - began") < 8
        assert "ended with status -9" in worker.value("pool.ended()")
        worker.run("pool.close()")


def test_what_a_killed_client_had_of_the_driver_is_removed(service: Service) -> None:
    with worker_of(service, call_s=20) as worker:
        processes = service.root / "processes"
        before = set(processes.iterdir())
        worker.run("os.kill(pool.pid, signal.SIGKILL); pool.close()")
        assert len(before - set(processes.iterdir())) == 1
        assert worker.value("byte(0)") == 1


def test_a_client_does_not_outlive_its_worker(service: Service) -> None:
    with worker_of(service, call_s=20) as worker:
        client = psutil.Process(worker.value("pool.pid"))
        client.suspend()  # hangs, as it were
        worker.kill()
        client.wait(10)


def test_a_pool_that_cannot_be_joined_leaves_no_process(service: Service) -> None:
    with worker_of(service, call_s=20) as worker:
        worker.run("pool.close(); options['meta_url'] = 'tcp://127.0.0.1:9'")
        with pytest.raises(WorkerError, match=r"the pool cannot be joined: .*127\.0\.0\.1:9") as refused:
            worker.run("join()")
        assert refused.value.kind == "PoolError"
        assert psutil.Process(worker.process.pid).children() == []
