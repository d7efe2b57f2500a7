"""Which workers form a group, when one is lost, and who is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sluice.v1 import common_pb2

from meta_server.compatibility import RegistrationRefused
from meta_server.errors import FailureKind, RequestFailed
from meta_server.registry import DECODE, PREFILL, Registry
from meta_server.router import Router
from tests.meta_server.fakes import layout, worker_info

READY = common_pb2.WorkerStatus(ready=True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(10.0, clock)


def join(registry: Registry, role: str = "decode", ready: bool = True, **changes: Any) -> str:
    info = worker_info(role, **changes)
    registry.register(info)
    if ready:
        assert registry.heartbeat(info.worker_id, info.epoch, READY)
    return str(info.worker_id)


def test_replica_complete_only_with_all_ranks_ready(registry: Registry) -> None:
    join(registry, "prefill", tp_size=2)
    assert registry.replicas(PREFILL) == []
    join(registry, "prefill", tp=1, tp_size=2, ready=False)
    assert registry.replicas(PREFILL) == []
    registry.heartbeat("prefill-0/tp1", "prefill-0/tp1@1", READY)
    (replica,) = registry.replicas(PREFILL)
    assert [worker.info.tp_rank for worker in replica.workers] == [0, 1]
    assert not registry.ready and registry.missing() == "decode"


def test_every_dp_rank_is_a_replica_of_its_own(registry: Registry) -> None:
    for dp in (0, 1):
        join(registry, dp=dp)
    assert [(replica.key.group, replica.key.dp_rank) for replica in registry.replicas(DECODE)] == [
        ("decode-0", 0),
        ("decode-0", 1),
    ]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"block_size": 32}, ("block_size", "16", "32")),
        ({"dtype": "bfloat16"}, ("dtype", "float32", "bfloat16")),
        ({"protocol": "device_rdma"}, ("protocol", "sdma", "device_rdma")),
        ({"fingerprint": "0" * 32}, ("fingerprint", "f" * 32, "0" * 32)),
        ({"indexer_layers": [0, 2]}, ("indexer_layers",)),
    ],
)
def test_incompatible_layout_is_refused(registry: Registry, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    join(registry, "prefill")
    with pytest.raises(RegistrationRefused) as caught:
        join(registry, "decode", layout=layout(**change))
    for part in (*parts, "decode-0/dp0/tp0", "prefill-0/tp0"):
        assert part in str(caught.value)
    assert registry.replicas(DECODE) == []


def test_a_lost_worker_does_not_bind_newcomers(registry: Registry, clock: Clock) -> None:
    join(registry, "prefill")
    clock.now += 11
    assert registry.sweep() == ["prefill-0/tp0"]
    join(registry, "decode", layout=layout(block_size=32))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"role": "prefill", "group": 1, "tp_size": 4}, "tp_size = 4, but prefill-0/tp0 has 3"),
        (
            {"role": "decode", "tp_size": 2},
            "prefill tp_size = 3 (prefill-0/tp0) must be a multiple of decode tp_size = 2",
        ),
        ({"role": "prefill", "tp_size": 3, "worker_id": "other"}, "is already taken by prefill-0/tp0"),
        ({"role": "decode", "tp": 3, "tp_size": 3}, "tp_rank = 3"),
        ({"role": "decode", "epoch": ""}, "epoch: required"),
    ],
)
def test_misfits_are_refused_with_both_values(registry: Registry, changes: dict[str, Any], text: str) -> None:
    join(registry, "prefill", tp_size=3)
    with pytest.raises(RegistrationRefused) as caught:
        join(registry, **changes)
    assert text in str(caught.value)


def test_silent_worker_is_lost_and_must_register_again(registry: Registry, clock: Clock) -> None:
    worker_id = join(registry)
    clock.now += 9
    assert registry.sweep() == []
    clock.now += 2
    assert registry.sweep() == [worker_id]
    assert registry.sweep() == []
    assert registry.states()[0].health == "lost"
    assert not registry.heartbeat(worker_id, f"{worker_id}@1", READY)
    join(registry)
    assert registry.states()[0].health == "ready"


def test_heartbeat_of_an_older_process_is_not_known(registry: Registry) -> None:
    worker_id = join(registry)
    join(registry, epoch="second")
    assert not registry.heartbeat(worker_id, f"{worker_id}@1", READY)
    registry.leave(worker_id, f"{worker_id}@1")
    assert len(registry.replicas(DECODE)) == 1, "a late good-bye of the older process changes nothing"


@pytest.mark.parametrize("cause", ["silent", "left", "replaced"])
def test_watcher_is_told_once(registry: Registry, clock: Clock, cause: str) -> None:
    join(registry, tp_size=2)
    join(registry, tp=1, tp_size=2)
    told: list[str] = []
    (replica,) = registry.replicas(DECODE)
    unwatch = registry.watch(replica, told.append)
    ended = registry.watch(replica, lambda text: told.append("not me"))
    ended()
    if cause == "silent":
        clock.now += 11
        registry.sweep()
    elif cause == "left":
        registry.leave("decode-0/dp0/tp1", "decode-0/dp0/tp1@1")
    else:
        join(registry, tp=1, tp_size=2, epoch="second")
    assert len(told) == 1 and told[0].startswith("decode-0/dp0/tp") and cause in told[0]
    clock.now += 100
    registry.sweep()
    unwatch()
    assert len(told) == 1


def two_decoders(registry: Registry, **changes: Any) -> Router:
    for group in (0, 1):
        join(registry, group=group, **changes)
    return Router(registry, random.Random(7))


def test_decode_goes_to_the_most_free_replica(registry: Registry) -> None:
    router = two_decoders(registry)
    with router.claim_decode(2000) as first, router.claim_decode(10) as second:
        assert first.key != second.key
        with router.claim_decode(10) as third:
            assert third.key == second.key


def test_ties_are_broken_at_random(registry: Registry) -> None:
    router = two_decoders(registry)
    chosen = []
    for _ in range(200):
        with router.claim_decode(10) as replica:
            chosen.append(replica.key.group)
    assert 60 < chosen.count("decode-0") < 140


def test_decode_that_cannot_hold_the_request_is_not_chosen(registry: Registry) -> None:
    router = two_decoders(registry)
    join(registry, group=2, max_request_tokens=9000)
    with router.claim_decode(5000) as replica:
        assert replica.key.group == "decode-2"
    with pytest.raises(RequestFailed, match="9001 tokens"), router.claim_decode(9001):
        pass


def test_prefill_counts_running_prompts(registry: Registry) -> None:
    for group in (0, 1):
        join(registry, "prefill", group=group)
    router = Router(registry)
    with router.claim_prefill(500) as first, router.claim_prefill(10) as second, router.claim_prefill(10) as third:
        assert first.key != second.key and second.key == third.key


def test_loads_return_to_zero(registry: Registry) -> None:
    router = two_decoders(registry)
    with pytest.raises(ZeroDivisionError), router.claim_decode(10) as replica:
        assert router.load(replica.key).tokens == 10
        raise ZeroDivisionError
    assert all(router.load(one.key) == router.load(replica.key) for one in registry.replicas(DECODE))
    assert router.load(replica.key).requests == 0


def test_nothing_ready_is_unavailable(registry: Registry) -> None:
    join(registry, "prefill", ready=False)
    with pytest.raises(RequestFailed) as caught, Router(registry).claim_prefill(1):
        pass
    assert caught.value.failure.kind is FailureKind.UNAVAILABLE
