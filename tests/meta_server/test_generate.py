"""One request over gRPC through fake workers: order, ends, and what is left afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from sluice.v1 import client_pb2, common_pb2

from meta_server.errors import Failure
from meta_server.request import Done, Event, TokenChunk
from meta_server.validation import Capacity, SamplingFields
from tests.meta_server.deployment import deployed
from tests.meta_server.fakes import EOS, FIRST, until

pytestmark = pytest.mark.anyio


async def read_all(call: Any) -> list[client_pb2.GenerateResponse]:
    """Reads to the end with `read`, which may follow other reads."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    return caught.value


def ids(responses: list[client_pb2.GenerateResponse]) -> list[int]:
    return [token.id for response in responses for token in response.tokens]


async def test_tokens_come_in_order_with_one_final_message() -> None:
    async with deployed() as deployment:
        responses = await read_all(deployment.generate([5, 6, 7], max_tokens=5))
        assert ids(responses) == [FIRST, FIRST + 1, FIRST + 2, FIRST + 3, FIRST + 4]
        assert [response.finish_reason for response in responses[:-1]] == [0] * (len(responses) - 1)
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        usage = responses[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 5, 3)
        assert 0 < usage.ttft_seconds < 5 and usage.decode_seconds >= 0
        assert len({response.request_id for response in responses}) == 1


async def test_prefill_gets_the_destination_and_both_workers_the_same_request() -> None:
    async with deployed() as deployment:
        await read_all(deployment.generate([5, 6, 7], temperature=0.7, top_k=5))
        (prefill,), (admit,) = deployment.prefill.prefill.requests, deployment.decode.decode.admitted
        assert prefill.destination.generation == 7
        assert prefill.request_id == admit.request_id == prefill.destination.request_id
        assert list(prefill.prompt) == list(admit.prompt) == [5, 6, 7]
        assert prefill.sampling == admit.sampling
        assert admit.sampling.HasField("seed"), "the meta server chooses a seed, once"


async def test_first_token_that_ends_the_answer() -> None:
    async with deployed() as deployment:
        deployment.prefill.prefill.first_token = 2
        responses = await read_all(deployment.generate([5]))
        assert ids(responses) == [2]
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP


async def test_accounting_returns_to_zero() -> None:
    async with deployed() as deployment:
        await asyncio.gather(*(read_all(deployment.generate([5] * n)) for n in range(1, 30)))
        await until(deployment.idle, "idle after answers")
        deployment.decode.decode.script.break_after = 2
        for _ in range(3):
            await failure_of(deployment.generate([5]))
        await until(deployment.idle, "idle after failures")


async def test_running_request_id_is_refused() -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.hold = "finished"
        first = deployment.generate([5], request_id="mine")
        await first.read()
        error = await failure_of(deployment.generate([5], request_id="mine"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in error.details() and "'mine' is running" in error.details()
        first.cancel()
        await until(deployment.idle, "idle after the cancel")


async def test_id_can_be_reused_right_after_the_end() -> None:
    async with deployed() as deployment:
        for _ in range(20):
            assert len(ids(await read_all(deployment.generate([5], request_id="again")))) == 4
        wire_ids = [admit.request_id for admit in deployment.decode.decode.admitted]
        assert len(set(wire_ids)) == 20, "workers may still clean up after the last use of an id"
        assert all(wire_id.startswith("again-") for wire_id in wire_ids)


@pytest.mark.parametrize("stage", ["destination", "prefilled", "finished"])
async def test_cancel_at_each_decode_stage(stage: str) -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.hold = stage
        call = deployment.generate([5])
        reading = asyncio.ensure_future(call.read())
        await until(lambda: deployment.decode.decode.open == 1, "admitted")
        await asyncio.sleep(0.1)
        call.cancel()
        await until(deployment.idle, "idle after the cancel")
        assert deployment.decode.decode.cancelled == 1
        await asyncio.wait({reading})


async def test_cancel_during_prefill_cancels_prefill_and_decode() -> None:
    async with deployed() as deployment:
        deployment.prefill.prefill.hold = True
        call = deployment.generate([5])
        await until(lambda: deployment.prefill.prefill.open == 1, "prefill runs")
        call.cancel()
        await until(deployment.idle, "idle after the cancel")
        assert (deployment.prefill.prefill.cancelled, deployment.decode.decode.cancelled) == (1, 1)


async def test_decode_stream_break_cancels_prefill_and_names_worker_and_cause() -> None:
    async with deployed() as deployment:
        deployment.prefill.prefill.hold = True
        script = deployment.decode.decode.script
        script.delay_s = 0.2
        script.break_before_prefilled = (grpc.StatusCode.ABORTED, "lease of the reservation ran out")
        error = await failure_of(deployment.generate([5], request_id="r1"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        for part in ("r1", "decode-0/dp0/tp0", "lease of the reservation ran out"):
            assert part in error.details()
        assert deployment.prefill.prefill.cancelled == 1
        await until(deployment.idle, "idle after the failure")


async def test_prefill_error_ends_the_decode_session_and_names_worker_and_cause() -> None:
    async with deployed() as deployment:
        deployment.prefill.prefill.error = (grpc.StatusCode.UNAVAILABLE, "endpoint tcp://x lost")
        error = await failure_of(deployment.generate([5]))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "prefill-0/tp0" in error.details() and "endpoint tcp://x lost" in error.details()
        await until(deployment.idle, "idle after the failure")
        assert deployment.server.frontend.ready, "an error of a live worker does not make it suspect"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full: decode.max_waiting = 1"),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        ((grpc.StatusCode.INVALID_ARGUMENT, "needs 9 blocks of 8"), grpc.StatusCode.INVALID_ARGUMENT),
        ((grpc.StatusCode.INTERNAL, "logits of request x are NaN"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_worker_codes_reach_the_client(status: tuple[grpc.StatusCode, str], code: grpc.StatusCode) -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.refuse = status
        error = await failure_of(deployment.generate([5]))
        assert error.code() is code
        assert status[1] in error.details()


async def test_decode_that_ends_without_finishing_is_an_error() -> None:
    async with deployed() as deployment:
        script = deployment.decode.decode.script
        script.tokens, script.stop_early = script.tokens[:3], True
        error = await failure_of(deployment.generate([5]))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "without finishing" in error.details()


async def test_deadline_names_the_stage() -> None:
    async with deployed(request_timeout_s=0.4) as deployment:
        deployment.prefill.prefill.hold = True
        error = await failure_of(deployment.generate([5]))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "being prefilled by prefill-0/tp0" in error.details()
        assert "runtime.request_timeout_s" in error.details()
        await until(deployment.idle, "idle after the deadline")


async def test_worker_killed_mid_stream_ends_the_request_and_is_not_used_again() -> None:
    async with deployed() as deployment:
        script = deployment.decode.decode.script
        script.tokens, script.hold = script.tokens[:1], "finished"
        call = deployment.generate([5], max_tokens=2)
        await call.read()
        await deployment.decode.die()
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "decode-0/dp0/tp0 was lost" in error.details()
        error = await failure_of(deployment.generate([5]))
        assert "no complete decode group is ready" in error.details()


async def test_silent_follower_ends_the_requests_of_its_group() -> None:
    async with deployed(workers=False, lost_after_s=0.6) as deployment:
        await deployment.add("prefill", tp_size=2)
        await deployment.add("prefill", tp=1, tp_size=2)
        await deployment.add("decode", tp_size=2)
        follower = await deployment.add("decode", tp=1, tp_size=2)
        script = deployment.decode.decode.script
        script.tokens, script.hold = script.tokens[:1], "finished"
        call = deployment.generate([5])
        await call.read()
        await follower.fall_silent()
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "decode-0/dp0/tp1 was lost: it was silent for more than 0.6 s" in error.details()
        await until(deployment.idle, "idle after the loss")


async def test_no_workers_is_unavailable() -> None:
    async with deployed(workers=False) as deployment:
        error = await failure_of(deployment.generate([5]))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no complete prefill and decode group is ready" in error.details()
        await deployment.add("decode")
        error = await failure_of(deployment.generate([5]))
        assert "no complete prefill group is ready" in error.details()


async def test_shutdown_ends_running_requests_with_an_error() -> None:
    async with deployed() as deployment:
        deployment.decode.decode.script.hold = "finished"
        call = deployment.generate([5])
        await call.read()
        stopping = asyncio.create_task(deployment.server.frontend.shutdown())
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in error.details()
        await stopping


async def test_status_is_one_snapshot() -> None:
    async with deployed() as deployment:
        await read_all(deployment.generate([5]))
        await failure_of(deployment.generate([70000]))
        status = await deployment.client.GetStatus(client_pb2.GetStatusRequest())
        assert (status.model, status.max_model_len, status.ready) == ("passkey", 4096, True)
        assert [(one.info.worker_id, one.health) for one in status.workers] == [
            ("decode-0/dp0/tp0", "ready"),
            ("prefill-0/tp0", "ready"),
        ]
        assert status.counters["requests_finished"] == 1
        assert status.counters["requests_refused"] == 1
        assert status.counters["completion_tokens"] == 4
        assert status.requests_in_flight == 0


@pytest.mark.parametrize("ending", ["length", "stop", "decode", "prefill", "refused", "deadline"])
@pytest.mark.parametrize("abort_after_s", [None, 0.0, 0.002, 0.01, 0.03])
async def test_exactly_one_final_event(ending: str, abort_after_s: float | None) -> None:
    async with deployed(request_timeout_s=0.3 if ending == "deadline" else 60.0) as deployment:
        script = deployment.decode.decode.script
        script.delay_s = 0.005
        match ending:
            case "stop":
                script.tokens[3] = EOS
            case "decode":
                script.break_after = 3
            case "prefill":
                deployment.prefill.prefill.error = (grpc.StatusCode.INTERNAL, "NaN")
            case "refused":
                script.refuse = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            case "deadline":
                script.hold = "finished"
        events: list[Event] = []
        frontend = deployment.server.frontend
        request = frontend.validator.request([5], SamplingFields(max_tokens=6), Capacity())
        generation = frontend.start(request, events.append)
        if abort_after_s is not None:
            if abort_after_s:
                await asyncio.sleep(abort_after_s)
            generation.abort()
            generation.abort()
        await generation.closed()
        *chunks, final = events
        assert isinstance(final, Done | Failure) and all(isinstance(chunk, TokenChunk) for chunk in chunks)
        if abort_after_s is None:
            assert isinstance(final, Done) == (ending in ("length", "stop"))
        generation.abort()
        await until(deployment.idle, "idle after the end")
        assert events[-1] is final
