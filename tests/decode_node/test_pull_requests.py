"""When a request that a decode rank receives is complete."""

from __future__ import annotations

import time

import pytest

from decode_node.pull_plan import PullRefused
from decode_node.pull_requests import PullRequest, PullRequests
from tests.kv_peers import Events, entry

SOURCES = object(), object()
LAYERS = 2


def receive(requests: PullRequests, member: int, layer: int, *, beginning: int, last: bool = False) -> str | None:
    """One entry of a member with the only block there is; returns what is missing if it is the last one."""
    announced = entry("r", [4])
    announced.begun_again = beginning
    request = requests.claim(announced, member, 2, SOURCES[member], time.monotonic())
    requests.check_order(request, announced, member, layer)
    requests.arrived(request, announced, member, layer)
    missing = requests.finish(request, member) if last else None
    requests.ended(request)
    return missing


def test_what_was_read_before_a_new_beginning_does_not_count() -> None:
    """One TP rank could not load a layer from the pool, so what the other published behind it is spoilt.

    Then the request begins again, and messages are lost or overtaken.
    """
    events = Events()
    requests = PullRequests(lambda member: range(LAYERS), events.on_terminal, events.quiescent.put)
    requests.expect(PullRequest("r", 1, (0,), (0,), 2, range(1), 60.0, time.monotonic() + 60.0))
    assert receive(requests, 0, 0, beginning=0) is None
    assert receive(requests, 0, 1, beginning=0, last=True) is None
    assert receive(requests, 1, 0, beginning=0) is None  # then it failed

    assert receive(requests, 1, 0, beginning=1) is None
    assert receive(requests, 1, 1, beginning=1, last=True) is None
    assert events.terminal.empty(), "member 0 has not sent anything of this beginning"

    assert (
        receive(requests, 0, 1, beginning=1, last=True)
        == "contributor 0 finished, but blocks 0..0 of layer 0 are missing"
    )
    with pytest.raises(PullRefused, match=r"has begun this request again since \(beginning 0 of 1\)"):
        receive(requests, 0, 0, beginning=0)
    assert receive(requests, 0, 0, beginning=1) is None
    assert events.terminal.empty()
    assert receive(requests, 0, 1, beginning=1, last=True) is None
    assert events.next_terminal() == ("r", 1, None)
