"""Faults on demand, off by default (section `faults` of the configuration): tests show with them what would break."""

from __future__ import annotations

import ctypes
import random
import time

from decode_node.memory import DecodeMemory, RowTables
from decode_node.read_engine import ReadEngine, ReadStats
from decode_node.scheduler import RequestState
from engine.config import FaultsSection
from engine.faults import dice, injected
from transfer.memfabric import Copies, Meanwhile


class HostRowEraser:
    """Zeroes the prompt's main KV in the host pool, before the first step, of requests whose id contains a text.

    What a request then answers tells whether decode really reads the host pool.
    """

    def __init__(self, id_part: str, memory: DecodeMemory, tables: RowTables) -> None:
        self._id_part = id_part
        self._memory = memory
        self._tables = tables

    def before_step(self, state: RequestState) -> None:
        """Called on the rank that writes the host pool, for each request of the coming step."""
        if len(state.tokens) != 1 or self._id_part not in state.request.request_id:
            return
        block_size = self._memory.geometry.block_size
        blocks = self._tables.main[state.row, : -(-state.request.prompt_tokens // block_size)].long()
        for tensor in (*self._memory.host_ckv, *self._memory.host_k_rope):
            tensor[blocks] = 0
        injected("zero_host_rows", f"zeroed the {len(blocks)} host blocks of request {state.request.request_id}")


def reader(engine: ReadEngine, faults: FaultsSection, worker_id: str) -> ReadEngine:
    """The engine that a rank's puller reads with: the given one, unless a read fault is on."""
    if not (faults.read_failure or faults.read_corrupt or faults.read_delay_s):
        return engine
    return UnreliableReads(engine, faults, dice(faults, worker_id, "reads"))


class UnreliableReads:
    """Reads begin late (`read_delay_s`, on top of their own deadline), and some are said to have failed.

    Half of those have not copied anything, the others everything. Others leave a wrong byte behind (`read_corrupt`).
    """

    def __init__(self, engine: ReadEngine, faults: FaultsSection, draws: random.Random) -> None:
        self._engine = engine
        self._faults = faults
        self._draws = draws

    def read(
        self,
        session_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        then: Copies | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> ReadStats:
        time.sleep(self._faults.read_delay_s)
        fails = self._draws.random() < self._faults.read_failure
        if fails:
            injected("read_failure", f"a read of {sum(copies.sizes)} bytes from {session_id}")
        if fails and self._draws.random() < 0.5:
            raise OSError(f"faults.read_failure: a read from {session_id} was not made")
        stats = self._engine.read(session_id, copies, deadline_s=deadline_s, then=then, meanwhile=meanwhile)
        if self._draws.random() < self._faults.read_corrupt:
            injected("read_corrupt", f"a read of {sum(copies.sizes)} bytes from {session_id}")
            place = self._draws.randrange(len(copies.local))
            damaged = ctypes.c_ubyte.from_address(copies.local[place] + self._draws.randrange(copies.sizes[place]))
            damaged.value ^= self._draws.randrange(1, 256)
        if fails:
            raise OSError(f"faults.read_failure: a read from {session_id} is said to have failed")
        return stats

    def idle(self, session_id: str) -> bool:
        return self._engine.idle(session_id)

    def forget(self, session_id: str) -> None:
        self._engine.forget(session_id)
