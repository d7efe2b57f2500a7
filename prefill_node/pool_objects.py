"""The pool objects which requests of this process use: what they are called, where they lie, who needs them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefill_node.block_keys import Writers
from prefill_node.pool_client import PoolClient
from transfer.mem_pool import PoolError

_KEYS_PER_CALL = 512


class Held(NamedTuple):
    """Objects in the order they were asked for, safe from eviction until `until` (monotonic seconds)."""

    names: tuple[str, ...]
    addresses: tuple[int, ...]
    until: float


NOTHING = Held((), (), float("inf"))


@dataclass
class _Object:
    name: str
    address: int
    written: bool  # complete, and leased until `until`
    until: float = 0.0
    leases: int = 0
    users: set[str] = field(default_factory=set)  # request ids


class PoolObjects:
    """Used by one thread. Pool failures raise PoolError; what was held before is held still.

    Invariants:

    * Pinned while used (test_an_object_in_use_is_leased): a finished object that a request uses has a lease, taken when
      it was looked up; the last request to end gives it back. The object itself stays: it is a cache.
    * One writer (test_a_block_has_one_writer_at_a_time): a block that one request is writing is not allocated again for
      another; others find it when it is finished, and never before.
    * Nothing outlives its users, whatever fails (test_no_object_outlives_the_requests_that_use_it).
    * All or nothing: objects that are not finished when their step ends are given back.
    """

    def __init__(self, pool: PoolClient, writers: Writers, object_bytes: int, lease_s: float) -> None:
        self._pool, self._writers = pool, writers
        self._object_bytes, self._lease_s = object_bytes, lease_s
        self._objects: dict[str, _Object] = {}  # by key
        self._abandoned: list[str] = []  # names that were allocated and could not be given back yet
        self._keys: dict[str, dict[str, None]] = {}  # request id -> keys it uses, in order

    def __len__(self) -> int:
        return len(self._objects)

    def find(self, request_id: str, keys: Sequence[str]) -> int:
        """How many leading blocks are in the pool, complete; from now on they are held for the request."""
        found = 0
        while found < len(keys):
            batch = keys[found : found + _KEYS_PER_CALL]
            run, beyond = self._lease_run(batch)
            self._use(request_id, batch[:run])
            self._release(beyond)
            found += run
            if run < len(batch):
                break
        return found

    def hold(self, request_id: str, keys: Sequence[str]) -> Held:
        """Where these blocks lie; they are held for the request. Raises PoolError when one is not there."""
        if not keys:
            return NOTHING
        if (found := self.find(request_id, keys)) < len(keys):
            raise PoolError(f"its earlier rows are not in the pool: only {found} of {len(keys)} blocks")
        self._renew([self._objects[key] for key in keys])
        objects = [self._objects[key] for key in keys]
        return Held(
            tuple(each.name for each in objects),
            tuple(each.address for each in objects),
            min(each.until for each in objects),
        )

    def begin(self, request_id: str, keys: Sequence[str], wait_s: float) -> dict[str, int]:
        """Prepares to write blocks: addresses of those which nobody has written or is writing, by key."""
        self._lease(self._present([key for key in keys if key not in self._objects]))
        self._use(request_id, [key for key in keys if key in self._objects])
        new = [key for key in keys if key not in self._objects]
        addresses: Sequence[int] = ()
        if new:
            self._abort([])  # or an old allocation would be given out again, and taken back while it is written
            sizes = [self._object_bytes] * len(new)
            addresses = self._pool.alloc([self._writers.own(key) for key in new], sizes, wait_s=wait_s)
        for key, address in zip(new, addresses, strict=True):
            self._objects[key] = _Object(self._writers.own(key), address, written=False)
        self._use(request_id, new)
        return dict(zip(new, addresses, strict=True))

    def finish(self, keys: Collection[str]) -> None:
        """The blocks that `begin` gave out are complete: others may read them."""
        names = [self._objects[key].name for key in keys]
        self._pool.finish(names)
        until = time.monotonic() + self._lease_s
        leased = self._pool.lease(names, self._ttl_ms)
        for key, address in zip(keys, leased, strict=True):
            item = self._objects[key]
            item.written, item.leases, item.until = True, int(address is not None), until
            if address != item.address:
                self._forget(key)

    def abort(self, keys: Collection[str]) -> None:
        """The blocks that `begin` gave out will not be completed."""
        names = [self._objects[key].name for key in keys]
        for key in keys:
            self._forget(key)
        self._abort(names)

    def drop(self, request_id: str) -> None:
        """The request is over: gives back what no other one uses."""
        unused = []
        for key in self._keys.pop(request_id, {}):
            item = self._objects.get(key)
            if item is None:
                continue
            item.users.discard(request_id)
            if not item.users:
                unused.append(self._objects.pop(key))
        self._abort([item.name for item in unused if not item.written])
        self._release(item for item in unused if item.written)

    def distrust(self, request_id: str) -> None:
        """Something this request uses is not what it should be: its finished objects leave the pool."""
        wrong = [key for key in self._keys.get(request_id, {}) if key in self._objects and self._objects[key].written]
        items = [self._objects.pop(key) for key in wrong]
        if items:
            self._release(items)
            self._pool.remove([item.name for item in items])

    @property
    def _ttl_ms(self) -> int:
        return int(self._lease_s * 1000)

    def _lease_run(self, keys: Sequence[str]) -> tuple[int, list[_Object]]:
        """Leases the leading blocks that are complete: how many there are, and what was leased behind one that was
        evicted a moment ago."""
        unknown = [key for key in keys if key not in self._objects]
        present = self._present(unknown)
        run = 0
        for key in keys:
            item = self._objects.get(key)
            if not (item.written if item else key in present):
                break
            run += 1
        self._lease({key: present[key] for key in keys[:run] if key in present})
        found = next((index for index, key in enumerate(keys[:run]) if key not in self._objects), run)
        beyond = [self._objects.pop(key) for key in keys[found:run] if key in self._objects and key in present]
        return found, beyond

    def _present(self, keys: Sequence[str]) -> dict[str, str]:
        """Names of the complete objects of blocks that are not known here, by key."""
        if not keys:
            return {}
        names = [(key, name) for key in keys for name in self._writers.names(key)]
        there = self._pool.exists([name for _, name in names])
        found: dict[str, str] = {}
        for (key, name), exists in zip(names, there, strict=True):
            if exists:
                found.setdefault(key, name)
        return found

    def _lease(self, names: dict[str, str]) -> None:
        if not names:
            return
        until = time.monotonic() + self._lease_s
        for (key, name), address in zip(
            names.items(), self._pool.lease(list(names.values()), self._ttl_ms), strict=True
        ):
            if address is not None:
                self._objects[key] = _Object(name, address, written=True, until=until, leases=1)

    def _renew(self, items: Sequence[_Object]) -> None:
        """Leases again what has used up half of its lease."""
        now = time.monotonic()
        old = [item for item in items if item.until - now < self._lease_s / 2]
        if not old:
            return
        for item, address in zip(old, self._pool.lease([item.name for item in old], self._ttl_ms), strict=True):
            if address != item.address:
                raise PoolError(f"object {item.name} is not in the pool any more")
            item.leases, item.until = item.leases + 1, now + self._lease_s

    def _abort(self, names: Sequence[str]) -> None:
        """Gives up these allocations, and those which could not be given up before."""
        self._abandoned.extend(names)
        if self._abandoned:
            self._pool.abort(self._abandoned)
            self._abandoned = []

    def _use(self, request_id: str, keys: Iterable[str]) -> None:
        used = self._keys.setdefault(request_id, {})
        for key in keys:
            self._objects[key].users.add(request_id)
            used[key] = None

    def _forget(self, key: str) -> None:
        self._objects.pop(key, None)

    def _release(self, items: Iterable[_Object]) -> None:
        by_leases: dict[int, list[str]] = {}
        for item in items:
            by_leases.setdefault(item.leases, []).append(item.name)
        for leases, names in by_leases.items():
            for _ in range(leases):
                self._pool.release(names)
