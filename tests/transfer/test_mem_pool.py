"""The pool over the real wheel: an object's life, several members, killed ones, and a full pool."""

from __future__ import annotations

import signal
import tempfile

import pytest

from tests.transfer.hostcann_worker import Worker, WorkerError
from tests.transfer.pool_service import MIB, Service, pool_usage, started_service, used_within
from transfer import hostcann
from transfer.mem_pool import PoolError
from transfer.pool_monitor import PoolMonitor, PoolUsage


def test_an_object_is_saved_by_one_process_and_loaded_by_another(service: Service) -> None:
    with service.member(0) as writer, service.member(1) as reader:
        writer.wait()
        reader.wait()
        assert pool_usage(service.metrics) == PoolUsage(0, 128 * MIB)
        writer.run("a, b = pool.alloc(['a', 'b'], [1 << 20, 1 << 20], write_s=3)")
        writer.run("pool.save([a, a + 4096], [memory, memory + 8192], [4096, 100]); pool.save([b], [memory], [4096])")
        assert reader.value("pool.exists(['a', 'b'])") == [False, False], "visible before finish"
        assert reader.value("pool.lease(['a'], 1000)") == [None]
        writer.run("pool.finish(['a', 'b'])")
        assert reader.value("pool.exists(['a', 'b', 'c'])") == [True, True, False]
        reader.run("a, c, b = pool.lease(['a', 'c', 'b'], 3000)")
        assert reader.value("[c is None, a == b]") == [True, False]
        reader.run("pool.load([a, a + 4096], [memory, memory + 8192], [4096, 100])")
        assert reader.value("[byte(0), byte(4095), byte(4096), byte(8192), byte(8291), byte(8292)]") == [
            1,
            1,
            2,
            1,
            1,
            2,
        ]
        reader.run("pool.release(['a', 'b', 'c'])")
        assert reader.value("pool.remove(['a', 'b', 'c'])") == [True, True, False]
        assert used_within(service, 0, 5) == 0
        copied = hostcann.counters(service.root)
        assert (writer.end(), reader.end()) == (0, 0)
        assert copied[0].copied_bytes["d2h"] == 8292 and copied[1].copied_bytes["h2d"] == 4196


def test_an_allocation_is_all_or_nothing(service: Service) -> None:
    with service.member(0) as writer:
        writer.wait()
        writer.run("pool.alloc(['old'], [4096]); pool.finish(['old'])")
        with pytest.raises(WorkerError, match="already in the pool: old") as exists:
            writer.run("pool.alloc(['new', 'old'], [4096, 4096])")
        assert exists.value.kind == "PoolKeyExists"
        used = pool_usage(service.metrics).used_bytes
        with pytest.raises(WorkerError, match=r"no room in the pool for \d+ bytes of huge") as full:
            writer.run("pool.alloc(['small', 'huge'], [4096, 65 << 20], write_s=3)")
        assert full.value.kind == "PoolFull"
        assert used_within(service, used, 5) == used, "the small one was given back"


def test_aborted_objects_return_their_memory(service: Service) -> None:
    with service.member(0) as writer:
        writer.wait()
        writer.run("pool.alloc(['x', 'y'], [30 << 20, 30 << 20], write_s=3)")
        with pytest.raises(WorkerError, match="no room"):
            writer.run("pool.alloc(['z'], [30 << 20])")
        writer.run("pool.abort(['x', 'y', 'unknown'])")
        assert writer.value("pool.exists(['x', 'y'])") == [False, False]
        writer.run("pool.alloc(['x', 'z'], [30 << 20, 30 << 20], wait_s=8, write_s=3); pool.abort(['x', 'z'])")
        assert used_within(service, 0, 6) == 0


def test_a_removed_object_keeps_its_memory_no_longer_than_its_leases(service: Service) -> None:
    with service.member(0) as writer:
        writer.wait()
        writer.run("keys = [f'k{i}' for i in range(8)]")
        for _ in range(5):
            writer.run("pool.alloc(keys, [4096] * 8, write_s=2); pool.finish(keys); pool.lease(keys, 2000)")
            writer.run("pool.release(keys); pool.remove(keys)")
        assert used_within(service, 0, 4) == 0


def test_the_least_recently_used_objects_make_room_but_leased_ones_stay(service: Service) -> None:
    with service.member(0) as writer:
        writer.wait()
        writer.run("pool.alloc(['kept'], [4 << 20]); pool.finish(['kept']); pool.lease(['kept'], 60000)")
        for number in range(30):
            writer.run(f"pool.alloc(['k{number}'], [4 << 20], wait_s=10); pool.finish(['k{number}'])")
        assert writer.value("pool.exists(['kept', 'k0', 'k29'])") == [True, False, True]


def test_the_pool_lives_on_after_a_member_is_killed(service: Service) -> None:
    with service.member(0, dram_bytes=2 * MIB) as killed, service.member(1) as survivor:
        killed.wait()
        survivor.wait()
        survivor.run("a, = pool.alloc(['a'], [4 << 20]); pool.save([a], [memory], [4096]); pool.finish(['a'])")
        killed.kill()
        survivor.run("ctypes.memset(memory, 0, SIZE); pool.load([a], [memory], [4096])")
        assert survivor.value("[byte(0), pool.exists(['a'])]") == [2, [True]]
        survivor.run("before = time.monotonic(); pool.close()")
        assert survivor.value("time.monotonic() - before") < 7


def test_no_memory_stays_outside_the_root(service: Service) -> None:
    with service.member(0) as member:
        member.wait()
        assert list((service.root / "pool").glob("memfabric_hybrid_*"))
        assert (service.root / "pool" / "mmc_meta_service.lock").exists()
        member.kill()
    service.process.send_signal(signal.SIGTERM)
    service.process.wait(15)
    hostcann.sweep(service.root)
    assert not service.root.exists()


def test_joining_needs_the_meta_service() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostcann-test-") as folder, Worker(folder) as child:
        child.run("from transfer.mem_pool import MemPool")
        with pytest.raises(WorkerError, match="is its meta service running"):
            child.run(
                "MemPool(meta_url='tcp://127.0.0.1:59999', config_store_url='tcp://127.0.0.1:59998', device_id=0, "
                "dram_bytes=1 << 21, world_size=2)"
            )
    with pytest.raises(PoolError, match="does not answer"):
        pool_usage("http://127.0.0.1:59999")


def test_a_service_that_was_replaced_between_two_questions_is_noticed() -> None:
    """Both listen at the same port, and the second one has nothing that would tell it from the first."""
    with started_service() as first:
        monitor = PoolMonitor(first.metrics, deadline_s=20)
        for _ in range(2):
            assert monitor.usage() == PoolUsage(0, 0)
        assert monitor.restarts == 0
    with pytest.raises(PoolError, match="does not answer"):
        monitor.usage()
    assert monitor.restarts == 1
    with started_service(first) as second:
        assert (second.metrics, monitor.usage(), monitor.restarts) == (first.metrics, PoolUsage(0, 0), 1)
    with started_service(first):
        assert (monitor.usage(), monitor.restarts) == (PoolUsage(0, 0), 2)
    monitor.close()
