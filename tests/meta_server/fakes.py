"""Worker processes without a model: real gRPC servers that speak the workers' services."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from sluice.v1 import (
    common_pb2,
    registry_pb2,
    registry_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

from engine.worker import GRPC_OPTIONS
from transfer.layout import kv_layout

EOS = 2
FIRST = 300  # the tokens of every answer count up from here; all are plain text in the demo model's vocabulary
Status = tuple[grpc.StatusCode, str]


def layout(**changes: object) -> registry_pb2.KvLayout:
    fields: dict[str, object] = {
        "fingerprint": "f" * 32,
        "dtype": "float32",
        "block_size": 16,
        "num_layers": 3,
        "kv_lora_rank": 64,
        "rope_dim": 16,
        "index_dim": 32,
        "indexer_layers": [0, 1, 2],
        "protocol": "sdma",
    }
    return kv_layout(**{**fields, **changes})  # type: ignore[arg-type]


def worker_info(
    role: str = "decode", group: int = 0, dp: int = 0, tp: int = 0, **changes: object
) -> registry_pb2.WorkerInfo:
    decode = role == "decode"
    name = f"{role}-{group}" + (f"/dp{dp}" if decode else "") + f"/tp{tp}"
    fields: dict[str, object] = {
        "worker_id": name,
        "role": common_pb2.WORKER_ROLE_DECODE if decode else common_pb2.WORKER_ROLE_PREFILL,
        "group": f"{role}-{group}",
        "dp_rank": dp,
        "tp_rank": tp,
        "tp_size": 1,
        "epoch": f"{name}@1",
        "grpc_address": "127.0.0.1:1",
        "layout": layout(),
        "max_request_tokens": 4096,
        "max_requests": 4,
    }
    return registry_pb2.WorkerInfo(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class DecodeScript:
    """What a fake decode worker answers: `tokens[0]` is ignored in favour of prefill's first token."""

    tokens: list[int] = field(default_factory=lambda: list(range(FIRST, FIRST + 64)))
    batch: int = 1  # tokens per GeneratedTokens
    refuse: Status | None = None  # instead of a destination
    break_after: int | None = None  # tokens, then `break_with`
    break_with: Status = (grpc.StatusCode.ABORTED, "pull of layer 1 failed: read timed out")
    hold: str = ""  # wait for ever before "destination", "prefilled" (after the destination), "finished"
    stop_early: bool = False  # end the stream with OK and no Finished
    break_before_prefilled: Status | None = None
    delay_s: float = 0.0  # between messages
    preempt: dict[str, int] = field(default_factory=dict)  # how often at "destination", "prefill" or "tokens" (2 made)


class FakeDecode(worker_pb2_grpc.DecodeServiceServicer):
    """Serves sessions by the script and counts how they end."""

    def __init__(self) -> None:
        self.script = DecodeScript()
        self.sequence_start: int | None = None  # if set, `script.tokens[0]` follows a prompt of this length
        self.admitted: list[worker_pb2.Admit] = []
        self.open = 0
        self.cancelled = 0

    async def DecodeSession(
        self,
        request_iterator: AsyncIterator[worker_pb2.DecodeSessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.DecodeSessionResponse]:
        self.open += 1
        try:
            async for response in self._session(request_iterator, context):
                yield response
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _session(
        self,
        requests: AsyncIterator[worker_pb2.DecodeSessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.DecodeSessionResponse]:
        script = self.script
        admit = (await anext(requests)).admit
        self.admitted.append(admit)
        if script.refuse is not None:
            await context.abort(*script.refuse)
        if self._preempts("destination"):
            yield _PREEMPTED
            return
        await self._hold("destination")
        destination = worker_pb2.Destination(request_id=admit.request_id, group="decode-0", tp_size=1, generation=7)
        yield worker_pb2.DecodeSessionResponse(destination=destination)
        if self._preempts("prefill"):
            yield _PREEMPTED
            return
        if script.break_before_prefilled is not None:
            await asyncio.sleep(script.delay_s)
            await context.abort(*script.break_before_prefilled)
        prefilled = await anext(requests, None)
        if prefilled is None:  # how a cancelled call looks while its requests are being read
            raise asyncio.CancelledError
        first = prefilled.prefilled.first_token
        await self._hold("prefilled")
        done = 0 if self.sequence_start is None else len(admit.prompt) - self.sequence_start
        tokens = [first, *(self._token(one, admit) for one in script.tokens[done + 1 :])]
        made: list[common_pb2.Token] = []
        reason = common_pb2.FINISH_REASON_LENGTH
        for token in tokens[: admit.sampling.max_tokens]:
            if script.break_after is not None and len(made) >= script.break_after:
                await context.abort(*script.break_with)
            if len(made) == 2 and self._preempts("tokens"):
                yield _PREEMPTED
                return
            made.append(token)
            if token.id in ([] if admit.sampling.ignore_eos else [EOS]) or token.id in admit.sampling.stop_token_ids:
                reason = common_pb2.FINISH_REASON_STOP
                break
            if len(made) % script.batch == 0:
                yield _generated(made[-script.batch :])
                await asyncio.sleep(script.delay_s)
        rest = len(made) % script.batch or (1 if reason == common_pb2.FINISH_REASON_STOP else 0)
        if rest:
            yield _generated(made[-rest:])
        await self._hold("finished")
        if not script.stop_early:
            yield worker_pb2.DecodeSessionResponse(finished=worker_pb2.Finished(reason=reason))

    async def _hold(self, stage: str) -> None:
        if self.script.hold == stage:
            await asyncio.Event().wait()

    def _preempts(self, stage: str) -> bool:
        left = self.script.preempt.get(stage, 0)
        self.script.preempt[stage] = left - 1
        return left > 0

    @staticmethod
    def _token(token_id: int, admit: worker_pb2.Admit) -> common_pb2.Token:
        return with_logprobs(token_id, admit.sampling)


_PREEMPTED = worker_pb2.DecodeSessionResponse(finished=worker_pb2.Finished(reason=common_pb2.FINISH_REASON_PREEMPTED))


def with_logprobs(token_id: int, sampling: common_pb2.SamplingParams) -> common_pb2.Token:
    token = common_pb2.Token(id=token_id)
    if sampling.HasField("logprobs"):
        token.logprob = -0.5
        for rank in range(sampling.logprobs):
            token.top.append(common_pb2.TokenLogprob(token_id=token_id + rank, logprob=-0.5 - rank))
    return token


def _generated(tokens: list[common_pb2.Token]) -> worker_pb2.DecodeSessionResponse:
    return worker_pb2.DecodeSessionResponse(tokens=worker_pb2.GeneratedTokens(tokens=tokens))


class FakePrefill(worker_pb2_grpc.PrefillServiceServicer):
    """Answers with `first_token`, `error`, or never (`hold`)."""

    def __init__(self) -> None:
        self.first_token = FIRST
        self.sequence_start: int | None = None  # if set, `first_token` follows a prompt of this length
        self.error: Status | None = None
        self.hold = False
        self.requests: list[worker_pb2.PrefillRequest] = []
        self.open = 0
        self.cancelled = 0

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.PrefillResponse:
        self.requests.append(request)
        self.open += 1
        try:
            if self.error is not None:
                await context.abort(*self.error)
            if self.hold:
                await asyncio.Event().wait()
            done = 0 if self.sequence_start is None else len(request.prompt) - self.sequence_start
            return worker_pb2.PrefillResponse(
                first_token=with_logprobs(self.first_token + done, request.sampling), cached_tokens=3
            )
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1


class FakeWorker:
    """One worker process towards the meta server: a gRPC server, registered, with heartbeats until `stop`."""

    def __init__(self, info: registry_pb2.WorkerInfo, meta_address: str) -> None:
        self.info = info
        self.ready = True
        self.pools = [common_pb2.PoolUsage(name="host_blocks", used=0, total=256, unit="blocks")]
        self.decode = FakeDecode()
        self.prefill = FakePrefill()
        self._meta_address = meta_address
        self._server = grpc.aio.server(options=GRPC_OPTIONS)
        self._beats: asyncio.Task[None] | None = None

    async def start(self) -> FakeWorker:
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self.decode, self._server)
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self.prefill, self._server)
        self.info.grpc_address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(self._meta_address)
        self._registry = registry_pb2_grpc.RegistryServiceStub(self._channel)
        await self._registry.Register(registry_pb2.RegisterRequest(info=self.info))
        await self.beat()
        self._beats = asyncio.create_task(self._beat_for_ever())
        return self

    async def beat(self) -> bool:
        status = common_pb2.WorkerStatus(
            ready=self.ready,
            pools=self.pools,
            counters={"bytes_pulled": 12.0},
        )
        beat = registry_pb2.HeartbeatRequest(worker_id=self.info.worker_id, epoch=self.info.epoch, status=status)
        return bool((await self._registry.Heartbeat(beat)).known)

    async def fall_silent(self) -> None:
        """No more heartbeats, as after a crash; the server stays."""
        if self._beats is not None:
            self._beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beats

    async def die(self) -> None:
        """As after kill -9: connections break, heartbeats end, nobody says good-bye."""
        await self.fall_silent()
        await self._server.stop(None)
        await self._channel.close()

    async def leave(self) -> None:
        await self._registry.Leave(registry_pb2.LeaveRequest(worker_id=self.info.worker_id, epoch=self.info.epoch))

    async def _beat_for_ever(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            with contextlib.suppress(grpc.RpcError):  # the meta server may be gone before its workers
                await self.beat()


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    """Waits for `condition`; the test fails naming `what` when it stays false."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still not true after {timeout_s} s: {what}")
