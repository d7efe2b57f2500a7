"""The DecodeService over real gRPC, with the real loop and model behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from decode_node.commands import RankEndpoint
from decode_node.sessions import DecodeSessions, SessionTerms
from tests.checkpoints import random_checkpoint
from tests.decode_node.local_node import LocalNode
from tests.oracle import Oracle, assert_tokens_match

PROMPT = [5, 9, 200, 31, 7, 44]
TERMS: dict[str, Any] = {"group": "decode-0", "dp_rank": 0, "reservation_s": 30.0, "request_timeout_s": 60.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model") / "m", "glm_moe_dsa")


@dataclass
class Service:
    """A node behind a gRPC server, with a client."""

    node: LocalNode
    sessions: DecodeSessions
    stub: worker_pb2_grpc.DecodeServiceAsyncStub
    first_tokens: dict[str, int] = field(default_factory=dict)

    def prefill(self, rid: str, prompt: Sequence[int]) -> None:
        self.first_tokens[rid] = self.node.prefill(rid, prompt)

    async def open(self, rid: str, prompt: Sequence[int] = PROMPT, **sampling: Any) -> Any:
        """A session with its admit sent."""
        call = self.stub.DecodeSession(timeout=30)
        sampling = {"max_tokens": 8, "ignore_eos": True, **sampling}
        admit = worker_pb2.Admit(request_id=rid, prompt=prompt, sampling=common_pb2.SamplingParams(**sampling))
        await call.write(worker_pb2.DecodeSessionRequest(admit=admit))
        return call

    async def send_first(self, call: Any, rid: str, **token: Any) -> None:
        first = common_pb2.Token(**{"id": self.first_tokens[rid], **token})
        await call.write(worker_pb2.DecodeSessionRequest(prefilled=worker_pb2.Prefilled(first_token=first)))

    async def emptied(self) -> None:
        """Returns once every pool is empty; fails after 5 s."""
        async with asyncio.timeout(5):
            while any(usage.used for usage in self.node.scheduler.usage().values()):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(node: LocalNode) -> AsyncIterator[Service]:
    server = grpc.aio.server()
    limit = node.geometry.max_request_tokens
    sessions = DecodeSessions(SessionTerms(**TERMS, max_request_tokens=limit, eos_token_ids=frozenset({1})))
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(sessions, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sessions.open(node.inbox, [RankEndpoint("tcp://10.0.0.1:7000", "epoch-1")])

    def run_loop() -> None:
        with suppress(RuntimeError):  # what the clients of a failed worker hear of it is what a test looks at
            node.loop.run()

    engine = threading.Thread(target=run_loop)
    engine.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Service(node, sessions, worker_pb2_grpc.DecodeServiceStub(channel))
    finally:
        node.loop.stop()
        engine.join(5)
        await server.stop(0)


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Runs a scenario against a fresh node."""

    def go(scenario: Callable[[Service], Awaitable[None]], **decode: int) -> None:
        async def body() -> None:
            async with serving(LocalNode(checkpoint, tmp_path, **decode)) as service:
                await scenario(service)

        asyncio.run(body())

    yield go


async def answer(call: Any) -> tuple[list[int], int]:
    """Token ids after the destination, and the finish reason."""
    tokens: list[int] = []
    while (event := await call.read()).WhichOneof("event") == "tokens":
        tokens.extend(token.id for token in event.tokens.tokens)
    return tokens, event.finished.reason


async def ended_with(call: Any, code: grpc.StatusCode) -> str:
    """The details of a session that ended with `code`."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        while (event := await call.read()) is not grpc.aio.EOF:
            assert event.WhichOneof("event") != "finished"
    assert error.value.code() is code
    return str(error.value.details())


def test_one_request_from_admission_to_its_last_token(run: Callable[..., None], checkpoint: Path) -> None:
    async def scenario(service: Service) -> None:
        service.prefill("r1", PROMPT)
        call = await service.open("r1")
        destination = (await call.read()).destination
        assert (destination.request_id, destination.group, destination.tp_size) == ("r1", "decode-0", 1)
        assert [(e.tp_rank, e.address, e.epoch) for e in destination.endpoints] == [
            (0, "tcp://10.0.0.1:7000", "epoch-1")
        ]
        assert destination.lease_ms == 30_000
        assert destination.generation == 1
        await service.send_first(call, "r1")
        tokens, reason = await answer(call)
        assert_tokens_match(tokens, Oracle(checkpoint).greedy(PROMPT, 8))
        assert reason == common_pb2.FINISH_REASON_LENGTH
        assert await call.code() is grpc.StatusCode.OK
        await service.emptied()

    run(scenario)


def test_log_probabilities_pass_through(run: Callable[..., None]) -> None:
    async def scenario(service: Service) -> None:
        service.prefill("r1", PROMPT)
        call = await service.open("r1", max_tokens=3, logprobs=2)
        await call.read()
        await service.send_first(call, "r1", logprob=-0.5, top=[common_pb2.TokenLogprob(token_id=4, logprob=-0.5)])
        tokens = []
        while (event := await call.read()).WhichOneof("event") == "tokens":
            tokens.extend(event.tokens.tokens)
        assert tokens[0].logprob == -0.5
        assert [(item.token_id, item.logprob) for item in tokens[0].top] == [(4, -0.5)]
        for token in tokens[1:]:
            assert len(token.top) == 2
            assert token.top[0].token_id == token.id  # greedy
            assert token.top[0].logprob == token.logprob < 0

    run(scenario)


@pytest.mark.parametrize(
    ("moment", "how"),
    [("waiting", "cancel"), ("reserved", "cancel"), ("running", "cancel"), ("waiting", "close"), ("reserved", "close")],
)
def test_a_session_that_ends_frees_its_request(run: Callable[..., None], moment: str, how: str) -> None:
    async def scenario(service: Service) -> None:
        for rid in ("r1", "other"):
            service.prefill(rid, PROMPT)
        other = await service.open("other", max_tokens=200) if moment == "waiting" else None
        if other is not None:
            await other.read()
        call = await service.open("r1", max_tokens=300)
        if moment != "waiting":
            await call.read()
        if moment == "running":
            await service.send_first(call, "r1")
            await call.read()
        if how == "cancel":
            call.cancel()
        else:
            await call.done_writing()
            text = await ended_with(call, grpc.StatusCode.INVALID_ARGUMENT)
            assert text == "request r1: after admit the session must bring prefilled, but it was closed"
        if other is not None:
            other.cancel()
        await service.emptied()
        again = await service.open("r1", max_tokens=2)
        await again.read()
        await service.send_first(again, "r1")
        assert len((await answer(again))[0]) == 2

    run(scenario, max_requests=1)


def test_half_closing_after_prefilled_is_no_end(run: Callable[..., None]) -> None:
    async def scenario(service: Service) -> None:
        service.prefill("r1", PROMPT)
        call = await service.open("r1")
        await call.read()
        await service.send_first(call, "r1")
        await call.done_writing()
        assert len((await answer(call))[0]) == 8

    run(scenario)


def test_a_duplicate_id_is_refused_and_hurts_nobody(run: Callable[..., None]) -> None:
    async def scenario(service: Service) -> None:
        service.prefill("r1", PROMPT)
        call = await service.open("r1")
        await call.read()
        twin = await service.open("r1")
        text = await ended_with(twin, grpc.StatusCode.ALREADY_EXISTS)
        assert text == "request r1: a request with this id has not left yet"
        await service.send_first(call, "r1")
        assert len((await answer(call))[0]) == 8

    run(scenario)


def test_errors_name_the_request_and_carry_their_status(run: Callable[..., None]) -> None:
    async def scenario(service: Service) -> None:
        for rid in ("r1", "r2"):
            service.prefill(rid, PROMPT)
        held = await service.open("r1")
        await held.read()
        queued = await service.open("r2")
        refused = await service.open("r3")
        assert "1 requests already wait" in await ended_with(refused, grpc.StatusCode.RESOURCE_EXHAUSTED)
        long = await service.open("r4", max_tokens=100_000)
        assert "6 prompt tokens + max_tokens = 100000" in await ended_with(long, grpc.StatusCode.INVALID_ARGUMENT)
        wrong = await service.open("r5", temperature=-1.0)
        text = await ended_with(wrong, grpc.StatusCode.INVALID_ARGUMENT)
        assert text.startswith("request r5: sampling.temperature is -1.0")
        nameless = await service.open("")
        assert "request_id is empty" in await ended_with(nameless, grpc.StatusCode.INVALID_ARGUMENT)
        backwards = service.stub.DecodeSession(timeout=30)
        await service.send_first(backwards, "r1")
        text = await ended_with(backwards, grpc.StatusCode.INVALID_ARGUMENT)
        assert text == "a decode session must begin with admit, not prefilled"
        held.cancel()
        queued.cancel()
        await service.emptied()

    run(scenario, max_requests=1, max_waiting=1)


def test_a_failed_pull_reaches_the_client_with_its_cause(run: Callable[..., None]) -> None:
    async def scenario(service: Service) -> None:
        service.node.refuse_pulls = "prefill-0/tp0 disconnected"
        service.prefill("r1", PROMPT)
        call = await service.open("r1")
        text = await ended_with(call, grpc.StatusCode.ABORTED)
        assert text == "request r1: decode rank 0 could not pull its KV: prefill-0/tp0 disconnected"
        await service.emptied()

    run(scenario)


def test_a_draining_worker_ends_what_it_has(run: Callable[..., None], checkpoint: Path) -> None:
    async def scenario(service: Service) -> None:
        service.prefill("r1", PROMPT)
        call = await service.open("r1")
        await call.read()
        service.sessions.close()
        refused = await service.open("r2")
        assert await ended_with(refused, grpc.StatusCode.ABORTED) == "the decode worker is stopping"
        await service.send_first(call, "r1")
        drained = asyncio.create_task(service.sessions.drained(20.0))
        tokens, _ = await answer(call)
        assert_tokens_match(tokens, Oracle(checkpoint).greedy(PROMPT, 8))
        await asyncio.wait_for(drained, 5)

    run(scenario)


def test_a_worker_that_stops_hands_its_sessions_over(run: Callable[..., None]) -> None:
    async def scenario(service: Service) -> None:
        service.prefill("r1", PROMPT)
        call = await service.open("r1")
        await call.read()
        service.node.loop.stop()
        event = await call.read()
        assert event.finished.reason == common_pb2.FINISH_REASON_PREEMPTED

    run(scenario)


def test_a_worker_that_fails_ends_its_sessions_with_the_cause(run: Callable[..., None]) -> None:
    async def scenario(service: Service) -> None:
        service.prefill("r1", PROMPT)
        call = await service.open("r1")
        await call.read()
        service.node.rank.source.failure = "its socket is gone"
        text = await ended_with(call, grpc.StatusCode.ABORTED)
        assert text == "request r1: the decode worker failed: the puller died: its socket is gone"

    run(scenario)
