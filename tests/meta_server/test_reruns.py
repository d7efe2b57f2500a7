"""Requests whose workers are lost, or need their memory, go on elsewhere; the client's stream never notices."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from sluice.v1 import client_pb2, common_pb2

from engine.sampling_params import SamplingParams
from meta_server.progress import Progress
from meta_server.request import GenerationRequest
from tests.meta_server.deployment import Deployment, deployed
from tests.meta_server.fakes import EOS, FIRST, FakeWorker, until
from tests.meta_server.test_generate import failure_of, ids, read_all

pytestmark = pytest.mark.anyio
TOKENS = [FIRST + index for index in range(8)]


def serve_one_model(*workers: FakeWorker) -> None:
    """On every worker the token after a sequence of n tokens is FIRST + n - 3, however the sequence is divided."""
    for worker in workers:
        worker.prefill.sequence_start = worker.decode.sequence_start = 3


async def two_by_two(deployment: Deployment) -> tuple[FakeWorker, FakeWorker, FakeWorker, FakeWorker]:
    """Two prefill and two decode groups of one model."""
    prefills = deployment.prefill, await deployment.add("prefill", group=1)
    decodes = deployment.decode, await deployment.add("decode", group=1)
    serve_one_model(*prefills, *decodes)
    return *prefills, *decodes


def decode_that_serves(*decodes: FakeWorker) -> FakeWorker:
    return next(worker for worker in decodes if worker.decode.open)


async def test_each_token_is_delivered_once() -> None:
    """Decode breaks after two tokens, every time; four runs of two tokens are one answer of eight."""
    async with deployed(max_reruns=3) as deployment:
        await two_by_two(deployment)
        for worker in deployment.workers:
            worker.decode.script.break_after = 2
        responses = await read_all(deployment.generate([5, 6, 7], max_tokens=8, min_tokens=5, logprobs=1))
        assert ids(responses) == TOKENS
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (responses[-1].usage.prompt_tokens, responses[-1].usage.completion_tokens) == (3, 8)
        runs = sorted((a for w in deployment.workers for a in w.decode.admitted), key=lambda a: len(a.prompt))
        assert [list(run.prompt) for run in runs] == [[5, 6, 7, *TOKENS[:done]] for done in (0, 2, 4, 6)]
        assert [run.sampling.max_tokens for run in runs] == [8, 6, 4, 2]
        assert [run.sampling.min_tokens for run in runs] == [5, 3, 1, 0]
        assert [run.resumed for run in runs] == [False, True, True, True]
        assert len({run.sampling.seed for run in runs}) == 1
        assert len({run.request_id for run in runs}) == 4, "workers may still clean up after an earlier run"
        totals = deployment.server.frontend.status().counters
        assert (totals["reruns_lost"], totals["requests_finished"], totals["requests_failed"]) == (3, 1, 0)
        await until(deployment.idle, "idle after the answer")


async def test_a_lost_decode_worker_is_replaced() -> None:
    async with deployed(max_reruns=1) as deployment:
        *_, first, second = await two_by_two(deployment)
        for worker in (first, second):
            worker.decode.script.tokens = TOKENS[:3]
            worker.decode.script.hold = "finished"
        call = deployment.generate([5, 6, 7], max_tokens=8)
        got = ids([await call.read() for _ in range(3)])
        serving = decode_that_serves(first, second)
        other = second if serving is first else first
        other.decode.script.tokens, other.decode.script.hold = TOKENS, ""
        await serving.die()
        rest = await read_all(call)
        assert got + ids(rest) == TOKENS
        assert list(other.decode.admitted[-1].prompt) == [5, 6, 7, *TOKENS[:3]]


async def test_a_lost_prefill_worker_is_replaced() -> None:
    async with deployed(max_reruns=1) as deployment:
        first, second, *_ = await two_by_two(deployment)
        first.prefill.hold = second.prefill.hold = True
        call = deployment.generate([5, 6, 7], max_tokens=8)
        reading = asyncio.ensure_future(read_all(call))
        await until(lambda: first.prefill.open + second.prefill.open == 1, "prefill runs")
        serving, other = (first, second) if first.prefill.open else (second, first)
        other.prefill.hold = False
        await serving.die()
        assert ids(await reading) == TOKENS
        await until(deployment.idle, "idle after the answer")


async def test_a_failed_transfer_is_tried_on_other_workers() -> None:
    """Prefill died and decode noticed first: the session ends as ABORTED, before any token."""
    async with deployed(max_reruns=1) as deployment:
        first_prefill, second_prefill, first, second = await two_by_two(deployment)
        for worker in (first, second):
            worker.decode.script.delay_s = 0.2
            worker.decode.script.break_before_prefilled = worker.decode.script.break_with
        call = deployment.generate([5, 6, 7], max_tokens=8)
        reading = asyncio.ensure_future(read_all(call))
        await until(lambda: bool(first.decode.admitted or second.decode.admitted), "admitted")
        (second if first.decode.admitted else first).decode.script.break_before_prefilled = None
        assert ids(await reading) == TOKENS
        assert len(first.decode.admitted) == len(second.decode.admitted) == 1
        assert len(first_prefill.prefill.requests) == len(second_prefill.prefill.requests) == 1


@pytest.mark.parametrize("stage", ["destination", "prefill", "tokens"])
async def test_preempted_requests_go_on_and_are_not_counted_as_failures(stage: str) -> None:
    async with deployed(max_reruns=0) as deployment:
        serve_one_model(deployment.prefill, deployment.decode)
        deployment.decode.decode.script.preempt = {stage: 3}
        responses = await read_all(deployment.generate([5, 6, 7], max_tokens=8))
        assert ids(responses) == TOKENS
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert len(deployment.decode.decode.admitted) == 4
        assert deployment.server.frontend.status().counters["reruns_preempted"] == 3
        await until(deployment.idle, "idle after the answer")


@pytest.mark.parametrize(
    "status",
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "needs 9 blocks of 8"),
        (grpc.StatusCode.INTERNAL, "logits of request x are NaN"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "not finished in time"),
    ],
)
async def test_errors_of_the_request_itself_are_never_run_again(status: tuple[grpc.StatusCode, str]) -> None:
    async with deployed(max_reruns=3) as deployment:
        script = deployment.decode.decode.script
        script.break_after, script.break_with = 2, status
        error = await failure_of(deployment.generate([5, 6, 7], max_tokens=8))
        assert error.code() is status[0]
        assert len(deployment.decode.decode.admitted) == 1


async def test_runs_are_bounded() -> None:
    async with deployed(max_reruns=2, rerun_wait_s=0.2) as deployment:
        deployment.decode.decode.script.break_after = 0
        error = await failure_of(deployment.generate([5, 6, 7], max_tokens=8))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "pull of layer 1 failed" in error.details()
        assert len(deployment.decode.decode.admitted) == 3


async def test_with_nobody_left_the_wait_is_bounded() -> None:
    async with deployed(max_reruns=3, rerun_wait_s=0.5) as deployment:
        script = deployment.decode.decode.script
        script.tokens, script.hold = TOKENS[:1], "finished"
        call = deployment.generate([5, 6, 7], max_tokens=8)
        await call.read()
        await deployment.decode.die()
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "decode-0/dp0/tp0 was lost" in error.details() and "runtime.rerun_wait_s" in error.details()


async def test_a_worker_that_comes_back_takes_its_request_on() -> None:
    """The same worker id with a new epoch, at a new address."""
    async with deployed(max_reruns=1, rerun_wait_s=10.0) as deployment:
        serve_one_model(deployment.prefill, deployment.decode)
        script = deployment.decode.decode.script
        script.tokens, script.hold = TOKENS[:2], "finished"
        call = deployment.generate([5, 6, 7], max_tokens=8)
        got = ids([await call.read(), await call.read()])
        await deployment.decode.die()
        await asyncio.sleep(0.3)
        serve_one_model(await deployment.add("decode", epoch="decode-0/dp0/tp0@2"))
        assert got + ids(await read_all(call)) == TOKENS


async def test_a_cancel_while_waiting_for_a_worker_ends_the_request() -> None:
    async with deployed(max_reruns=1, rerun_wait_s=30.0) as deployment:
        script = deployment.decode.decode.script
        script.tokens, script.hold = TOKENS[:1], "finished"
        call = deployment.generate([5, 6, 7], max_tokens=8)
        await call.read()
        await deployment.decode.die()
        await asyncio.sleep(0.2)
        assert deployment.in_flight == 1
        call.cancel()
        await until(deployment.idle, "idle after the cancel")


async def test_the_deadline_bounds_the_wait_and_names_it() -> None:
    async with deployed(max_reruns=1, rerun_wait_s=30.0, request_timeout_s=0.8) as deployment:
        script = deployment.decode.decode.script
        script.tokens, script.hold = TOKENS[:1], "finished"
        call = deployment.generate([5, 6, 7], max_tokens=8)
        await call.read()
        await deployment.decode.die()
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "waiting for groups to go on with" in error.details()


@pytest.mark.parametrize("last", [FIRST + 7, EOS])
async def test_a_worker_lost_after_the_last_token_changes_nothing(last: int) -> None:
    """Field failure B24: also when that token ends the answer before max_tokens."""
    async with deployed(max_reruns=1, rerun_wait_s=0.2) as deployment:
        tokens = TOKENS[:3] if last == EOS else TOKENS[:7]
        script = deployment.decode.decode.script
        script.tokens, script.hold = [*tokens, last], "finished"
        call = deployment.generate([5, 6, 7], max_tokens=8)
        responses: list[client_pb2.GenerateResponse] = []
        while len(ids(responses)) < len(script.tokens):
            responses.append(await call.read())
        await deployment.decode.die()
        responses += await read_all(call)
        assert ids(responses) == script.tokens
        stop, length = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
        assert responses[-1].finish_reason == (stop if last == EOS else length)


def test_what_is_left_of_a_request_is_a_request_of_its_own() -> None:
    request = GenerationRequest("r", "r-1", (5, 6), SamplingParams(max_tokens=4, min_tokens=2, seed=3))
    progress = Progress(request, {EOS})
    assert progress.next_run() is request
    progress.deliver([common_pb2.Token(id=7), common_pb2.Token(id=8), common_pb2.Token(id=9)])
    left = progress.next_run()
    assert (left.request_id, left.prompt, left.resumed) == ("r", (5, 6, 7, 8, 9), True)
    assert (left.sampling.max_tokens, left.sampling.min_tokens, left.sampling.seed) == (1, 0, 3)
    assert left.total_tokens == request.total_tokens
    assert progress.end() is None
    progress.deliver([common_pb2.Token(id=10)])
    assert progress.end() == common_pb2.FINISH_REASON_LENGTH
