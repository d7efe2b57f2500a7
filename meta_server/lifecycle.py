"""One request, from admission to its last token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from sluice.v1 import client_pb2, common_pb2

from meta_server.attempt import Attempt
from meta_server.channels import WorkerChannels
from meta_server.decode_session import Preempted
from meta_server.errors import Failure, FailureKind, RequestFailed, unavailable
from meta_server.output import OutputText
from meta_server.progress import Progress
from meta_server.registry import Registry
from meta_server.request import Done, Event, Final, GenerationRequest, RunTerms
from meta_server.router import Router

log = logging.getLogger(__name__)
_RPC_SLACK_S = 5.0
_ELSEWHERE_S = 1.0  # how long replicas that failed a request are passed over when there is no other
_POLL_S = 0.05


class Generation:
    """Runs one request until its answer is complete, as often as its workers are lost or need its memory.

    What is left of an interrupted request is run again as a request of its own (`Progress`), while the client's stream
    goes on. Faults of the request itself end it at once.

    Invariants:
        * `emit` gets exactly one final event (Done or Failure), and it is the last (test_exactly_one_final_event).
        * When it is emitted, the request holds nothing here: claims and RPCs are closed, its id is free
          (test_accounting_returns_to_zero).
        * Whatever ends it early (client, deadline, shutdown) goes through `abort`; the first one wins.
        * It always ends: failed runs are counted (`max_reruns`), every preempted one has delivered a token or never
          began, waiting for replicas is bounded (`rerun_wait_s`), and `deadline_s` bounds it all.
    """

    def __init__(
        self,
        request: GenerationRequest,
        output: OutputText,
        progress: Progress,
        emit: Callable[[Event], None],
        count_rerun: Callable[[str], None],
        *,
        registry: Registry,
        router: Router,
        channels: WorkerChannels,
        terms: RunTerms,
    ) -> None:
        """`count_rerun` is told why a run was interrupted, "lost" or "preempted", each time there is another one."""
        self.request = request
        self._output = output
        self._progress = progress
        self._emit = emit
        self._count_rerun = count_rerun
        self._registry = registry
        self._router = router
        self._channels = channels
        self._terms = terms
        self._born = time.monotonic()
        self._first_token: float | None = None
        self._last_token = self._born
        self._runs: list[Attempt] = []
        self._waiting = ""  # for what, between two runs
        self._interrupted: Final | None = None
        self._running = False
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[Final], None]) -> None:
        """Begins to run. `on_end` is called just before the final event is emitted."""
        self._task = asyncio.create_task(self._live(on_end), name=f"request {self.request.request_id}")

    def abort(self, final: Final | None = None) -> None:
        """Ends the request early with `final` (as cancelled by the client if absent). No effect after the end."""
        if self._task is not None and self._interrupted is None and not self._task.done():
            self._interrupted = final or Done(common_pb2.FINISH_REASON_ABORTED, self._usage())
            if self._running:  # a task cancelled before its first step would never emit its final event
                self._task.cancel()

    async def closed(self) -> None:
        """Waits until the request has ended."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _live(self, on_end: Callable[[Final], None]) -> None:
        self._running = True
        timer = asyncio.get_running_loop().call_later(self._terms.deadline_s, self._expire)
        final: Final
        try:
            final = self._interrupted or await self._serve()
        except RequestFailed as error:
            failure = error.failure
            final = Failure(failure.kind, f"request {self.request.request_id}: {failure.message}", failure.param)
        except asyncio.CancelledError:
            final = self._interrupted or Done(common_pb2.FINISH_REASON_ABORTED, self._usage())
        except Exception as error:
            log.exception("request %s failed", self.request.request_id)
            final = Failure(FailureKind.INTERNAL, f"request {self.request.request_id}: {type(error).__name__}: {error}")
        timer.cancel()
        on_end(final)
        self._emit(final)

    async def _serve(self) -> Done:
        failures = 0
        avoid: set[str] = set()  # epochs of leaders whose replicas failed this request
        left = self._progress.next_run()
        while True:
            run = Attempt(
                left,
                self._deliver,
                registry=self._registry,
                router=self._router,
                channels=self._channels,
                avoid=avoid,
                timeout_s=self._rpc_timeout(),
            )
            self._runs.append(run)
            self._waiting = ""
            try:
                return self._done(await run.run())
            except (Preempted, RequestFailed) as error:
                interruption = error
            if (end := self._progress.end()) is not None:
                return self._done(end)
            if isinstance(interruption, RequestFailed):
                if interruption.failure.kind is not FailureKind.UNAVAILABLE or failures >= self._terms.max_reruns:
                    raise interruption
                failures += 1
                avoid |= run.used
            log.warning("request %s goes on elsewhere: %s", self.request.request_id, interruption)
            left = self._progress.next_run()
            await self._find_replicas(left, avoid, str(interruption))
            self._count_rerun("preempted" if isinstance(interruption, Preempted) else "lost")

    async def _find_replicas(self, left: GenerationRequest, avoid: set[str], cause: str) -> None:
        """Waits until some prefill and decode replicas can go on with what is left.

        Those which failed it are waited out for a moment: a worker that is going away may still look ready.
        """
        started, patience = time.monotonic(), self._terms.rerun_wait_s
        while True:
            waited = time.monotonic() - started
            passed_over = avoid if waited < min(_ELSEWHERE_S, patience) else ()
            if self._router.can_run(left.total_tokens, len(left.prompt), passed_over):
                return
            if waited >= patience:
                raise unavailable(
                    f"{cause}; within {patience:g} s (runtime.rerun_wait_s) no groups were ready that "
                    f"could go on with its {len(left.prompt)} tokens"
                )
            self._waiting = f"waiting for groups to go on with, because {cause}"
            await asyncio.sleep(_POLL_S)

    def _deliver(self, tokens: Sequence[common_pb2.Token]) -> bool:
        self._last_token = time.monotonic()
        self._first_token = self._first_token or self._last_token
        self._progress.deliver(tokens)
        self._emit(self._output.push(tokens))
        return self._output.stopped

    def _done(self, reason: common_pb2.FinishReason.ValueType) -> Done:
        text = self._output.finish(reason)
        if self._output.stopped or self._output.stop_reason is not None:
            reason = common_pb2.FINISH_REASON_STOP
        return Done(reason, self._usage(), text, self._output.stop_reason)

    def _usage(self) -> client_pb2.Usage:
        started = self._first_token
        return client_pb2.Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self._output.count,
            cached_tokens=next((run.cached_tokens for run in self._runs if run.cached_tokens is not None), 0),
            ttft_seconds=0.0 if started is None else started - self._born,
            decode_seconds=0.0 if started is None else self._last_token - started,
        )

    def _stage(self) -> str:
        return self._waiting or (self._runs[-1].stage if self._runs else "being admitted")

    def _rpc_timeout(self) -> float:
        """Workers' deadlines lie behind our own, whose message tells more; they matter when this process is gone."""
        return max(0.0, self._born + self._terms.deadline_s - time.monotonic()) + _RPC_SLACK_S

    def _expire(self) -> None:
        self.abort(
            Failure(
                FailureKind.DEADLINE,
                f"request {self.request.request_id} did not end within {self._terms.deadline_s:g} s "
                f"(runtime.request_timeout_s); it was {self._stage()}",
            )
        )
