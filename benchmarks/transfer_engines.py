"""The engines that the transfer benchmark compares, behind one interface: a source that waits, a reader that reads."""

from __future__ import annotations

import base64
import ctypes
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from transfer.memfabric import Copies

READ_S = 60.0
_MOONCAKE_BATCH = 1024  # descriptors; it refuses 4096 at once
_LOCALHOST = "127.0.0.1"
Info = Mapping[str, str | int]


class Engine(Protocol):
    """One process's end. `memory` is the address of its region."""

    memory: int

    def info(self) -> Info:
        """What a reader must know of this source."""
        ...

    def connect(self, source: Info) -> str:
        """Returns what the source is called from now on."""
        ...

    def prepare(self, peer: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> Any:
        """What may be computed before the read: an engine may keep descriptors in a form of its own."""
        ...

    def read(self, prepared: Any) -> None:
        """Returns when all bytes have arrived. Raises RuntimeError."""
        ...


def plain_memory(nbytes: int) -> int:
    """Anonymous memory of the C library, touched; never given back."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    address = libc.malloc(nbytes)
    if not address:
        raise MemoryError(f"no {nbytes} bytes")
    ctypes.memset(address, 0, nbytes)
    return int(address)


class SluiceEngine:
    """Ours: the MemFabric wheel, over the emulated driver."""

    def __init__(self, role: str, device: int, nbytes: int) -> None:
        from transfer.hostcann.runtime import malloc
        from transfer.memfabric import MemFabricEngine

        self._engine = MemFabricEngine(
            host=_LOCALHOST,
            device_id=device,
            role="prefill" if role == "source" else "decode",
            protocol="sdma",
            store_url="",
        )
        self.memory = malloc(device, nbytes)
        self._engine.register(self.memory, nbytes)

    def info(self) -> Info:
        return {"session": self._engine.session_id, "memory": self.memory}

    def connect(self, source: Info) -> str:
        session = str(source["session"])
        self._engine.warm(session, self.memory, int(source["memory"]))
        return session

    def prepare(self, peer: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> Any:
        return peer, Copies(local, remote, sizes)

    def read(self, prepared: Any) -> None:
        session, copies = prepared
        self._engine.read(session, copies, deadline_s=READ_S)


class NixlEngine:
    """nixl over UCX, without its progress thread; descriptor lists are prepared beforehand, as its users do."""

    def __init__(self, role: str, device: int, nbytes: int) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(f"{role}-{device}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.memory = plain_memory(nbytes)
        self._agent.register_memory(self._agent.get_reg_descs([(self.memory, nbytes, 0, "")], "DRAM"))
        if role == "source":
            threading.Thread(target=self._answer, daemon=True).start()

    def info(self) -> Info:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "memory": self.memory}

    def connect(self, source: Info) -> str:
        peer = self._agent.add_remote_agent(base64.b64decode(str(source["metadata"])))
        return peer.decode() if isinstance(peer, bytes) else str(peer)

    def prepare(self, peer: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> Any:
        def side(agent: str, addresses: Sequence[int]) -> Any:
            blocks = [(at, size, 0) for at, size in zip(addresses, sizes, strict=True)]
            return self._agent.prep_xfer_dlist(agent, blocks, "DRAM")

        every = np.arange(len(sizes), dtype=np.int32)
        return side("NIXL_INIT_AGENT", local), side(peer, remote), every

    def read(self, prepared: Any) -> None:
        here, there, every = prepared
        handle = self._agent.make_prepped_xfer("READ", here, every, there, every)
        state, end = self._agent.transfer(handle), time.monotonic() + READ_S
        while state == "PROC" and time.monotonic() < end:
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"nixl: the read ended as {state}")

    def _answer(self) -> None:
        """A source without a progress thread must look for connections itself."""
        while True:
            self._agent.get_new_notifs()
            time.sleep(1e-3)


class MooncakeEngine:
    """Mooncake's transfer engine over TCP."""

    def __init__(self, role: str, device: int, nbytes: int) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if self._engine.initialize(_LOCALHOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("mooncake: the engine did not start")
        self.memory = plain_memory(nbytes)
        if self._engine.register_memory(self.memory, nbytes) != 0:
            raise RuntimeError("mooncake: the memory cannot be registered")

    def info(self) -> Info:
        return {"peer": f"{_LOCALHOST}:{self._engine.get_rpc_port()}", "memory": self.memory}

    def connect(self, source: Info) -> str:
        return str(source["peer"])

    def prepare(self, peer: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> Any:
        return peer, list(local), list(remote), list(sizes)

    def read(self, prepared: Any) -> None:
        peer, *columns = prepared
        for first in range(0, len(columns[0]), _MOONCAKE_BATCH):
            part = [column[first : first + _MOONCAKE_BATCH] for column in columns]
            code = self._engine.batch_transfer_sync_read(peer, *part)
            if code != 0:
                raise RuntimeError(f"mooncake: the read ended with code {code}")


ENGINES: Mapping[str, type[Engine]] = {"sluice": SluiceEngine, "nixl": NixlEngine, "mooncake": MooncakeEngine}
