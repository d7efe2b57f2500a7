"""How the TP ranks of one DP rank find each other, before the first request."""

from __future__ import annotations

import time

from decode_node.commands import Join, RankEndpoint
from engine.ports import free_port
from engine.tp_channel import ChannelError, TpFollower, TpLeader

POLL_S = 0.01


def free_url(host: str) -> str:
    """A TCP URL on `host` that nothing listens on now, and whose port no outgoing connection will take meanwhile."""
    return f"tcp://{host}:{free_port(host)}"


def call_followers(channel: TpLeader, join: Join, timeout_s: float) -> None:
    """Leader: waits until every follower is there and tells them all how to join. Raises ChannelError."""
    channel.wait_ready(timeout_s)
    channel.broadcast(join)


def gather_endpoints(channel: TpLeader, own: RankEndpoint, ranks: int, timeout_s: float) -> list[RankEndpoint]:
    """Leader: every rank's endpoint, in rank order, once all have loaded. Raises ChannelError naming missing ranks."""
    endpoints = {0: own}
    deadline = time.monotonic() + timeout_s
    while len(endpoints) < ranks:
        for rank, report in channel.reports():
            if isinstance(report, RankEndpoint):
                endpoints[rank] = report
        if time.monotonic() > deadline:
            missing = sorted(set(range(ranks)) - set(endpoints))
            raise ChannelError(f"decode ranks {missing} did not finish loading within {timeout_s:g} s")
        time.sleep(POLL_S)
    return [endpoints[rank] for rank in range(ranks)]


def await_join(channel: TpFollower, timeout_s: float) -> Join:
    """Follower: says it is there and waits for the leader's call. Raises ChannelError."""
    channel.ready()
    command = channel.next_command(timeout_s)
    if not isinstance(command, Join):
        raise ChannelError(f"the leader's call to join did not come within {timeout_s:g} s, but {command!r}")
    return command
