"""What a pool's meta service says of itself, and whether it still is the same one."""

from __future__ import annotations

import http.client
import re
import urllib.parse
from dataclasses import dataclass

from transfer.mem_pool import PoolError


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The whole pool, over all its members. Objects that are being written count as well."""

    used_bytes: int
    total_bytes: int
    objects: int = 0
    evictions: int = 0  # times objects had to make room, since the service began


class PoolMonitor:
    """Asks the service over one connection that it keeps; callable with or without the wheels' driver, by one thread.

    Invariant: `restarts` has grown when `usage` returns an answer of another service than the call before
    (test_a_service_that_was_replaced_between_two_questions_is_noticed). A service that takes longer than `deadline_s`
    counts as another one, too.
    """

    def __init__(self, metrics_url: str, *, deadline_s: float = 2.0) -> None:
        address = urllib.parse.urlsplit(metrics_url)
        self._url = metrics_url
        # The service never sends the body of an answer that ends its connection, so let it be kept alive, and close it.
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=deadline_s)
        self._answered = False  # this connection has been used
        self.restarts = 0

    def usage(self) -> PoolUsage:
        """Raises PoolError when the service does not answer."""
        text = self._ask() or self._ask()
        if text is None:
            raise PoolError(f"the pool's meta service at {self._url} does not answer: {self._cause}")
        return PoolUsage(
            _gauge(text, 'memcache_allocated_bytes{medium="dram"}'),
            _gauge(text, 'memcache_total_capacity_bytes{medium="dram"}'),
            _gauge(text, "memcache_stored_keys"),
            _gauge(text, "memcache_evict_operations_total"),
        )

    def close(self) -> None:
        self._connection.close()

    def _ask(self) -> str | None:
        """None, and a closed connection, when it fails; one that had been used may be of a service that is gone."""
        try:
            self._connection.request("GET", "/metrics")
            text = self._connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            self._cause = str(error)
            self._connection.close()
            self.restarts += self._answered
            self._answered = False
            return None
        self._answered = True
        return text


def _gauge(metrics: str, name: str) -> int:
    found = re.search(rf"^{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise PoolError(f"the pool's meta service reports no {name}")
    return int(float(found[1]))
