"""Prefill's host pool: objects of main KV in MemCache, saved and loaded layer by layer.

An object's life: `alloc` gives it an address, `save` fills it piece by piece, `finish` makes it visible (or `abort`
takes it back); readers `lease` it, `load` pieces of it, `release` it. Memory under pressure is taken from the least
recently used objects without a lease.
"""

from __future__ import annotations

import atexit
import signal
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from transfer.handlers import handlers_kept
from transfer.peer_link import PeerUnreachable, dial

_NOT_READABLE = -3101  # allocated but not finished
_NO_SUCH_KEY = -3102
_NOT_LEASED = -3106
_NOT_MAPPED = -2
_DRAM = 1  # where objects are allocated
_RETRY_INTERVAL_S = 0.05
_RELEASE_SETTLES_S = 0.02
_MAPPING_S = 2.0  # how long the memory of a member that has just joined may stay unmapped
_DIAL_S = 2.0
_KEYS_IN_MESSAGE = 4


class PoolError(RuntimeError):
    """A pool call failed; the message names its keys."""


class PoolKeyExists(PoolError):
    """A key to be allocated is in the pool already: lease it instead of writing it."""


class PoolFull(PoolError):
    """There is no room: nothing that has no lease is left to evict."""


def _named(keys: Sequence[str]) -> str:
    shown = ", ".join(keys[:_KEYS_IN_MESSAGE])
    return shown if len(keys) <= _KEYS_IN_MESSAGE else f"{shown} and {len(keys) - _KEYS_IN_MESSAGE} more"


class MemPool:
    """This process's access to the pool; it also contributes `dram_bytes` of memory to it.

    Invariant: an object is visible to readers only after `finish`, and an allocation that fails for one key leaves
    none of its keys behind. Calls release the interpreter lock and may come from several threads.
    """

    def __init__(
        self,
        *,
        meta_url: str,
        config_store_url: str,
        device_id: int,
        dram_bytes: int,
        world_size: int,
        protocol: str = "host_shm",
        timeout_s: int = 30,
    ) -> None:
        """Join the pool of the meta service at `meta_url` (see transfer.mem_pool_service).

        `dram_bytes` is rounded up to 2 MiB; `world_size` is the most processes the pool will ever have at once.
        `timeout_s` bounds a call to the meta service, which pauses for up to 30 s after a client is killed.
        """
        for url in (meta_url, config_store_url):  # the wheel would wait for them without end
            address = urllib.parse.urlsplit(url)
            try:
                dial(address.hostname or "", address.port or 0, _DIAL_S)
            except PeerUnreachable as error:
                raise PoolError(f"the pool cannot be joined: {error}; is its meta service running?") from error
        with handlers_kept(signal.SIGTERM, signal.SIGINT):
            from memcache_hybrid import G2L, L2G, DistributedObjectStore, LocalConfig  # loads the driver

            config = LocalConfig()
            config.meta_service_url = meta_url
            config.config_store_url = config_store_url
            config.protocol = protocol
            config.dram_size = f"{-(-dram_bytes // (2 << 20)) * 2}MB"
            config.world_size = world_size
            config.client_timeout_seconds = timeout_s
            config.log_level = "error"
            store = DistributedObjectStore()
            code = store.setup(config)
            if code == 0:
                code = store.init(device_id)
        if code != 0:
            raise PoolError(
                f"the pool at {meta_url} (store {config_store_url}) cannot be joined by device {device_id} with "
                f"{config.dram_size}: code {code}"
            )
        self._store: Any = store
        self._to_pool = int(L2G)
        self._from_pool = int(G2L)
        self._closed = False
        atexit.register(self.close)  # the wheel crashes in a process that exits without leaving

    def register(self, address: int, nbytes: int) -> None:
        """Let `save` and `load` use a range of device or host memory."""
        code = self._store.register_buffer(address, nbytes)
        if code != 0:
            raise PoolError(f"registering {nbytes} bytes at {address:#x} with the pool failed with code {code}")

    def alloc(
        self, keys: Sequence[str], sizes: Sequence[int], *, wait_s: float = 0.0, write_s: float = 60.0
    ) -> list[int]:
        """Room for new objects of `sizes` bytes; returns their addresses in the pool, all or none.

        `wait_s` is how long to wait for evictions to make room. An object that is not finished within `write_s`
        seconds may be taken back by the pool. Raises PoolKeyExists, or PoolFull after `wait_s` seconds.
        """
        if len(keys) != len(sizes):
            raise ValueError(f"{len(keys)} keys for {len(sizes)} sizes")
        if present := [key for key, there in zip(keys, self.exists(keys), strict=True) if there]:
            raise PoolKeyExists(f"already in the pool: {_named(present)}")
        found: dict[str, int] = {}
        missing = dict(zip(keys, sizes, strict=True))
        deadline = time.monotonic() + wait_s
        while True:
            addresses = self._store.batch_alloc(list(missing), list(missing.values()), _DRAM, int(write_s * 1000))
            given = {key: int(address) for key, address in zip(missing, addresses, strict=False) if address}
            found |= given
            missing = {key: size for key, size in missing.items() if key not in given}
            if not missing:
                return [found[key] for key in keys]
            if time.monotonic() >= deadline:
                self.abort(list(found))
                raise PoolFull(f"no room in the pool for {sum(missing.values())} bytes of {_named(list(missing))}")
            time.sleep(_RETRY_INTERVAL_S)

    def save(self, pool: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy `sizes[i]` bytes from the device address `sources[i]` to the pool address `pool[i]`."""
        self._copy("saving", pool, sources, sizes, self._to_pool)

    def load(self, pool: Sequence[int], destinations: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy `sizes[i]` bytes from the pool address `pool[i]` to the device address `destinations[i]`."""
        self._copy("loading", pool, destinations, sizes, self._from_pool)

    def finish(self, keys: Sequence[str]) -> None:
        """Make allocated objects visible: all their bytes have been saved."""
        codes = self._store.batch_write_finish(list(keys), [0] * len(keys))
        self._check("finishing", keys, codes, allowed=(0,))

    def abort(self, keys: Sequence[str]) -> None:
        """Give up allocated objects that will not be finished; keys that are gone already are ignored.

        The pool keeps the memory of a failed write until `write_s` has passed, but not that of a removed object. So
        they are finished and at once removed, and `lease` looks twice before it believes in an object.
        """
        if keys:
            self._store.batch_write_finish(list(keys), [0] * len(keys))
            self._store.remove_batch(list(keys))

    def lease(self, keys: Sequence[str], ttl_ms: int) -> list[int | None]:
        """Keep finished objects from eviction for `ttl_ms`; returns their addresses, None where there is no object."""
        codes = self._store.batch_add_lease(list(keys), ttl_ms)
        self._check("leasing", keys, codes, allowed=(0, _NO_SUCH_KEY, _NOT_READABLE))
        infos = self._store.batch_get_key_info(list(keys))
        addresses: list[int | None] = []
        for code, info, there in zip(codes, infos, self.exists(keys), strict=True):
            places = info.gva_list() if code == 0 and there else []
            addresses.append(int(places[0]) if places else None)
        return addresses

    def locate(self, keys: Sequence[str]) -> list[int | None]:
        """Where finished objects are at this moment, without a lease; None where there is no object."""
        there = self.exists(keys)
        infos = self._store.batch_get_key_info(list(keys))
        if len(infos) != len(keys):
            raise PoolError(f"locating {_named(keys)}: the pool answered for {len(infos)} of {len(keys)} keys")
        places = [info.gva_list() if here else [] for here, info in zip(there, infos, strict=True)]
        return [int(found[0]) if found else None for found in places]

    def release(self, keys: Sequence[str]) -> None:
        """End one lease of each object; objects that are gone already are ignored."""
        code = self._store.batch_remove_lease(list(keys))
        if code not in (0, _NO_SUCH_KEY, _NOT_LEASED):
            raise PoolError(f"releasing {_named(keys)} failed with code {code}")
        # The service answers before it has dropped the lease; an object that is removed meanwhile keeps its memory
        # until the lease would have run out.
        time.sleep(_RELEASE_SETTLES_S)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which objects are finished and still in the pool."""
        codes = self._store.batch_is_exist(list(keys))
        self._check("looking up", keys, codes, allowed=(0, 1))
        return [code == 1 for code in codes]

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Delete objects, leased or not; returns which of them were there.

        Now and then the service loses the end of a lease. It then keeps the memory until the object's longest one,
        `write_s` or `ttl_ms`, would have run out.
        """
        codes = self._store.remove_batch(list(keys))
        self._check("removing", keys, codes, allowed=(0, _NO_SUCH_KEY))
        return [code == 0 for code in codes]

    def close(self) -> None:
        """Leave the pool, taking this process's memory out of it. Idempotent.

        The wheel may keep the interpreter lock meanwhile, and can hang when another member was killed before:
        `PoolProcess` ends the process then.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._store.close()

    def _copy(
        self, verb: str, pool: Sequence[int], memory: Sequence[int], sizes: Sequence[int], direction: int
    ) -> None:
        if not len(pool) == len(memory) == len(sizes):
            raise ValueError(f"{len(pool)} pool and {len(memory)} memory addresses for {len(sizes)} sizes")
        if not sizes:
            return
        deadline = time.monotonic() + _MAPPING_S
        while (code := self._store.batch_copy(list(pool), list(memory), list(sizes), direction)) == _NOT_MAPPED:
            if time.monotonic() >= deadline:
                break
            time.sleep(_RETRY_INTERVAL_S)
        if code != 0:
            raise PoolError(
                f"{verb} {sum(sizes)} bytes in {len(sizes)} pieces, the first at pool address {pool[0]:#x}, "
                f"failed with code {code}"
            )

    @staticmethod
    def _check(verb: str, keys: Sequence[str], codes: Sequence[int], *, allowed: tuple[int, ...]) -> None:
        failed = {key: code for key, code in zip(keys, codes, strict=False) if code not in allowed}
        if failed:
            raise PoolError(f"{verb} {_named(list(failed))} failed with code {next(iter(failed.values()))}")
        if len(codes) != len(keys):
            raise PoolError(f"{verb} {_named(keys)}: the pool answered for {len(codes)} of {len(keys)} keys")
