"""The transfer engine over the real wheel: reads between processes, several of each role, deadlines, lost peers."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.hostcann_worker import Worker, WorkerError
from transfer import hostcann
from transfer.memfabric import Copies, MemFabricEngine, coalesce, parse_protocol

MIB = 1 << 20
SIZE = 8 * MIB


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostcann-test-") as folder:
        yield Path(folder) / "root"


def engine(root: Path, role: str, device: int, fill: int, *, offset: int = 0) -> Worker:
    """A worker with an engine and SIZE bytes of device memory holding `fill`, registered from `offset` on."""
    child = Worker(root)
    child.start(
        f"""
import ctypes, threading, time
from transfer.hostcann import runtime
from transfer.memfabric import Copies, MemFabricEngine, TransferError
memory = runtime.malloc({device}, {SIZE})
ctypes.memset(memory, {fill}, {SIZE})
where = dict(host="127.0.0.1", device_id={device}, store_url="tcp://127.0.0.1:1")
engine = MemFabricEngine(**where, role="{role}", protocol="sdma")
engine.register(memory + {offset}, {SIZE} - {2 * offset})
def byte(at): return ctypes.string_at(memory + at, 1)[0]
def read(session, remote, size, count=1, gap=0, deadline_s=20.0):
    steps = [i * (size + gap) for i in range(count)]
    local, there = [memory + s for s in steps], [remote + s for s in steps]
    stats = engine.read(session, Copies(local, there, [size] * count), deadline_s=deadline_s)
    return [stats.bytes, stats.descriptors_before, stats.descriptors_after]
"""
    )
    return child


def address_of(source: Worker) -> tuple[str, int]:
    return source.value("engine.session_id"), source.value("memory")


def test_engines_start_in_any_order_and_all_pairs_read(root: Path) -> None:
    with (
        engine(root, "decode", 2, 0) as reader,
        engine(root, "prefill", 0, 5) as first,
        engine(root, "decode", 3, 0) as other_reader,
        engine(root, "prefill", 1, 9) as second,
    ):
        everyone = (reader, first, other_reader, second)
        for child in everyone:
            child.wait()
        for child in (reader, other_reader):
            for source, fill in ((first, 5), (second, 9)):
                session, memory = address_of(source)
                assert child.value(f"read('{session}', {memory}, {SIZE})") == [SIZE, 1, 1]
                assert child.value(f"[byte(0), byte({SIZE - 1})]") == [fill, fill]
        assert sum(one.copied_bytes["peer"] for one in hostcann.counters(root)) == 4 * SIZE


def test_scattered_rows_land_where_they_belong_and_neighbours_are_merged(root: Path) -> None:
    with engine(root, "prefill", 0, 7, offset=4096) as source, engine(root, "decode", 1, 1, offset=4096) as reader:
        source.wait()
        reader.wait()
        session, memory = address_of(source)
        reader.run("memory += 4096")
        assert reader.value(f"read('{session}', {memory} + 4096, 1152, 1000, 16)") == [1_152_000, 1000, 1000]
        assert reader.value("[byte(0), byte(1151), byte(1152), byte(1167), byte(1168)]") == [7, 7, 1, 1, 7]
        assert reader.value(f"read('{session}', {memory} + 4096, 1024, 64)") == [65536, 64, 1]


def test_a_read_from_a_killed_peer_fails_and_a_restarted_peer_is_read_again(root: Path) -> None:
    with (
        engine(root, "prefill", 0, 5) as source,
        engine(root, "prefill", 1, 6) as other,
        engine(root, "decode", 2, 0) as reader,
    ):
        for child in (source, other, reader):
            child.wait()
        session, memory = address_of(source)
        reader.run(f"read('{session}', {memory}, 4096)")
        source.kill()
        before = time.monotonic()
        with pytest.raises(WorkerError, match=f"read of 4096 bytes from {session}"):
            reader.run(f"read('{session}', {memory}, 4096, deadline_s=2.0)")
        assert time.monotonic() - before < 4
        session, memory = address_of(other)
        assert reader.value(f"read('{session}', {memory}, 4096)") == [4096, 1, 1]
        with engine(root, "prefill", 0, 8) as restarted:
            restarted.wait()
            session, memory = address_of(restarted)
            reader.run(f"engine.warm('{session}', memory, {memory})")
            reader.run(f"read('{session}', {memory}, 4096)")
            assert reader.value("byte(4095)") == 8


def test_a_session_that_nobody_serves_fails_at_once_and_a_silent_one_at_its_deadline(root: Path) -> None:
    with (
        engine(root, "prefill", 0, 5) as source,
        engine(root, "decode", 1, 0) as reader,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        source.wait()
        reader.wait()
        session, memory = address_of(source)
        reader.run(f"engine.warm('{session}', memory, {memory})")
        before = time.monotonic()
        with pytest.raises(WorkerError, match=r"nobody answers at 127\.0\.0\.1:1:"):
            reader.run("read('127.0.0.1:1', memory, 4096, deadline_s=20.0)")
        hanging = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(WorkerError, match=r"did not end within 0\.5 s") as late:
            reader.run(f"read('{hanging}', memory, 4096, deadline_s=0.5)")
        assert late.value.kind == "TransferTimeout"
        with pytest.raises(WorkerError, match="the session is broken"):
            reader.run(f"read('{hanging}', memory, 4096, deadline_s=20.0)")
        assert reader.value(f"read('{session}', {memory}, 4096, deadline_s=5.0)") == [4096, 1, 1]
        assert time.monotonic() - before < 5, "a link that is open does not wait for the session that hangs"
        reader.run("engine.close()")
        with pytest.raises(WorkerError, match="closed"):
            reader.run(f"read('{session}', {memory}, 4096)")


def test_a_read_goes_on_when_its_session_is_forgotten(root: Path) -> None:
    """As when a peer connects anew while a read over its former connection hangs: that one may write all the same."""
    with engine(root, "decode", 0, 0) as reader, socket.create_server(("127.0.0.1", 0)) as silent:
        reader.wait()
        hanging = f"127.0.0.1:{silent.getsockname()[1]}"
        reader.run(
            f"""
import threading
late = []
def attempt():
    try:
        read('{hanging}', memory, 4096, deadline_s=1.5)
    except TransferError as error:
        late.append(type(error).__name__)
given_up = threading.Thread(target=attempt)
given_up.start()
time.sleep(0.2)"""
        )
        assert reader.value(f"engine.idle('{hanging}')") is True
        reader.run(f"engine.forget('{hanging}'); given_up.join()")
        assert reader.value("late") == ["TransferTimeout"]
        assert reader.value(f"engine.idle('{hanging}')") is False
        silent.close()  # which ends it


def test_open_links_go_on_while_a_link_to_a_stopped_peer_is_opening(root: Path) -> None:
    """The wheel opens links one by one, in whatever thread: others cannot be opened until the stopped peer goes on."""
    with (
        engine(root, "decode", 3, 0) as reader,
        engine(root, "prefill", 0, 5) as stopped,
        engine(root, "prefill", 1, 6) as known,
        engine(root, "prefill", 2, 7) as new,
    ):
        for child in (reader, stopped, known, new):
            child.wait()
        (known_session, known_memory), (new_session, new_memory) = address_of(known), address_of(new)
        session, memory = address_of(stopped)
        assert reader.value(f"read('{known_session}', {known_memory}, {SIZE})") == [SIZE, 1, 1]
        os.kill(stopped.process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match="did not end within"):
            reader.run(f"read('{session}', {memory}, 1, deadline_s=1.0)")
        assert not reader.value(f"engine.idle('{session}')")
        assert reader.value(f"read('{known_session}', {known_memory}, {SIZE})") == [SIZE, 1, 1]
        assert reader.value(f"byte({SIZE - 1})") == 6
        os.kill(stopped.process.pid, signal.SIGCONT)
        assert reader.value(f"read('{new_session}', {new_memory}, {SIZE})") == [SIZE, 1, 1]
        assert reader.value("byte(0)") == 7


def test_what_is_read_then_is_not_in_the_statistics_but_arrives(root: Path) -> None:
    with engine(root, "decode", 1, 0) as reader, engine(root, "prefill", 0, 5) as source:
        reader.wait(), source.wait()
        session, there = address_of(source)
        reader.run(f"first, second = Copies([memory], [{there}], [8]), Copies([memory + 64], [{there + 64}], [8])")
        assert reader.value(f"engine.read('{session}', first, deadline_s=20.0, then=second).bytes") == 8
        assert reader.value("[byte(at) for at in (0, 7, 8, 63, 64, 71, 72)]") == [5, 5, 0, 0, 5, 5, 0]


def test_a_read_is_over_when_its_caller_hears_of_what_failed_meanwhile(root: Path) -> None:
    """What the caller does meanwhile is told when the bytes have landed, and makes no read late that was not."""
    with engine(root, "decode", 1, 0) as reader, engine(root, "prefill", 0, 5) as source:
        reader.wait(), source.wait()
        session, there = address_of(source)
        reader.run(f"engine.warm('{session}', memory, {there})")
        reader.run(
            """
from transfer.memfabric import Meanwhile
over, ended = [], threading.Event()
def landed():
    over.append(True)
    ended.set()
def wait(deadline):
    over.append(ended.wait(deadline - time.monotonic()))
def fail(deadline):
    raise KeyError('meanwhile')
"""
        )
        one = f"'{session}', Copies([memory], [{there}], [{SIZE}])"
        with pytest.raises(WorkerError, match="meanwhile"):
            reader.run(f"engine.read({one}, deadline_s=20.0, meanwhile=Meanwhile(fail, landed))")
        assert reader.value(f"[engine.idle('{session}'), byte({SIZE - 1})]") == [True, 5]
        reader.run("ended.clear(), over.clear()")
        assert reader.value(f"engine.read({one}, deadline_s=20.0, meanwhile=Meanwhile(wait, landed)).bytes") == SIZE
        assert reader.value("over") == [True, True]
        late = "Meanwhile(lambda deadline: time.sleep(0.5), landed)"
        assert reader.value(f"engine.read({one}, deadline_s=0.2, meanwhile={late}).bytes") == SIZE


def test_only_device_memory_can_take_part(root: Path) -> None:
    host_memory = "host = ctypes.create_string_buffer(1 << 22); engine.register(ctypes.addressof(host), 1 << 21)"
    with engine(root, "prefill", 0, 0) as source, engine(root, "decode", 1, 0) as reader:
        source.wait()
        reader.wait()
        with pytest.raises(WorkerError, match="only device memory and the host pool can be registered"):
            source.run(host_memory)
        session, memory = address_of(source)
        reader.run(host_memory)
        with pytest.raises(WorkerError, match="failed: code -1"):
            reader.run(
                f"engine.read('{session}', Copies([ctypes.addressof(host)], [{memory}], [4096]), deadline_s=5.0)"
            )


def test_protocol_names() -> None:
    assert parse_protocol(" SDMA\n") == "sdma"
    with pytest.raises(ValueError, match="'tcp' is not one of sdma, device_rdma, device_urma"):
        parse_protocol("tcp")
    with pytest.raises(ValueError, match="role: 'both' is not one of prefill, decode"):
        MemFabricEngine(host="h", device_id=0, role="both", protocol="sdma", store_url="")  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 4))))
def test_coalescing_copies_the_same_bytes_in_the_same_order(descriptors: list[tuple[int, int, int]]) -> None:
    local, remote, sizes = [list(column) for column in zip(*descriptors, strict=True)] or [[], [], []]

    def bytes_of(local: list[int], remote: list[int], sizes: list[int]) -> list[tuple[int, int]]:
        return [(a + i, b + i) for a, b, n in zip(local, remote, sizes, strict=True) for i in range(n)]

    merged = coalesce(Copies(local, remote, sizes))
    assert bytes_of(*merged) == bytes_of(local, remote, sizes)
    ends = [(a + n, b + n) for a, b, n in zip(*merged, strict=True)]
    assert all(end != start for end, start in zip(ends, list(zip(merged[0], merged[1], strict=True))[1:], strict=False))


def test_coalescing_needs_equal_lengths() -> None:
    with pytest.raises(ValueError, match="1 local and 2 remote addresses for 1 sizes"):
        coalesce(Copies([0], [0, 1], [4]))
