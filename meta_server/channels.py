"""gRPC channels to worker processes, one per process."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from engine.trust import PLAIN, Trust
from engine.worker import GRPC_OPTIONS
from meta_server.registry import Worker

_NOTICE_S = 0.1
_CHANNEL_OPTIONS = (
    *GRPC_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # workers are peers, never behind the proxy of the environment
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a worker that is back is used again soon
)


class WorkerChannels:
    """Opens a channel at the first use of a worker and keeps it. A restarted worker is a new peer."""

    def __init__(self, trust: Trust = PLAIN) -> None:
        self._trust = trust
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}

    def get(self, worker: Worker) -> grpc.aio.Channel:
        key = (worker.info.worker_id, worker.info.epoch)
        if key not in self._channels:
            self._channels[key] = self._trust.aio_channel(worker.info.grpc_address, _CHANNEL_OPTIONS)
        return self._channels[key]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call of a worker has to carry."""
        return self._trust.metadata

    async def is_broken(self, worker: Worker) -> bool:
        """Asked after an RPC failed: is the connection down (the process died), or did the worker answer an error?

        The channel learns of a broken connection a moment after its RPCs, so this waits that moment.
        """
        channel = self.get(worker)
        ready = grpc.ChannelConnectivity.READY
        if channel.get_state() is ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(channel.wait_for_state_change(ready), _NOTICE_S)
        return channel.get_state() is not ready

    async def forget(self, live: set[tuple[str, str]]) -> None:
        """Closes the channels to processes that are not among the `live` (worker id, epoch) pairs."""
        for key in [key for key in self._channels if key not in live]:
            await self._channels.pop(key).close(None)

    async def close(self) -> None:
        await self.forget(set())
