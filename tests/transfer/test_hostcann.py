"""The emulated driver by itself: shared memory, limits, counters, liveness, and what it does not emulate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.hostcann_worker import CHIP, Worker, WorkerError
from transfer import hostcann

MIB = 1 << 20
SETUP = "import ctypes; from transfer.hostcann import runtime; acl = ctypes.CDLL('libascendcl.so')"
WHEEL_SYMBOLS = re.compile(rb"^(?:acl|hal|drv|rt|Ra|ra_|Tsd|dcmi|Hccl|Hcomm|devmm_|svm_)[A-Za-z0-9_]+$")


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostcann-test-") as folder:
        yield Path(folder) / "root"


def worker(root: Path, *, hbm_bytes: int = 64 * MIB) -> Worker:
    child = Worker(root, devices=2, hbm_bytes=hbm_bytes)
    child.run(SETUP)
    return child


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_allocation_beyond_the_hbm_of_a_device_fails_over_all_processes(root: Path) -> None:
    with worker(root) as first, worker(root) as second:
        first.run(f"held = runtime.malloc(0, {40 * MIB})")
        with pytest.raises(WorkerError, match=rf"no room for {25 * MIB} bytes: {40 * MIB} of {64 * MIB}") as refused:
            second.run(f"runtime.malloc(0, {25 * MIB})")
        assert refused.value.kind == "DeviceOutOfMemory"
        second.run(f"runtime.malloc(1, {25 * MIB}); runtime.malloc(0, {24 * MIB})")
        assert [one.allocated_bytes for one in hostcann.counters(root)] == [64 * MIB, 25 * MIB]
        first.run("runtime.free(held)")
        state = hostcann.counters(root)[0]
        assert (state.allocated_bytes, state.peak_bytes, state.allocation_failures) == (24 * MIB, 64 * MIB, 1)


def test_bytes_are_counted_in_pages_not_in_huge_pages(root: Path) -> None:
    with worker(root) as child:
        assert child.value("runtime.malloc(0, 5000) % (2 << 20)") == 0
        state = hostcann.counters(root)[0]
        assert (state.allocated_bytes, state.allocations) == (8192, 1)


def test_a_process_that_ends_leaves_nothing_and_a_killed_one_only_until_the_sweep(root: Path) -> None:
    with worker(root) as ending, worker(root) as killed, worker(root) as living:
        for child in (ending, killed, living):
            child.run(f"p = runtime.malloc(0, {4 * MIB}); ctypes.memset(p, 1, {4 * MIB})")
        assert ending.end() == 0
        assert len(list((root / "processes").iterdir())) == 2
        killed.kill()
        assert hostcann.counters(root)[0].allocated_bytes == 4 * MIB, "memory of the dead is not in use"
        assert hostcann.sweep(root) >= 4 * MIB
        assert len(list((root / "processes").iterdir())) == 1
        assert living.value("ctypes.string_at(p, 2).hex()") == "0101"
        living.kill()
    assert hostcann.sweep(root, keep=True) >= 4 * MIB
    assert (root / "processes").is_dir(), "others may be starting there"
    hostcann.sweep(root)
    assert not root.exists()


def test_copies_are_counted_by_kind(root: Path) -> None:
    with worker(root) as child:
        child.run("a, b = runtime.malloc(0, 8192), runtime.malloc(0, 8192)")
        child.run("host = ctypes.create_string_buffer(b'x' * 4096); h = ctypes.addressof(host); void = ctypes.c_void_p")
        child.run("def copy(to, source, n): assert acl.aclrtMemcpy(void(to), n, void(source), n, 0) == 0")
        child.run("copy(a, h, 4096); copy(b, a, 1000); copy(h, b, 500); copy(h, h + 100, 50)")
        assert child.value("host.raw[:3].decode()") == "xxx"
        state = hostcann.counters(root)[0]
        assert state.copied_bytes == {"h2d": 4096, "d2d": 1000, "d2h": 500, "peer": 0}
        assert state.copies == {"h2d": 1, "d2d": 1, "d2h": 1, "peer": 0}
        child.run("lib = ctypes.CDLL('libhostcann.so'); assert lib.hostcann_count_copy(1, 0, ctypes.c_uint64(77)) == 0")
        assert child.value("lib.hostcann_count_copy(1, 9, ctypes.c_uint64(1))") != 0
        assert hostcann.counters(root)[1].copied_bytes["h2d"] == 77


def test_a_batch_counts_its_copies_and_ends_at_the_first_that_fails(root: Path) -> None:
    with worker(root) as child:
        child.run("a, host = runtime.malloc(0, 8192), ctypes.create_string_buffer(b'x' * 8192, 8192)")
        child.run("h, failed = ctypes.addressof(host), ctypes.c_size_t(99)")
        child.run("def sizes(*each): return (ctypes.c_size_t * 3)(*each)")
        child.run("def places(*each): return (ctypes.c_void_p * 3)(*each)")
        child.run(
            "def batch(to, room, source, n): return acl.aclrtMemcpyBatch("
            "to, room, source, n, ctypes.c_size_t(3), None, None, ctypes.c_size_t(0), ctypes.byref(failed))"
        )
        child.run("ctypes.memset(a, 0, 8192)")
        to, source = "places(a, a + 5000, h)", "places(h, h, a + 5000)"
        child.run(f"assert batch({to}, sizes(4096, 9, 9), {source}, sizes(4096, 3, 2)) == 0")
        assert child.value("ctypes.string_at(a + 5000, 4).hex(), failed.value") == ["78787800", 99]
        state = hostcann.counters(root)[0]
        assert state.copied_bytes == {"h2d": 4099, "d2d": 0, "d2h": 2, "peer": 0}
        assert state.copies == {"h2d": 2, "d2d": 0, "d2h": 1, "peer": 0}
        child.run("ctypes.memset(a, 0, 8192)")
        assert child.value(f"batch({to}, sizes(4096, 2, 9), {source}, sizes(4096, 3, 2))") != 0
        assert child.value("[failed.value, ctypes.string_at(a, 1).hex(), ctypes.string_at(a + 5000, 1).hex()]") == [
            1,
            "78",
            "00",
        ]


def test_copies_of_any_size_alignment_and_overlap_are_those_of_memmove(root: Path) -> None:
    """Large ones go past the caches, in steps; neither may miss a byte nor touch one beside."""
    with worker(root) as child:
        child.run(
            f"""
import random
size = {1 * MIB}
p = runtime.malloc(0, size)
rng = random.Random(1)
memory, wanted = (ctypes.c_ubyte * size).from_address(p), bytearray(rng.randbytes(size))
memory[:] = bytes(wanted)
edges = [0, 1, 63, 64, 127, 4095, 4096, 4097, 4096 + 128, 5119, 5120, 5121, 70001]
def copy(to, source, n):
    assert acl.aclrtMemcpy(ctypes.c_void_p(p + to), n, ctypes.c_void_p(p + source), n, 0) == 0
    wanted[to : to + n] = wanted[source : source + n]
for n in edges * 8:
    copy(rng.randrange(size // 2 - n), size // 2 + rng.randrange(size // 2 - n), n)
    start = rng.randrange(1000, size - n - 1000)
    copy(start + rng.randrange(-1000, 1000), start, n)
"""
        )
        assert child.value("bytes(memory) == bytes(wanted)")


def test_only_memory_of_the_device_allocator_is_device_memory(root: Path) -> None:
    with worker(root) as child:
        child.run("p = runtime.malloc(0, 4096); host = ctypes.create_string_buffer(4096)")
        child.run("hal = ctypes.CDLL('libascend_hal.so'); words = (ctypes.c_uint32 * 5)()")
        child.run("def kind(a): hal.drvMemGetAttribute(ctypes.c_uint64(a), words); return words[0]")
        child.run("is_device = ctypes.CDLL('libhostcann.so').hostcann_is_device")
        child.run("is_device.restype, is_device.argtypes = ctypes.c_bool, [ctypes.c_void_p]")
        assert child.value("[kind(p), kind(p + 4095), kind(ctypes.addressof(host))]") == [0x10, 0x10, 0x1]
        assert child.value("[is_device(p), is_device(ctypes.addressof(host))]") == [True, False]
        child.run("runtime.free(p)")
        assert child.value("[kind(p), is_device(p)]") == [0x1, False]


def test_a_forked_child_does_not_give_back_its_parents_memory(root: Path) -> None:
    with worker(root) as child:
        child.run("import os; p = runtime.malloc(0, 4096); ctypes.memset(p, 7, 4096)")
        child.run("pid = os.fork()\nif pid == 0:\n    import sys; runtime.malloc(0, 4096); sys.exit(0)")
        assert child.value("os.waitpid(pid, 0)[1]") == 0
        assert hostcann.counters(root)[0].allocated_bytes == 4096
        assert child.value("ctypes.string_at(p, 1)[0]") == 7


def test_unknown_devices_and_foreign_pointers_are_refused(root: Path) -> None:
    with worker(root) as child:
        with pytest.raises(WorkerError, match=r"device 2 cannot be used .* legal: 0\.\.1"):
            child.run("runtime.malloc(2, 10)")
        with pytest.raises(WorkerError, match="not allocated device memory"):
            child.run("runtime.free(runtime.malloc(0, 8192) + 4096)")


def test_a_root_made_for_another_machine_is_refused(root: Path) -> None:
    with worker(root, hbm_bytes=64 * MIB) as first, worker(root, hbm_bytes=32 * MIB) as second:
        first.run("runtime.malloc(0, 10)")
        with pytest.raises(WorkerError):
            second.run("runtime.malloc(0, 10)")


def test_every_symbol_the_wheels_look_up_exists_and_says_when_it_is_not_emulated(root: Path) -> None:
    wheel = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "memfabric_hybrid", "lib")
    strings = re.findall(rb"[\x20-\x7e]{4,}", (wheel / "libmf_hybm_core.so").read_bytes())
    wanted = sorted({text.decode() for text in strings if WHEEL_SYMBOLS.match(text)})
    assert len(wanted) > 150
    environment = {**os.environ, **hostcann.environment(root, CHIP, 1, MIB)}

    def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", f"import ctypes, sys; lib = ctypes.CDLL('libhccl.so'); {source}", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert run("print([name for name in sys.argv[1:] if not hasattr(lib, name)])", *wanted).stdout.strip() == "[]"
    called = run("print(lib.HcommReadNbi() != 0, lib.HcommReadNbi() != 0)")
    assert called.stdout.strip() == "True True"
    assert called.stderr.count("hostcann: HcommReadNbi is not emulated") == 1


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"devices: 0 is not in 1\.\.64"):
        hostcann.environment("/dev/shm/x", CHIP, 0, MIB)
    with pytest.raises(ValueError, match="hbm_bytes: -1 is not positive"):
        hostcann.environment("/dev/shm/x", CHIP, 1, -1)


def test_counters_and_sweep_of_a_root_that_does_not_exist(root: Path) -> None:
    assert hostcann.counters(root) == []
    assert hostcann.sweep(root) == 0
