"""gRPC channels to worker processes, one per process."""

from __future__ import annotations

import grpc

from engine.worker import GRPC_OPTIONS
from meta_server.registry import Worker


class WorkerChannels:
    """Opens a channel at the first use of a worker and keeps it. A restarted worker is a new peer."""

    def __init__(self) -> None:
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}

    def get(self, worker: Worker) -> grpc.aio.Channel:
        key = (worker.info.worker_id, worker.info.epoch)
        if key not in self._channels:
            self._channels[key] = grpc.aio.insecure_channel(worker.info.grpc_address, options=GRPC_OPTIONS)
        return self._channels[key]

    def is_broken(self, worker: Worker) -> bool:
        """Whether the connection is down now: tells a dead process from one that answered with an error."""
        return self.get(worker).get_state() is not grpc.ChannelConnectivity.READY

    async def forget(self, live: set[tuple[str, str]]) -> None:
        """Closes the channels to workers (id, epoch) that are not in `live`."""
        for key in [key for key in self._channels if key not in live]:
            await self._channels.pop(key).close(None)

    async def close(self) -> None:
        await self.forget(set())
