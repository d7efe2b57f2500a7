"""One-sided reads between workers, through MemFabric's TransferEngine.

A prefill engine listens under its session id, `host:port`; a decode engine reads from the sessions it was told of.
There is no central store: each prefill engine hosts the small one its readers meet at, so no worker's death takes
another down, and engines may start in any order. A restarted engine has a new session id.

The wheel's calls release the interpreter lock, but opening a link to a session that is gone blocks for minutes, and
keeps every other link from being opened meanwhile. So a session is dialled before the wheel opens (or reopens) its
link, its calls run in a worker thread of its own, and callers wait for that no longer than their deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from transfer.peer_link import PeerLink, PeerUnreachable, dial

Role = Literal["prefill", "decode"]

PROTOCOLS = ("sdma", "device_rdma", "device_urma")
_ROLE_NAMES = {"prefill": "Prefill", "decode": "Decode"}
_LOG_ERRORS_ONLY = 3
_DIAL_S = 2.0


class TransferError(RuntimeError):
    """A transfer call failed; `session`, `nbytes` and the wheel's `code` (None: it did not get that far) tell which."""

    def __init__(self, message: str, *, session: str, nbytes: int = 0, code: int | None = None) -> None:
        super().__init__(message)
        self.session = session
        self.nbytes = nbytes
        self.code = code


class TransferTimeout(TransferError):
    """A read did not end by its deadline. The copy may still be running: its destination must not be reused yet."""


class Copies(NamedTuple):
    """``sizes[i]`` bytes from the peer's ``remote[i]`` to ``local[i]``, for all i."""

    local: Sequence[int]
    remote: Sequence[int]
    sizes: Sequence[int]


NOTHING = Copies((), (), ())


class Meanwhile(NamedTuple):
    """What the caller of a read does while bytes move."""

    work: Callable[[float], None]
    """Called on its own thread, with the deadline in monotonic seconds, by which it must have come back."""
    over: Callable[[], None]
    """Called on another thread when the bytes have landed: work that only waits should end now."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """One finished read: bytes moved, descriptors asked for and after merging, and the seconds it took."""

    bytes: int
    descriptors_before: int
    descriptors_after: int
    seconds: float


def parse_protocol(text: str) -> str:
    """The protocol's canonical name; raises ValueError naming the legal ones."""
    protocol = text.strip().lower()
    if protocol not in PROTOCOLS:
        raise ValueError(f"transfer.protocol: {text!r} is not one of {', '.join(PROTOCOLS)}")
    return protocol


def coalesce(copies: Copies) -> Copies:
    """Merge descriptors that follow each other on both sides; their order is kept, and empty ones are dropped.

    Addresses and sizes are bytes; the three sequences have one entry per descriptor.
    """
    local, remote, sizes = copies
    if not len(local) == len(remote) == len(sizes):
        raise ValueError(f"{len(local)} local and {len(remote)} remote addresses for {len(sizes)} sizes")
    merged_local: list[int] = []
    merged_remote: list[int] = []
    merged_sizes: list[int] = []
    local_end = remote_end = -1
    for here, there, size in zip(local, remote, sizes, strict=True):
        if size == 0:
            continue
        if here == local_end and there == remote_end:
            merged_sizes[-1] += size
        else:
            merged_local.append(here)
            merged_remote.append(there)
            merged_sizes.append(size)
        local_end = here + size
        remote_end = there + size
    return Copies(merged_local, merged_remote, merged_sizes)


class MemFabricEngine:
    """This process's end of the transfer fabric.

    Invariant: no call outlives its deadline, and a session that missed one is broken: every later read on it fails at
    once, while reads on other sessions go on. What a broken session may still write to is the caller's to quarantine.
    """

    def __init__(self, *, host: str, device_id: int, role: Role, protocol: str, store_url: str) -> None:
        """Open the engine on a device. `host` is the address its peers reach it at.

        `store_url` is where the wheel meets its peers when the protocol needs a common store; SDMA does not use it.
        """
        if role not in _ROLE_NAMES:
            raise ValueError(f"role: {role!r} is not one of {', '.join(_ROLE_NAMES)}")
        self.protocol = parse_protocol(protocol)
        import memfabric_hybrid as memfabric  # loads the driver: only in a process that has one

        memfabric.set_log_level(_LOG_ERRORS_ONLY)
        memfabric.set_conf_store_tls(False, "")
        operation = memfabric.TransDataOpType.__members__[self.protocol.upper()]
        engine = memfabric.TransferEngine()
        code = engine.initialize(store_url, host, _ROLE_NAMES[role], device_id, operation, _ROLE_NAMES["prefill"])
        if code != 0:
            raise TransferError(
                f"the transfer engine of {role} device {device_id} did not start over {self.protocol} (code {code})",
                session=host,
                code=code,
            )
        self._engine: Any = engine
        self.session_id = f"{host}:{engine.get_rpc_port()}"
        self._sessions: dict[str, _Session] = {}
        self._leaving: list[_Session] = []  # forgotten, but a call of theirs may be under way
        self._lock = threading.Lock()
        self._closed = False

    def register(self, address: int, nbytes: int) -> None:
        """Make a range of device memory, or of the host pool, readable and writable by transfers.

        A decode engine registers with the wheel when a link opens, so there other memory fails the first read instead.
        """
        code = self._engine.register_memory(address, nbytes)
        if code != 0:
            raise TransferError(
                f"registering {nbytes} bytes at {address:#x} failed with code {code}: "
                "only device memory and the host pool can be registered",
                session=self.session_id,
                nbytes=nbytes,
                code=code,
            )

    def read(
        self,
        session_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        then: Copies | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> ReadStats:
        """Make all copies; returns when their bytes have landed.

        `then`: further copies, the first of which begins when all of those have landed; not in the statistics.
        `meanwhile`: what this thread does while they are made. Safe from several threads; reads on one session run one
        after the other. Raises TransferTimeout after `deadline_s` seconds, TransferError when the peer refuses or is
        gone.
        """
        merged = coalesce(copies)
        calls = [each for each in (merged, coalesce(then or NOTHING)) if each.sizes]

        def run() -> int:
            codes = (self._engine.batch_transfer_sync_read(session_id, *call) for call in calls)
            return next((code for code in codes if code != 0), 0)

        nbytes = sum(merged.sizes)
        started = time.monotonic()
        if calls:
            self._session(session_id).call(run, nbytes, deadline_s, meanwhile)
        return ReadStats(nbytes, len(copies.sizes), len(merged.sizes), time.monotonic() - started)

    def warm(self, session_id: str, local: int, remote: int, nbytes: int = 1, *, deadline_s: float = 10.0) -> None:
        """Open the link to a session during the hand-shake, by reading `nbytes` (typically 15 ms, sometimes 2 s)."""
        self.read(session_id, Copies([local], [remote], [nbytes]), deadline_s=deadline_s)

    def idle(self, session_id: str) -> bool:
        """False while a read that missed its deadline may still write to its destination, also one of a session that
        has been forgotten (test_a_read_goes_on_when_its_session_is_forgotten)."""
        with self._lock:
            self._leaving = [session for session in self._leaving if not session.over()]
            sessions = [*self._leaving, *self._sessions.values()]
        return all(session.idle() for session in sessions if session.id == session_id)

    def forget(self, session_id: str) -> None:
        """Drop a session that will not be read again, for instance of a peer that has restarted."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            if session is not None:
                self._leaving.append(session)
        if session is not None:
            session.stop()

    def close(self) -> None:
        """Stop all sessions; reads after it fail. Idempotent. A thread stuck in the wheel is left to die with us."""
        with self._lock:
            self._closed = True
            sessions, self._sessions = [*self._leaving, *self._sessions.values()], {}
        idle = [session.stop() for session in sessions]
        if all(idle):
            self._engine.unInitialize()

    def _session(self, session_id: str) -> _Session:
        with self._lock:
            if self._closed:
                raise TransferError(f"read from {session_id}: the transfer engine is closed", session=session_id)
            return self._sessions.setdefault(session_id, _Session(session_id))


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True)
class _Call:
    """`begun` and `ended` are locked until then; a lock wakes its waiter sooner than an Event does."""

    run: Callable[[], int]
    over: Callable[[], None] | None
    begun: threading.Lock = field(default_factory=_locked)
    ended: threading.Lock = field(default_factory=_locked)
    code: int | None = None
    error: Exception | None = None


class _Session:
    """The calls to one peer, one at a time, in a thread that starts with the first of them."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self._host, _, port = session_id.rpartition(":")
        if not self._host or not port.isdecimal():
            raise TransferError(f"session {session_id!r} is not host:port", session=session_id)
        self._port = int(port)
        self._link: PeerLink | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._broken = False
        self._given_up: list[_Call] = []

    def idle(self) -> bool:
        """True when no call that missed its deadline is under way any more."""
        return not any(call.ended.locked() for call in tuple(self._given_up))

    def over(self) -> bool:
        """True when no call is under way, and, once it was told to stop, none will be."""
        return self._thread is None or not self._thread.is_alive()

    def call(self, run: Callable[[], int], nbytes: int, deadline_s: float, meanwhile: Meanwhile | None) -> None:
        if self._broken:
            raise TransferError(
                f"read of {nbytes} bytes from {self.id}: an earlier read missed its deadline, the session is broken",
                session=self.id,
                nbytes=nbytes,
            )
        if self._link is None or not self._link.is_up():
            self._dial(nbytes, min(deadline_s, _DIAL_S))
        self._ensure_thread()
        call = _Call(run, meanwhile.over if meanwhile else None)
        end = time.monotonic() + deadline_s
        self._calls.put(call)
        try:
            # Work done before the other thread has the interpreter would only keep the bytes from moving.
            if meanwhile is not None and call.begun.acquire(timeout=deadline_s):
                meanwhile.work(end)
        finally:
            in_time = call.ended.acquire(timeout=max(0.0, end - time.monotonic()))
            if not in_time:
                self._given_up.append(call)
                self._broken = True
        if not in_time:
            raise TransferTimeout(
                f"read of {nbytes} bytes from {self.id} did not end within {deadline_s:g} s",
                session=self.id,
                nbytes=nbytes,
            )
        if call.error is not None or call.code != 0:
            self._link = None
            cause = str(call.error) if call.error is not None else f"code {call.code}"
            raise TransferError(
                f"read of {nbytes} bytes from {self.id} failed: {cause}",
                session=self.id,
                nbytes=nbytes,
                code=call.code,
            ) from call.error
        if self._link is None:
            self._link = PeerLink.find(self._host, self._port)

    def stop(self) -> bool:
        """End the thread after the calls it has; False when it hangs in one."""
        self._calls.put(None)
        if self._thread is None:
            return True
        if self._broken:
            return False
        self._thread.join(timeout=1.0)
        return not self._thread.is_alive()

    def _dial(self, nbytes: int, timeout_s: float) -> None:
        try:
            dial(self._host, self._port, timeout_s)
        except PeerUnreachable as error:
            raise TransferError(
                f"read of {nbytes} bytes from {self.id} failed: {error}", session=self.id, nbytes=nbytes
            ) from error

    def _ensure_thread(self) -> None:
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"read {self.id}", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.begun.release()
            if self._broken:  # it waited behind the read that missed its deadline: its caller may be gone, too
                call.error = TransferError("the session broke before this read began", session=self.id)
            else:
                try:
                    call.code = call.run()
                except Exception as error:  # reported to the caller, who waits for it
                    call.error = error
            call.ended.release()
            if call.over is not None:
                call.over()
