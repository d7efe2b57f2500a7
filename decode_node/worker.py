"""One decode worker process: an event loop that talks, and an engine thread that computes."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import grpc
from sluice.v1 import common_pb2, worker_pb2_grpc

from decode_node.commands import Join, RankEndpoint, Report
from decode_node.faults import HostRowEraser
from decode_node.follower import FollowerLoop
from decode_node.inbox import Inbox
from decode_node.joining import await_join, call_followers, free_url, gather_endpoints
from decode_node.kv_room import kv_manager
from decode_node.leader import LeaderLoop
from decode_node.node import Node, NodeSetup, build_node
from decode_node.scheduler import Scheduler, SchedulerLimits
from decode_node.sessions import DECODE_SERVICE, DecodeSessions, SessionTerms
from decode_node.status import add_pulls, add_rank, add_scheduling
from engine.tp_channel import TpFollower, TpLeader
from engine.worker import WorkerProcess
from transfer.hostcann.runtime import end_process_within

log = logging.getLogger(__name__)
DRAIN_S = 1.0  # how long sessions get to tell their clients why they end
END_S = 6.5  # for all of a stop; then the process ends as it is
STOP_S = 3.0  # how long the engine thread gets to end its turn and to close its sockets


class EngineLoop(Protocol):
    """What the engine thread runs once everything is built."""

    def run(self) -> None: ...

    def stop(self) -> None: ...


class DecodeWorker:
    """Rank 0 of a DP rank (the leader) also serves sessions; the other ranks only follow.

    Whatever ends the engine thread before a stop was asked for ends the process with exit status 1.
    """

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._progress = "starting"
        self._node: Node | None = None
        self._loop: EngineLoop | None = None
        self._leader: LeaderLoop | None = None
        self._stopping = threading.Event()
        terms = SessionTerms(
            group=setup.place.group_name,
            dp_rank=setup.place.dp_rank,
            reservation_s=setup.config.decode.reservation_s,
            request_timeout_s=setup.config.runtime.request_timeout_s,
            max_request_tokens=setup.geometry.max_request_tokens,
            eos_token_ids=frozenset(setup.model.eos_token_ids),
        )
        self._sessions = DecodeSessions(terms)

    async def serve(self) -> int:
        """Until SIGTERM, SIGINT or a failure. Returns the exit status."""
        self._events = asyncio.get_running_loop()
        self._process = WorkerProcess(self._setup.config, self._setup.info, self.status, self._setup.grpc_port)
        leads = self._setup.place.tp_rank == 0
        await self._process.start(self._add_services if leads else None)
        engine = threading.Thread(target=self._engine, name="engine", daemon=True)
        engine.start()
        status = await self._process.run()
        self._sessions.close()
        if status == 0:
            await self._sessions.drained(self._setup.config.runtime.drain_s)
        end_process_within(END_S)
        self._stopping.set()
        if self._loop is not None:
            self._loop.stop()
        await self._sessions.drained(DRAIN_S)  # clients hear the cause before the meta server hears of a leave
        await self._process.stop()
        await asyncio.to_thread(engine.join, STOP_S)
        if engine.is_alive():
            log.warning("%s: the engine did not stop within %g s", self._setup.place.worker_id, STOP_S)
        return status

    def status(self) -> common_pb2.WorkerStatus:
        """A snapshot; never blocks."""
        status = common_pb2.WorkerStatus(detail=self._progress)
        node = self._node
        if node is not None:
            geometry = self._setup.geometry
            add_rank(status, geometry, node.rank.counters, node.backend.counters)
            add_pulls(status, node.puller.counters(), node.puller.pending(), geometry.hot.rows)
            status.gauges["device_bytes"] = node.device_bytes
        if self._leader is not None:
            add_scheduling(status, self._leader.snapshot)
        return status

    def _add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self._sessions, server)
        return [DECODE_SERVICE]

    # -- the engine thread -------------------------------------------------------------------------------------------

    def _engine(self) -> None:
        try:
            with ExitStack() as resources:
                try:
                    loop = self._lead(resources) if self._setup.place.tp_rank == 0 else self._follow(resources)
                    self._loop = loop
                    if not self._stopping.is_set():
                        loop.run()
                except Exception as error:
                    self._fail(error)  # at once: closing what hangs may take long
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._stopping.is_set():
            log.exception("the engine of %s ended", self._setup.place.worker_id)
            self._events.call_soon_threadsafe(self._process.fail, str(error))

    def _lead(self, resources: ExitStack) -> LeaderLoop:
        setup, geometry = self._setup, self._setup.geometry
        startup_s = setup.config.runtime.startup_timeout_s
        channel = TpLeader(setup.config.runtime.run_dir or ".", setup.place.replica_name, setup.ranks)
        resources.callback(channel.close)
        self._say("waiting for the other TP ranks")
        join = Join(free_url(setup.config.runtime.host))
        call_followers(channel, join, startup_s)
        inbox = Inbox()
        node = build_node(setup, join.host_pool_url, inbox.own_report, self._say, resources)
        limits = SchedulerLimits(
            ranks=setup.ranks,
            max_waiting=setup.config.decode.max_waiting,
            max_request_tokens=geometry.max_request_tokens,
            lease_s=setup.config.transfer.lease_s,
            step_tokens=setup.config.decode.step_tokens,
            headroom_tokens=setup.config.decode.headroom_tokens,
        )
        erased = setup.config.faults.zero_host_rows
        eraser = HostRowEraser(erased, node.memory, node.tables) if erased else None
        loop = LeaderLoop(inbox, Scheduler(kv_manager(geometry), limits), node.rank, channel, setup.ranks, eraser)
        self._say("waiting until the other TP ranks have loaded")
        endpoints = gather_endpoints(channel, node.endpoint, setup.ranks, startup_s)
        self._leader = loop
        self._events.call_soon_threadsafe(self._open, inbox, endpoints)
        self._ready(node)
        return loop

    def _follow(self, resources: ExitStack) -> FollowerLoop:
        setup = self._setup
        channel = TpFollower(setup.config.runtime.run_dir or ".", setup.place.replica_name, setup.place.tp_rank)
        resources.callback(channel.close)
        self._say("waiting for TP rank 0")
        join = await_join(channel, setup.config.runtime.startup_timeout_s)
        reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        node = build_node(setup, join.host_pool_url, reports.put, self._say, resources)
        channel.report(node.endpoint)
        self._ready(node)
        return FollowerLoop(node.rank, channel, reports)

    def _open(self, inbox: Inbox, endpoints: list[RankEndpoint]) -> None:
        self._sessions.open(inbox, endpoints)

    def _ready(self, node: Node) -> None:
        self._node = node
        self._say("")
        geometry = self._setup.geometry
        log.info(
            "%s: %d host blocks of %d tokens, requests of up to %d tokens%s",
            self._setup.place.worker_id,
            geometry.num_blocks,
            geometry.block_size,
            geometry.max_request_tokens,
            ""
            if geometry.max_request_tokens == geometry.model_tokens
            else f" (the model allows {geometry.model_tokens}; raise decode.host_pool_bytes)",
        )
        asyncio.run_coroutine_threadsafe(self._process.set_ready(), self._events)

    def _say(self, progress: str) -> None:
        self._progress = progress
        if progress:
            log.info("%s: %s", self._setup.place.worker_id, progress)
