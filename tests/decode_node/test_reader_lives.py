"""Whatever is announced and fails in whatever order: each batch is answered, each block has its owner's bytes only."""

from __future__ import annotations

import ctypes
import random
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from sluice.v1 import wire_pb2

from decode_node import batch_reader
from decode_node.batch_queue import Announced, BatchQueue
from decode_node.batch_reader import SOURCE_SCRATCH_BYTES, BatchReader, Reply, Source
from decode_node.pull_counters import Counts
from decode_node.pull_plan import PullPlanner
from decode_node.pull_requests import PullRequest, PullRequests
from tests.decode_node.pull_rig import GENERATION
from tests.kv_peers import CKV, EPOCH, INDEXER_KEY, K_ROPE, LAYOUT, NUM_SLOTS, SLOT_OF_LAYER, Memory, Stats, entry
from transfer.checksum import checksums
from transfer.layout import kinds_of
from transfer.memfabric import Copies, Meanwhile

BLOCKS, BATCHES = 12, 150
SOURCE = Memory(8, 1)
WORDS = (ctypes.c_uint64 * NUM_SLOTS)(*[GENERATION] * NUM_SLOTS)
TENSORS = [(layer, kind) for layer in range(LAYOUT.num_layers) for kind in kinds_of(LAYOUT, layer)]


class Violation(BaseException):
    """Not an Exception, which the reader would take for a failed read."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass
class Stay:
    """One reservation, and how far prefill is with it: in chunks of blocks, each through all layers."""

    request: str
    generation: int
    blocks: list[int]
    theirs: list[int]  # prefill's
    begun_again: int = 0
    layer: int = 0
    start: int = 0
    end: int = 0  # of the chunk under way; `start` between chunks
    told: bool = False  # everything was announced
    terminal: bool = False


class Engine:
    """Copies at once, or fails before, in the middle or after, or leaves a copy that goes on after its deadline."""

    def __init__(self, lives: Lives) -> None:
        self._lives, self._rng = lives, lives.rng
        self._late: Copies | None = None
        self._owners: set[int] = set()
        self._broken = False

    def read(
        self,
        session_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        then: Copies | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Stats:
        if self._broken:
            raise OSError("an earlier read missed its deadline")
        require(deadline_s > 0, "a read without time")
        self._lives.happen()
        fate = self._rng.random() / self._lives.faults if self._lives.faults else 9.0
        if fate < 0.25:
            raise OSError("nothing was copied")
        owners = self._lives.owners(copies)
        require(-1 not in owners, "a read into blocks that nobody has reserved")
        if meanwhile is not None:
            meanwhile.work(time.monotonic())
        self._lives.happen()
        if fate < 0.5:
            self._move(copies, self._rng.randrange(len(copies.local)))
            raise OSError("the rest was not copied")
        if fate < 0.75:
            self._late, self._owners, self._broken = copies, owners, True
            raise TimeoutError("it goes on")
        require(self._lives.owners(copies) == owners, "blocks were given out again during the read")
        self._move(copies)
        if fate < 1:
            ctypes.c_ubyte.from_address(self._rng.choice(copies.local)).value ^= 1
        self._move(then or Copies((), (), ()))
        return Stats(sum(copies.sizes), len(copies.sizes), len(copies.sizes))

    def idle(self, session_id: str) -> bool:
        return self._late is None

    def forget(self, session_id: str) -> None:
        self._broken = False

    def end_late(self) -> None:
        if self._late is not None:
            require(self._lives.owners(self._late) == self._owners, "blocks were given out before late bytes came")
            self._move(self._late)
            self._late = None

    @staticmethod
    def _move(copies: Copies, count: int | None = None) -> None:
        for to, source, size in list(zip(*copies, strict=True))[:count]:
            ctypes.memmove(to, source, size)


class Announcements(BatchQueue):
    """Made when they are asked for."""

    def __init__(self, lives: Lives) -> None:
        super().__init__()
        self._lives = lives

    def poll(self, timeout_s: float) -> Announced | None:
        return self._lives.more()


class Lives:
    """A reader, a prefill rank that announces, and requests that are reserved and released meanwhile."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.faults = (0.0, 0.1, 0.4)[seed % 3]
        self.memory = Memory(BLOCKS)
        self.scratch = (ctypes.c_ubyte * SOURCE_SCRATCH_BYTES)()
        self.stays: dict[str, Stay] = {}  # by request; until their blocks are free
        self.owner: dict[int, int] = {}  # of a block: the generation, which is never used twice
        self.generation = 0
        self.complete = 0
        self.failed: list[str] = []
        self.announced: list[int] = []
        self.answers: Counter[int] = Counter()
        planner = PullPlanner(LAYOUT, self.memory.layer_memory(), name="decode", tp_rank=0, tp_size=1)
        self.requests = PullRequests(planner.layers_owed_by, self.end, self.free)
        self.engine = Engine(self)
        waits = {"read_timeout_s": 5.0, "read_retries": 2, "registration_wait_s": 0.001}
        self.reader = BatchReader(self.engine, planner, self.requests, Counts(), **waits)  # type: ignore[arg-type]
        hello = wire_pb2.Hello(
            worker_id="prefill",
            epoch="prefill-epoch",
            expected_epoch=EPOCH,
            session_id="session",
            tp_size=1,
            layout=LAYOUT,
            layers=SOURCE.layer_layouts(),
            generation_address=ctypes.addressof(WORDS),
        )
        self.source = Source(planner.source(hello), ctypes.addressof(self.scratch), lambda _: True)

    def run(self) -> None:
        while len(self.announced) < BATCHES:
            self.happen()
            if first := self.announce():
                self.reader.read(self.source, first, Announcements(self), self.answer)
            assert self.answers == Counter(self.announced)
        self.engine.end_late()
        self.reader.settle()
        for request in list(self.stays):
            self.requests.release(request)
        assert not self.stays and not self.owner and not len(self.requests) and not self.reader.quarantined()

    def happen(self) -> None:
        """Something that other threads may do at any moment."""
        if self.rng.random() < 0.3:
            self.reserve()
        if self.rng.random() < 0.2:
            self.engine.end_late()
            self.reader.settle()
        for stay in list(self.stays.values()):
            if self.rng.random() < (0.2 if stay.terminal else 0.005):
                self.requests.release(stay.request)

    def reserve(self) -> None:
        name, count = f"r{self.rng.randrange(5)}", self.rng.randrange(1, 4)
        free = [block for block in range(BLOCKS) if block not in self.owner]
        if name in self.stays or len(free) < count:
            return
        self.generation += 1
        theirs = [self.rng.randrange(8) for _ in range(count)]
        stay = self.stays[name] = Stay(name, self.generation, self.rng.sample(free, count), theirs)
        self.owner.update(dict.fromkeys(stay.blocks, stay.generation))
        for layer, kind in TENSORS:
            tensor = self.memory.tensor(layer, kind)
            for block in stay.blocks:
                ctypes.memset(tensor.address + block * tensor.block_bytes, 0xEE, tensor.block_bytes)
        blocks, now = tuple(stay.blocks), time.monotonic()
        self.requests.expect(PullRequest(name, self.generation, blocks, blocks, 1, range(count), 30.0, now + 30.0))

    def more(self) -> Announced | None:
        self.happen()
        return self.announce() if self.rng.random() < 0.85 and len(self.announced) < BATCHES else None

    def announce(self) -> Announced | None:
        """One layer of some of the requests that are at it."""
        open_stays = [stay for stay in self.stays.values() if not stay.told]
        layer = self.rng.choice([stay.layer for stay in open_stays] or [0])
        members = [stay for stay in open_stays if stay.layer == layer and self.rng.random() < 0.7]
        entries = [self.entry(stay) for stay in members]
        if not entries:
            return None
        self.announced.append(len(self.announced) + 1)
        batch = wire_pb2.ReadReady(
            sequence=self.announced[-1],
            layer=layer,
            slot=SLOT_OF_LAYER[layer] + self.fault(),
            generation=GENERATION + self.fault(),
            members=1,
            lease_ms=0 if self.fault() else 10_000,
            entries=entries,
            finished=[stay.request for stay in members if stay.told],
        )
        return Announced(batch, time.monotonic() + batch.lease_ms / 1000)

    def entry(self, stay: Stay) -> wire_pb2.ReadEntry:
        """The next one of a request; sometimes one that begins again, or that is wrong."""
        if stay.layer == 0 and self.rng.random() < 0.1:
            stay.begun_again, stay.start, stay.end = stay.begun_again + 1, 0, 0
        if stay.layer == 0:
            stay.end = self.rng.randrange(stay.start + 1, len(stay.blocks) + 1)
        theirs = stay.theirs[stay.start : stay.end]
        has_indexer = stay.layer in LAYOUT.indexer_layers
        made = entry(
            stay.request,
            theirs,
            stay.start + self.fault(),
            indexer=theirs if has_indexer else [],
            generation=stay.generation - self.fault(),
        )
        made.begun_again = stay.begun_again
        made.summed_main.extend(range(len(theirs)))
        made.main_sums.extend(self.sums(stay.layer, theirs, CKV, K_ROPE))
        if has_indexer:
            made.summed_indexer.extend(range(len(theirs)))
            made.indexer_sums.extend(self.sums(stay.layer, theirs, INDEXER_KEY))
        stay.layer = (stay.layer + 1) % LAYOUT.num_layers
        if stay.layer == 0:
            stay.start = stay.end
            stay.told = stay.end == len(stay.blocks)
        return made

    def sums(self, layer: int, blocks: list[int], *kinds: int) -> list[int]:
        places = [(SOURCE.tensor(layer, kind), block) for block in blocks for kind in kinds]
        addresses = [tensor.address + block * tensor.block_bytes for tensor, block in places]
        return checksums(addresses, [tensor.block_bytes for tensor, _ in places])

    def fault(self) -> int:
        """Seldom 1."""
        return int(self.rng.random() < self.faults / 20)

    def answer(self, reply: Reply) -> None:
        self.answers[reply.sequence] += 1

    def owners(self, copies: Copies) -> set[int]:
        """Generations of the requests whose blocks these copies write to; -1 for a block of nobody's."""
        found = set()
        for layer, kind in TENSORS:
            tensor = self.memory.tensor(layer, kind)
            inside = range(tensor.address, tensor.address + BLOCKS * tensor.block_bytes)
            blocks = {(to - inside.start) // tensor.block_bytes for to in copies.local if to in inside}
            found |= {self.owner.get(block, -1) for block in blocks}
        return found

    def end(self, request: str, generation: int, error: str | None) -> None:
        stay = self.stays[request]
        require(stay.generation == generation and not stay.terminal, "a request ended twice")
        stay.terminal = True
        if error is not None:
            self.failed.append(error)
            return
        self.complete += 1
        for layer, kind in TENSORS:
            for mine, theirs in zip(stay.blocks, stay.theirs, strict=True):
                right = self.memory.block(layer, kind, mine) == SOURCE.block(layer, kind, theirs)
                require(right, f"wrong bytes of request {request} in layer {layer}")

    def free(self, request: str) -> None:
        for block in self.stays.pop(request).blocks:
            del self.owner[block]


@pytest.mark.parametrize("seed", range(30))
def test_every_batch_is_answered_and_every_block_is_its_owners(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete requests have prefill's bytes; without faults none fails."""
    monkeypatch.setattr(batch_reader, "_FIRST_PAUSE_S", 0.0)
    lives = Lives(seed)
    lives.run()
    assert lives.complete and bool(lives.failed) == bool(lives.faults), lives.failed
