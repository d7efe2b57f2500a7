"""Where gRPC and HTTP meet: checks requests, runs them, and knows which ones are running."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from sluice.v1 import client_pb2

from engine.trust import PLAIN, Trust
from meta_server.channels import WorkerChannels
from meta_server.errors import Failure, FailureKind, RequestFailed, invalid, unavailable
from meta_server.lifecycle import Generation
from meta_server.metrics import Metrics
from meta_server.output import OutputText
from meta_server.progress import Progress
from meta_server.registry import DECODE, PREFILL, Registry
from meta_server.request import Event, Final, GenerationRequest, RunTerms
from meta_server.router import Router
from meta_server.validation import Capacity, RequestValidator


class Frontend:
    """Admits requests while the deployment is up.

    A request that comes while the last group is being replaced is taken and waits, as those that it ran do; for
    `rerun_wait_s` at most (test_a_request_waits_for_a_group_that_is_being_replaced).

    Invariant: two running requests never share an id; an id is free again before its final event is seen
    (test_running_request_id_is_refused, test_id_can_be_reused_right_after_the_end).
    """

    def __init__(
        self,
        validator: RequestValidator,
        registry: Registry,
        metrics: Metrics,
        terms: RunTerms,
        router: Router | None = None,
        trust: Trust = PLAIN,
    ) -> None:
        self.validator = validator
        self.registry = registry
        self.metrics = metrics
        self.channels = WorkerChannels(trust)
        self.router = router or Router(registry)
        self._terms = terms
        self._running: dict[str, Generation] = {}
        self._stopping = False
        self._draining = False
        self._born = time.monotonic()

    @property
    def ready(self) -> bool:
        return self.registry.ready and not (self._draining or self._stopping)

    @property
    def draining(self) -> bool:
        """Requests are still served, but clients should go elsewhere."""
        return self._draining

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def capacity(self) -> Capacity:
        """What the largest ready replicas can hold."""
        prompts = [replica.max_request_tokens for replica in self.registry.replicas(PREFILL)]
        totals = [replica.max_request_tokens for replica in self.registry.replicas(DECODE)]
        return Capacity(max(prompts, default=None), max(totals, default=None))

    def status(self) -> client_pb2.GetStatusResponse:
        """One snapshot of the deployment."""
        return client_pb2.GetStatusResponse(
            model=self.validator.name,
            max_model_len=self.validator.max_model_len,
            workers=self.registry.states(),
            requests_in_flight=self.in_flight,
            uptime_seconds=time.monotonic() - self._born,
            ready=self.ready,
            counters=self.metrics.totals(),
            pools=self.registry.pools(),
        )

    def drain(self) -> None:
        """Not ready any more; requests that come nevertheless are served."""
        self._draining = True

    async def shutdown(self) -> None:
        """Refuses new requests and ends the running ones with an error."""
        self._stopping = True
        running = list(self._running.values())
        for generation in running:
            generation.abort(
                Failure(
                    FailureKind.UNAVAILABLE,
                    f"request {generation.request.request_id}: the meta server is shutting down",
                )
            )
        for generation in running:
            await generation.closed()
        await self.channels.close()

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises RequestFailed, and counts a refusal, when one of `requests` cannot start now; starts nothing."""
        try:
            self._check_admission(requests)
        except RequestFailed:
            self.metrics.refused()
            raise

    def _check_admission(self, requests: Sequence[GenerationRequest]) -> None:
        if self._stopping:
            raise unavailable("the meta server is shutting down")
        ids = Counter(request.request_id for request in requests)
        for request_id, count in ids.items():
            if count > 1 or request_id in self._running:
                raise invalid("request_id", f"{request_id!r} is running; wait for its end or choose another id")
        if not self.registry.ready_within(self._terms.rerun_wait_s):
            raise unavailable(f"no complete {self.registry.missing()} group is ready")

    def start(self, request: GenerationRequest, emit: Callable[[Event], None]) -> Generation:
        """Runs an admitted request; its events go to `emit`."""
        validator = self.validator
        generation = Generation(
            request,
            OutputText(validator.tokenizer, request.sampling, validator.model.eos_token_ids),
            Progress(request, validator.model.eos_token_ids),
            emit,
            self.metrics.rerun,
            registry=self.registry,
            router=self.router,
            channels=self.channels,
            terms=self._terms,
        )

        def on_end(final: Final) -> None:
            del self._running[request.request_id]
            self.metrics.in_flight.set(self.in_flight)
            self.metrics.ended(final)

        self._running[request.request_id] = generation
        self.metrics.in_flight.set(self.in_flight)
        generation.start(on_end)
        return generation
