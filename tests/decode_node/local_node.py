"""A decode node in one process: everything real but the transfer, which copies from a dense reference prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_node.backend import SELECTORS, DecodeBackend
from decode_node.commands import Report
from decode_node.drafter import Drafter
from decode_node.events import Delivered, Ended, GeneratedToken, Reserved
from decode_node.faults import HostRowEraser
from decode_node.finish import FinishRules
from decode_node.geometry import plan_geometry
from decode_node.inbox import Inbox
from decode_node.kv_room import kv_manager
from decode_node.leader import LeaderLoop
from decode_node.memory import DecodeMemory, DeviceMemory, HostMemory, RowTables
from decode_node.rank import PullTerms, Rank
from decode_node.scheduler import DecodeRequest, Scheduler, SchedulerLimits
from engine.config import SluiceConfig
from engine.config_check import served_model
from engine.model.attention import IndexerQuery
from engine.model.config import ModelConfig
from engine.model.decoder import DsaDecoder
from engine.model.draft import DraftLayer
from engine.model.loader import load_weights
from engine.model.parallel import SingleRank, TensorParallel
from engine.sampling import SampleRow, sample
from engine.sampling_params import SamplingParams
from engine.tp_channel import TpLeader
from tests.model.dense_backend import DenseBackend

POISON = float("nan")
PREFILL_CHUNK = 256
GREEDY = SamplingParams(temperature=0)
FAR = 1e12  # a deadline that never comes


class PoisonedMemory:
    """Plain memory in place of device and host pool; NaN wherever nothing was written."""

    address = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), POISON if dtype.is_floating_point else 85, dtype=dtype)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.empty(shape, dtype)


class RecordingBackend(DenseBackend):
    """The dense reference, which also keeps each layer's rows of one request in order of position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.rows: dict[int, list[tuple[Tensor, Tensor, Tensor | None]]] = {}

    def attend(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, ckv: Tensor, k_rope: Tensor, indexer: IndexerQuery | None
    ) -> Tensor:
        self.rows.setdefault(layer, []).append((ckv, k_rope, None if indexer is None else indexer.k))
        return super().attend(layer, q_nope, q_rope, ckv, k_rope, indexer)


@dataclass
class Session:
    """What a client sees of one request."""

    prompt: list[int]
    first_token: int
    node: LocalNode
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None

    def deliver(self, event: Reserved | Delivered | Ended) -> None:
        if isinstance(event, Reserved):
            self.node.inbox.first_token(event.request_id, GeneratedToken(self.first_token))
        elif isinstance(event, Delivered):
            self.tokens.append(event.token.id)
        else:
            self.ended = event


class LocalRank:
    """One rank without a leader. `group` and `host` are shared with the other ranks, if there are any."""

    def __init__(
        self,
        model_dir: Path,
        report: Callable[[Report], None],
        *,
        group: TensorParallel | None = None,
        host: HostMemory | None = None,
        device: DeviceMemory | None = None,
        dtype: str = "float32",
        indexer_dtype: str = "model",
        max_model_len: int | None = None,
        **decode: int | str,
    ) -> None:
        model = {"path": str(model_dir), "dtype": dtype, "max_model_len": max_model_len}
        kv = {"block_size": 16, "indexer_dtype": indexer_dtype}
        sections = {"model": model, "decode": {"host_pool_bytes": 8 << 20, **decode}, "kv": kv}
        self.config = SluiceConfig.model_validate(sections)
        self.model = served_model(self.config)
        self.geometry = plan_geometry(self.config, self.model)
        group, torch_dtype = group or SingleRank(), getattr(torch, dtype)
        self.owns_host = group.shard.rank == 0
        self._reference = DsaDecoder(self.model, load_weights(model_dir, self.model, torch_dtype), None, torch_dtype)
        count = self.config.decode.speculative_tokens
        self._reference_draft = DraftLayer(self._reference) if count else None
        weights = load_weights(model_dir, self.model, torch_dtype, group.shard)
        poisoned = PoisonedMemory()
        self.memory = DecodeMemory(self.geometry, torch_dtype, device or poisoned, host or poisoned)
        self.tables = RowTables(self.geometry)
        selector = SELECTORS[self.config.decode.selection](self.model, self.memory, self.tables)
        self.backend = DecodeBackend(self.model, self.memory, self.tables, selector, writes_host=self.owns_host)
        decoder, terms = DsaDecoder(self.model, weights, group, torch_dtype), PullTerms(contributors=1, lease_s=60.0)
        self.rank = Rank(
            decoder,
            self.backend,
            self.tables,
            self.geometry.block_size,
            terms,
            report,
            leads=self.owns_host,
            drafter=Drafter(DraftLayer(decoder), self.backend, count) if count else None,
        )
        self.rank.attach(_CopyingSource(self))
        self.prefills: dict[str, RecordingBackend] = {}
        self.refuse_pulls: str | None = None  # the error every further pull ends with

    def prefill(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> int:
        """Keeps the dense reference's rows for the request's pulls; returns its first token."""
        backend = RecordingBackend(self.model)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            tokens = torch.tensor(prompt[start : start + PREFILL_CHUNK])
            backend.begin([("prompt", len(tokens))])
            positions = torch.arange(start, start + len(tokens))
            hidden = self._reference.hidden(tokens, positions, backend)
            first = sample(self._reference.logits(hidden[-1:]), [SampleRow(request_id, sampling, len(prompt))])[0].token
            if self._reference_draft is not None:
                behind = torch.tensor([*prompt[start + 1 : start + 1 + len(tokens)], first][: len(tokens)])
                self._reference_draft.hidden(hidden, behind, positions, backend)
        self.prefills[request_id] = backend
        return first


class LocalNode(LocalRank):
    """Rank 0 with its loop: `start` requests, then `finish` them."""

    def __init__(
        self, model_dir: Path, run_dir: Path, *, erase: str = "", channel: TpLeader | None = None, **options: Any
    ) -> None:
        self.inbox = Inbox()
        super().__init__(model_dir, self.inbox.own_report, **options)
        ranks = 1 if channel is None else 2
        limits = SchedulerLimits(
            ranks=ranks,
            max_waiting=self.config.decode.max_waiting,
            max_request_tokens=self.geometry.max_request_tokens,
            lease_s=60.0,
            step_tokens=self.config.decode.step_tokens,
            headroom_tokens=self.config.decode.headroom_tokens,
        )
        self.scheduler = Scheduler(kv_manager(self.geometry), limits)
        eraser = HostRowEraser(erase, self.memory, self.tables) if erase else None
        channel = channel or TpLeader(run_dir, "local", 1)
        self.loop = LeaderLoop(self.inbox, self.scheduler, self.rank, channel, ranks, eraser)

    def start(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams) -> Session:
        """Submits a request whose prefill has already happened."""
        session = Session(list(prompt), self.prefill(request_id, prompt, sampling), self)
        rules = FinishRules(sampling, frozenset(self.model.eos_token_ids), self.geometry.max_request_tokens)
        self.inbox.submit(DecodeRequest(request_id, len(prompt), rules, FAR), session)
        return session

    def run_until(self, done: Callable[[], bool], most: int = 20_000) -> None:
        for _ in range(most):
            if done():
                return
            self.loop.turn(0.0 if self.scheduler.running() else 0.001)
        raise AssertionError(f"not done after {most} turns")

    def finish(self, *sessions: Session) -> None:
        """Runs until the sessions have ended and every pool is empty again."""
        self.run_until(lambda: all(session.ended for session in sessions))
        self.run_until(lambda: all(usage.used == 0 for usage in self.scheduler.usage().values()))


class _CopyingSource:
    """Stands for the puller: writes the reference's rows where the request's blocks are, at once."""

    failure = None

    def __init__(self, node: LocalRank) -> None:
        self._node = node

    def expect(
        self,
        request_id: str,
        generation: int,
        main_blocks: Sequence[int],
        indexer_blocks: Sequence[int],
        contributors: int,
        *,
        wanted: range,
        lease_s: float,
    ) -> None:
        node, bs = self._node, self._node.geometry.block_size
        for layer, chunks in node.prefills[request_id].rows.items():
            ckv, k_rope = (torch.cat([chunk[part] for chunk in chunks]) for part in (0, 1))
            host_ckv, host_k_rope = node.memory.host_ckv[layer], node.memory.host_k_rope[layer]
            at = torch.arange(len(ckv))
            if node.owns_host:
                slots = torch.tensor(main_blocks)[at // bs] * bs + at % bs
                for rows, cache in ((ckv, host_ckv), (k_rope, host_k_rope)):
                    cache.view(-1, rows.shape[1])[slots] = rows
            if layer in node.memory.indexers:
                keys = torch.cat([chunk[2] for chunk in chunks if chunk[2] is not None])
                slots = torch.tensor(indexer_blocks)[at // bs] * bs + at % bs
                node.memory.indexers[layer].write(slots, keys)
        node.rank.pull_ended(request_id, generation, node.refuse_pulls)

    def release(self, request_id: str) -> None:
        self._node.rank.quiescent(request_id)
