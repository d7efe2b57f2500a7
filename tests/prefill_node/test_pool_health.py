from __future__ import annotations

import ctypes
import signal
import threading
import time

import pytest

from prefill_node.faulty_pool import FaultyPool
from prefill_node.joining_pool import JoiningPool
from prefill_node.pool_health import GuardedPool
from prefill_node.pool_watch import PoolWatch
from tests.kv_peers import eventually
from tests.prefill_node.harness import MemoryPool
from transfer.handlers import handlers_kept
from transfer.mem_pool import PoolError, PoolFull
from transfer.mem_pool_process import PoolLost
from transfer.pool_monitor import PoolUsage


class CountingPool(MemoryPool):
    """Counts the calls that reach it."""

    calls = 0

    def exists(self, keys):
        self.calls += 1
        return super().exists(keys)


def test_a_pool_that_is_down_is_asked_seldom():
    inner = CountingPool()
    pool = GuardedPool(inner, retry_s=0.05)
    inner.fail.add("exists")
    for _ in range(20):
        with pytest.raises(PoolError, match="exists fails on demand"):
            pool.exists(["a"])
    assert inner.calls == 1
    assert "fails on demand" in pool.down
    time.sleep(0.06)
    with pytest.raises(PoolError):
        pool.exists(["a"])
    assert inner.calls == 2
    inner.fail.clear()
    time.sleep(0.06)
    assert pool.exists(["a"]) == [False]
    assert pool.down == ""
    assert pool.counters() == (2, 1)


def test_an_answer_to_an_older_question_does_not_mean_that_the_pool_is_up():
    inner = MemoryPool()
    pool = GuardedPool(inner, retry_s=60)

    def fail_meanwhile(keys):
        inner.fail.add("exists")
        with pytest.raises(PoolError):
            pool.exists(["a"])
        return [None]

    inner.locate = fail_meanwhile
    assert pool.locate(["a"]) == [None]
    assert "fails on demand" in pool.down
    assert pool.counters() == (1, 1)


def test_a_full_pool_is_not_down():
    inner = MemoryPool()

    def full(keys, sizes, *, wait_s=0.0):
        raise PoolFull("no room")

    inner.alloc = full
    pool = GuardedPool(inner)
    with pytest.raises(PoolFull):
        pool.alloc(["a"], [1])
    assert pool.down == ""


def test_faults_on_demand_are_those_of_the_seed():
    def faults(seed):
        pool, failed = FaultyPool(MemoryPool(), delay_s=0.0, failure=0.3, seed=seed), []
        for _ in range(100):
            try:
                pool.exists(["a"])
            except PoolError as error:
                assert "faults.pool_failure" in str(error)
                failed.append(True)
            else:
                failed.append(False)
        return failed

    assert faults(1) == faults(1) != faults(2)
    assert 15 < sum(faults(1)) < 45


def test_a_slow_pool_on_demand_answers_late():
    pool = FaultyPool(MemoryPool(), delay_s=0.02, failure=0.0, seed=0)
    started = time.monotonic()
    for _ in range(10):
        assert pool.exists(["a"]) == [False]
    assert 0.04 < time.monotonic() - started < 1.0


class Door:
    """Opens a pool as soon as it may."""

    def __init__(self):
        self.open, self.pool, self.knocks, self.closed, self.end = False, MemoryPool(), 0, 0, ""
        self.pool.close = self.close
        self.pool.ended = lambda: self.end
        self.pool.probe = lambda: None

    def __call__(self):
        self.knocks += 1
        if not self.open:
            raise PoolError("the pool cannot be joined: nobody listens")
        return self.pool

    def close(self):
        self.closed += 1


def test_a_pool_that_is_not_there_is_joined_later():
    door = Door()
    pool = JoiningPool(door, retry_s=0.02)
    pool.join()
    pool.join()
    assert door.knocks == 1, "it is tried again only after a while"
    with pytest.raises(PoolError, match="cannot be joined: nobody listens"):
        pool.exists(["a"])
    door.open = True
    time.sleep(0.03)
    pool.join()
    assert pool.exists(["a"]) == [False]
    pool.close()
    assert (door.knocks, door.closed) == (2, 1)


def test_a_pool_joined_while_the_process_ends_is_left_at_once():
    door = Door()
    door.open = True
    pool = JoiningPool(door)
    pool.close()
    pool.join()
    assert door.closed == 1


def _answers(pool):
    try:
        return pool.exists(["a"]) == [False]
    except PoolError:
        return False


def test_a_pool_that_lets_nobody_in_holds_nobody_up():
    """A worker that starts again shortly after a member was killed: the meta service keeps it waiting."""
    opened, door = threading.Event(), Door()
    door.open = True
    pool = JoiningPool(lambda: opened.wait(10) and door())
    started = time.monotonic()
    pool.join_within(0.05)
    pool.join()
    assert time.monotonic() - started < 1.0, "neither the start nor the watch waits for the first try"
    with pytest.raises(PoolError, match="not been joined yet"):
        pool.exists(["a"])
    opened.set()
    eventually(lambda: _answers(pool))
    assert door.knocks == 1
    pool.close()


def test_a_defect_in_joining_ends_the_start():
    def defect():
        raise ImportError("no module named kubernetes")

    with pytest.raises(ImportError, match="kubernetes"):
        JoiningPool(defect).join_within(5.0)


class Service:
    """What a monitor sees of a pool's service that answers while `door` is open."""

    def __init__(self, door):
        self.door, self.restarts = door, 0

    def usage(self):
        if not self.door.open:
            raise PoolError("nobody listens")
        return PoolUsage(10, 100, 1, 0)


def test_status_is_true_also_while_nobody_asks():
    door = Door()
    joining = JoiningPool(door, retry_s=0.01)
    watch = PoolWatch(joining, GuardedPool(joining), Service(door), period_s=0.01)
    eventually(lambda: "nobody listens" in watch.missing)
    assert watch.usage is None
    door.open = True
    eventually(lambda: not watch.missing and watch.usage == PoolUsage(10, 100, 1, 0))
    door.open = False
    eventually(lambda: "nobody listens" in watch.missing and watch.usage is None)
    watch.close()
    joining.close()


def test_a_pool_that_is_back_is_noticed_without_a_request():
    inner = MemoryPool()
    door = Door()
    door.open, door.pool.exists = True, inner.exists
    joining = JoiningPool(door)
    joining.join()
    guarded = GuardedPool(joining, retry_s=0.01)
    inner.fail.add("exists")
    with pytest.raises(PoolError):
        guarded.exists(["a"])
    watch = PoolWatch(joining, guarded, Service(door), period_s=0.01)
    eventually(lambda: guarded.counters().errors > 1)
    assert guarded.down
    inner.fail.clear()
    eventually(lambda: not guarded.down)
    assert guarded.counters().outages == 1
    watch.close()


def test_a_client_is_replaced_with_its_service():
    door = Door()
    door.open = True
    joining, service = JoiningPool(door, retry_s=0.01), Service(door)
    joining.join()
    watch = PoolWatch(joining, GuardedPool(joining), service, period_s=0.01)
    eventually(lambda: watch.usage is not None)
    assert (door.knocks, door.closed) == (1, 0)
    service.restarts += 1
    eventually(lambda: (door.knocks, door.closed) == (2, 1))
    eventually(lambda: not watch.missing)
    watch.close()
    joining.close()
    assert (door.knocks, door.closed) == (2, 2)


def test_nobody_leaves_or_joins_a_pool_whose_service_is_silent():
    door, service_door = Door(), Door()
    door.open = service_door.open = True
    joining, service = JoiningPool(door, retry_s=0.0), Service(service_door)
    joining.join()
    watch = PoolWatch(joining, GuardedPool(joining), service, period_s=0.01)
    eventually(lambda: watch.usage is not None)
    service_door.open = False
    service.restarts += 1
    eventually(lambda: "was restarted" in joining.missing)
    time.sleep(0.1)
    assert (door.knocks, door.closed) == (1, 0)
    service_door.open = True
    eventually(lambda: (door.knocks, door.closed) == (2, 1) and not watch.missing)
    watch.close()
    joining.close()


def test_a_lost_pool_is_joined_again():
    """Its client is left behind, whoever notices and however many do."""
    first, second = Door(), Door()
    first.open = second.open = True
    doors = iter([first, second])
    joining = JoiningPool(lambda: next(doors)(), retry_s=0.0)

    def lost(keys):
        raise PoolLost("its client was ended")

    first.pool.exists = first.pool.locate = lost
    joining.join()
    for ask in (joining.exists, joining.locate):
        with pytest.raises(PoolError, match="its client was ended"):
            ask(["a"])
    assert "its client was ended" in joining.missing
    joining.join()
    assert first.closed == 1
    assert joining.missing == "" and joining.exists(["a"]) == [False]
    joining.close()
    assert (first.closed, second.closed) == (1, 1)


def test_a_client_that_died_idle_is_noticed():
    door = Door()
    door.open = True
    joining = JoiningPool(door, retry_s=0.0)
    joining.join()
    door.end = "the pool's client has ended with status -9"
    door.open = False
    joining.join()
    assert "nobody listens" in joining.missing and door.closed == 1
    door.open, door.end = True, ""
    joining.join()
    assert joining.missing == ""


def test_a_client_that_hangs_idle_is_noticed():
    """What its probe has found counts at once."""
    door = Door()
    door.open = True
    joining = JoiningPool(door, retry_s=60.0)
    joining.join()
    door.pool.probe = lambda: setattr(door, "end", "the pool's client has ended with status -9")
    joining.join()
    assert (joining.missing, door.knocks) == (door.end, 1)


def test_a_pool_that_is_lost_again_and_again_is_joined_more_and_more_seldom():
    door = Door()
    door.open = True
    joining = JoiningPool(door, retry_s=60.0)
    joining.join()
    joining.renew("it was lost at once")
    joining.join()
    assert (door.knocks, joining.missing) == (1, "it was lost at once")


def test_signal_handlers_survive_a_library_that_sets_its_own():
    def library():
        libc = ctypes.CDLL(None)
        libc.signal.restype = libc.signal.argtypes = None
        with handlers_kept(signal.SIGUSR1):
            libc.signal(ctypes.c_int(signal.SIGUSR1), ctypes.c_void_p(1))  # SIG_IGN

    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(True))
    try:
        thread = threading.Thread(target=library)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)
