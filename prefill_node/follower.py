"""The engine thread of TP rank 1 and up: does what rank 0 says."""

from __future__ import annotations

import threading

from engine.tp_channel import TpFollower
from prefill_node.rank import PrefillRank
from prefill_node.steps import Drop, OpenRoute, StartOver, StepDone, StepPlan, Stop

_IDLE_S = 0.1
_BUSY_POLL_S = 0.001  # while a route is being opened, whose report rank 0 is waiting for


def follow(rank: PrefillRank, channel: TpFollower, stopping: threading.Event) -> None:
    """Carries out commands until `Stop` comes or `stopping` is set. Whatever it raises is the end of the process."""
    channel.ready()
    while not stopping.is_set():
        match channel.next_command(_BUSY_POLL_S if rank.is_opening else _IDLE_S):
            case StepPlan() as plan:
                done = rank.run(plan)
                channel.report(StepDone(plan.number, dict(done.errors), dict(done.pool_errors)))
            case OpenRoute() as command:
                rank.open_route(command)
            case Drop(request_ids=request_ids):
                rank.drop(request_ids)
            case StartOver(request_ids=request_ids):
                rank.start_over(request_ids)
            case Stop():
                return
        for report in rank.poll():
            channel.report(report)
