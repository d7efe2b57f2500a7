"""The PrefillService over a real gRPC server and a running engine thread."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import grpc
import pytest
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from prefill_node.block_keys import block_keys
from prefill_node.service import PrefillCalls


def request(request_id="a", tokens=20, **changes):
    destination = worker_pb2.Destination(request_id=request_id, generation=1, lease_ms=30_000)
    fields = {
        "request_id": request_id,
        "prompt": [2 + index % 300 for index in range(tokens)],
        "sampling": common_pb2.SamplingParams(max_tokens=4),
        "destination": destination,
    }
    return worker_pb2.PrefillRequest(**(fields | changes))


class Served:
    """A rig whose leader runs on its engine thread behind the service."""

    def __init__(self, rig):
        self.rig = rig
        self.calls = PrefillCalls(vocab_size=320, request_timeout_s=60.0, keys=partial(block_keys, rig.layout))

    async def __aenter__(self):
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self.calls, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = worker_pb2_grpc.PrefillServiceStub(self.channel)
        self.engine = threading.Thread(target=self.rig.leader.run)
        self.engine.start()
        self.calls.open(self.rig.leader)
        return self

    async def __aexit__(self, *_):
        self.rig.leader.stop()
        await self.channel.close()
        await self.server.stop(0.1)
        await asyncio.to_thread(self.engine.join, 10)
        assert not self.engine.is_alive()

    async def failure(self, message):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.stub.Prefill(message, timeout=20)
        return caught.value.code(), caught.value.details()

    async def idle(self):
        deadline = time.monotonic() + 5
        while (snapshot := self.rig.leader.snapshot()).running or snapshot.waiting or self.rig.used_blocks():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


def test_a_prompt_is_answered_with_its_first_token(make_rig):
    async def scenario():
        async with Served(make_rig()) as served:
            sampling = common_pb2.SamplingParams(max_tokens=4, logprobs=2)
            response = await served.stub.Prefill(request(sampling=sampling), timeout=20)
            assert response.first_token.HasField("logprob")
            assert len(response.first_token.top) == 2
            assert response.first_token.id == response.first_token.top[0].token_id
            assert response.compute_seconds > 0
            await served.idle()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [5, 320]}, "token 320 is not below 320"),
        ({"destination": worker_pb2.Destination(request_id="b")}, "destination.request_id is 'b'"),
        ({"sampling": common_pb2.SamplingParams(max_tokens=0)}, "sampling.max_tokens"),
        ({"tokens": 2000}, "2000 prompt tokens"),
    ],
)
def test_bad_requests_are_refused_and_hold_nothing(make_rig, changes, text):
    async def scenario():
        async with Served(make_rig()) as served:
            code, details = await served.failure(request(**changes))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert text in details
            await served.idle()

    asyncio.run(scenario())


def test_a_request_without_an_id_is_refused(make_rig):
    async def scenario():
        async with Served(make_rig()) as served:
            assert (await served.failure(request("")))[0] is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_a_call_that_ends_early_cancels_its_request(make_rig):
    async def scenario():
        rig = make_rig(budget=16)
        rig.reader.delay_s = 0.05  # every layer waits for the one before: the prompt takes seconds
        async with Served(rig) as served:
            call = served.stub.Prefill(request(tokens=600))
            while not rig.leader.snapshot().running:
                await asyncio.sleep(0.01)
            call.cancel()
            await served.idle()
            assert rig.leader.snapshot().counters.steps < 30
        rig.settle()
        assert rig.pool.leased == set() and rig.pool.objects.keys() == rig.pool.finished

    asyncio.run(scenario())


def test_an_id_in_use_is_refused_without_harm_to_its_owner(make_rig):
    async def scenario():
        rig = make_rig(budget=16)
        rig.reader.delay_s = 0.02
        async with Served(rig) as served:
            first = served.stub.Prefill(request(tokens=100), timeout=20)
            while not rig.leader.snapshot().running:
                await asyncio.sleep(0.01)
            assert (await served.failure(request()))[0] is grpc.StatusCode.ALREADY_EXISTS
            assert (await first).compute_seconds > 0

    asyncio.run(scenario())


def test_a_full_queue_refuses_with_resource_exhausted(make_rig):
    """Who waits already is not touched; the meta server makes a 429 of it."""

    async def scenario():
        rig = make_rig(budget=16, max_requests=1, max_waiting=1)
        rig.reader.delay_s = 0.02
        async with Served(rig) as served:
            running = served.stub.Prefill(request("running", 100), timeout=20)
            while not rig.leader.snapshot().running:
                await asyncio.sleep(0.01)
            waiting = served.stub.Prefill(request("waiting", 20), timeout=20)
            while not rig.leader.snapshot().waiting:
                await asyncio.sleep(0.01)
            code, details = await served.failure(request("late", 20))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "1 requests are waiting already (prefill.max_waiting)" in details
            assert (await running).compute_seconds > 0 < (await waiting).compute_seconds
            await served.idle()

    asyncio.run(scenario())


def test_calls_before_the_worker_is_ready_are_unavailable(make_rig):
    async def scenario():
        async with Served(make_rig()) as served:
            served.calls._leader = None
            code, details = await served.failure(request())
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "still loading" in details

    asyncio.run(scenario())


def test_a_draining_worker_ends_what_it_has(make_rig):
    async def scenario():
        rig = make_rig(budget=16)
        rig.reader.delay_s = 0.02
        async with Served(rig) as served:
            call = served.stub.Prefill(request(tokens=100), timeout=20)
            while not rig.leader.snapshot().running:
                await asyncio.sleep(0.01)
            served.calls.close()
            assert served.calls.open_calls == 1
            code, details = await served.failure(request("b"))
            assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the prefill worker is stopping")
            assert (await call).compute_seconds > 0
            assert served.calls.open_calls == 0

    asyncio.run(scenario())


def test_a_stopping_worker_answers_its_calls(make_rig):
    async def scenario():
        rig = make_rig(budget=16)
        rig.reader.delay_s = 0.05
        async with Served(rig) as served:
            call = asyncio.create_task(served.failure(request(tokens=600)))
            while not rig.leader.snapshot().running:
                await asyncio.sleep(0.01)
            rig.leader.stop()
            code, details = await call
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "stopping" in details

    asyncio.run(scenario())
