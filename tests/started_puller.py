"""A puller for tests."""

from __future__ import annotations

from typing import Any

from decode_node.puller import Puller

_ONLY_RANK: dict[str, Any] = {
    "bind": "tcp://127.0.0.1:*",
    "worker_id": "decode-0/dp0/tp0",
    "tp_rank": 0,
    "tp_size": 1,
    "read_timeout_s": 5.0,
    "read_retries": 2,
    "handshake_timeout_s": 5.0,
}


def started_puller(**options: Any) -> Puller:
    """At a free port of this machine; the only rank of decode-0, unless `options` (of `Puller`) say otherwise."""
    puller = Puller(**_ONLY_RANK | options)
    puller.start()
    return puller
