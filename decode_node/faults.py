"""Faults on demand, off by default (section `faults` of the configuration): tests show with them what would break."""

from __future__ import annotations

import logging

from decode_node.memory import DecodeMemory, RowTables
from decode_node.scheduler import RequestState

log = logging.getLogger(__name__)


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
        log.warning(
            "faults.zero_host_rows: zeroed the %d host blocks of request %s", len(blocks), state.request.request_id
        )
