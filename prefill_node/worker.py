"""The engine thread of a prefill worker process, and what the event loop sees of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import grpc
from sluice.v1 import common_pb2, worker_pb2_grpc

from engine.kv_cache import KVCacheManager
from engine.tp_channel import TpFollower, TpLeader
from prefill_node import status
from prefill_node.assembly import RankParts, RankPlan, assemble
from prefill_node.block_keys import block_keys
from prefill_node.follower import follow
from prefill_node.leader import PrefillLeader
from prefill_node.scheduler import Limits, PrefillScheduler
from prefill_node.service import PREFILL_SERVICE, PrefillCalls

log = logging.getLogger(__name__)
_DRAIN_POLL_S = 0.05


class Stopped(Exception):
    """The process was told to stop while it was loading."""


class PrefillWorker:
    """Rank 0 leads: it serves prompts and decides the steps. The others follow it.

    Everything is made, used and closed on the engine thread; the event loop reaches it through `PrefillLeader`'s inbox
    only.
    """

    def __init__(self, plan: RankPlan) -> None:
        self._plan = plan
        self._calls = PrefillCalls(
            plan.model.vocab_size,
            plan.config.runtime.request_timeout_s,
            partial(
                block_keys,
                plan.info.layout,
                lookahead=int(plan.config.decode.speculative_tokens > 0),
                checksums=plan.config.pool.checksum == "on",
            ),
        )
        self._detail = "starting"
        self._parts: RankParts | None = None
        self._leader: PrefillLeader | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._farewell = contextlib.ExitStack()

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        """Rank 0 serves prompts, the others nothing of their own."""
        if self._plan.info.tp_rank:
            return ()
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self._calls, server)
        return (PREFILL_SERVICE,)

    def start(self, on_ready: Callable[[], object], on_failure: Callable[[str], object]) -> None:
        """Starts the engine thread. It calls `on_ready` when it can serve and `on_failure` when it ends too early."""
        self._thread = threading.Thread(target=self._run, args=(on_ready, on_failure), name="engine", daemon=True)
        self._thread.start()

    async def drained(self, timeout_s: float) -> None:
        """From now on new requests are refused; returns when those it has are prefilled and pulled by decode, or after
        `timeout_s` seconds."""
        self._calls.close()
        deadline = time.monotonic() + timeout_s
        while self._busy() and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)

    def _busy(self) -> bool:
        reading = self._parts is not None and self._parts.publisher.outstanding() > 0
        return reading or self._calls.open_calls > 0

    def stop(self, timeout_s: float) -> bool:
        """Ends the engine thread after the step under way; False if it is still busy after `timeout_s`."""
        self._stopping.set()
        if self._leader is not None:
            self._leader.stop()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def leave_pool(self) -> None:
        """The last thing the process does, after `stop`; bounded (`transfer/mem_pool_process.py`)."""
        self._farewell.close()

    def status(self) -> common_pb2.WorkerStatus:
        """A snapshot; called on the event loop, does not block."""
        config = self._plan.config
        answer = common_pb2.WorkerStatus(detail=self._detail)
        status.add_shape(answer, self._plan.shape)
        if self._leader is not None:
            status.add_scheduling(answer, self._leader.snapshot(), config.prefill.max_waiting)
        if (parts := self._parts) is not None:
            answer.gauges["device_bytes"] = parts.device.allocated_bytes
            answer.counters["transfer_wait_seconds"] = parts.backend.transfer_wait_seconds
            status.add_health(answer, parts.pool.down or parts.watch.missing, parts.pool.counters())
            if self._leader is not None and (usage := parts.watch.usage) is not None:
                status.add_pool_usage(answer, usage)
            status.add_saves(answer, parts.saver.counters(), config.pool.dram_bytes)
            status.add_transfers(
                answer,
                parts.gate.counters(),
                parts.publisher.counters(),
                parts.loader.counters(),
                parts.publisher.outstanding(),
            )
        return answer

    def _run(self, on_ready: Callable[[], object], on_failure: Callable[[str], object]) -> None:
        def fail(error: Exception) -> None:
            log.exception("the engine thread ends")
            on_failure(f"{type(error).__name__}: {error}")

        try:
            with contextlib.ExitStack() as stack:
                try:
                    self._serve(stack, on_ready)
                except Exception as error:
                    fail(error)  # at once: leaving a pool in trouble may take half a minute
        except Exception as error:
            fail(error)

    def _serve(self, stack: contextlib.ExitStack, on_ready: Callable[[], object]) -> None:
        try:
            self._parts = parts = assemble(self._plan, stack, self._farewell, self._progress)
            if self._plan.info.tp_rank == 0:
                self._lead(parts, stack, on_ready)
            else:
                self._follow(parts, stack, on_ready)
        except Stopped:
            log.info("stopped while loading")

    def _progress(self, detail: str) -> None:
        if self._stopping.is_set():
            raise Stopped
        self._detail = detail
        log.info("%s", detail)

    def _lead(self, parts: RankParts, stack: contextlib.ExitStack, on_ready: Callable[[], object]) -> None:
        config, section, shape = self._plan.config, self._plan.config.prefill, self._plan.shape
        channel = TpLeader(config.runtime.run_dir or ".", self._plan.info.group, section.tp)
        stack.callback(channel.close)
        leader = PrefillLeader(
            PrefillScheduler(
                KVCacheManager(shape.cache_specs()),
                Limits(
                    block_size=config.kv.block_size,
                    max_tokens_per_step=section.max_tokens_per_step,
                    max_requests=section.max_requests,
                    max_waiting=section.max_waiting,
                    max_prompt_tokens=shape.max_prompt_tokens,
                    reloads=shape.plan.has_reuse,
                    max_whole_tokens=section.max_whole_tokens,
                ),
            ),
            parts.rank,
            channel,
            tp_size=section.tp,
            step_timeout_s=config.runtime.collective_timeout_s,
            look_up_timeout_s=config.pool.timeout_s / 4,
        )
        self._progress("waiting for the other TP ranks")
        channel.wait_ready(config.runtime.startup_timeout_s)
        self._leader = leader
        if self._stopping.is_set():
            leader.stop()
        self._calls.open(leader)
        self._detail = ""
        on_ready()
        leader.run()

    def _follow(self, parts: RankParts, stack: contextlib.ExitStack, on_ready: Callable[[], object]) -> None:
        info = self._plan.info
        channel = TpFollower(self._plan.config.runtime.run_dir or ".", info.group, info.tp_rank)
        stack.callback(channel.close)
        self._detail = ""
        on_ready()
        follow(parts.rank, channel, self._stopping)
