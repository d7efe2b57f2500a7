"""Builds everything one TP rank owns, on its engine thread, and takes it down again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from sluice.v1 import registry_pb2

from decode_node.backend import SELECTORS, DecodeBackend
from decode_node.batch_reader import SOURCE_SCRATCH_BYTES
from decode_node.commands import RankEndpoint, Report
from decode_node.drafter import Drafter
from decode_node.faults import reader
from decode_node.geometry import DecodeGeometry
from decode_node.identity import Place
from decode_node.memory import DTYPES, DecodeMemory, RowTables
from decode_node.puller import MAX_SOURCES, Puller
from decode_node.rank import PullTerms, Rank
from engine.config import ConfigError, SluiceConfig
from engine.faults import before_step, open_device
from engine.model.config import ModelConfig
from engine.model.decoder import DsaDecoder
from engine.model.draft import DraftLayer
from engine.model.loader import load_weights
from engine.model.parallel import SingleRank, TensorParallel, TensorParallelGroup
from engine.model.shard import Shard
from engine.ops import set_device, set_num_threads
from transfer import faults as transfer_faults
from transfer.host_pool import HostPool
from transfer.hostcann.runtime import DeviceOutOfMemory
from transfer.memfabric import MemFabricEngine

SCRATCH_BYTES = MAX_SOURCES * SOURCE_SCRATCH_BYTES
"""Of each rank, behind the host pool's blocks: where its puller reads generation words to."""


@dataclass(frozen=True)
class NodeSetup:
    """What a rank is built from."""

    config: SluiceConfig
    model: ModelConfig
    geometry: DecodeGeometry
    place: Place
    info: registry_pb2.WorkerInfo
    rendezvous: str  # torch.distributed init_method, used with several ranks
    grpc_port: int = 0  # where its services listen; 0 = a free port

    @property
    def ranks(self) -> int:
        return self.config.decode.tp


@dataclass(frozen=True)
class Node:
    """A rank that is ready to take turns."""

    rank: Rank
    backend: DecodeBackend
    memory: DecodeMemory
    tables: RowTables
    puller: Puller
    endpoint: RankEndpoint
    device_bytes: int


def build_node(
    setup: NodeSetup,
    host_pool_url: str,
    report: Callable[[Report], None],
    progress: Callable[[str], None],
    resources: ExitStack,
) -> Node:
    """Loads the model and allocates all memory; what must be closed is put on `resources`. Blocks for long.

    Device memory, host pool and transfer engine are not: they end with the process, and saying goodbye to their peers
    takes the wheels several seconds that a stop does not have.

    `report` is called from any thread with what the leader must know. `progress` gets lines for people to read.

    Raises:
        ConfigError: the device cannot hold the caches; the text names the fields to change.
    """
    config, model, geometry, place = setup.config, setup.model, setup.geometry, setup.place
    torch.set_num_threads(config.decode.threads)
    set_num_threads(config.decode.threads)
    set_device(setup.info.device_id)
    group = _join_group(setup, progress, resources)
    decoder = _load_decoder(setup, group, progress)

    progress("allocating KV memory")
    device = open_device(setup.info.device_id, config.faults)
    pool = HostPool.create(
        rank=place.tp_rank,
        world_size=setup.ranks,
        nbytes=geometry.host_pool_bytes + setup.ranks * SCRATCH_BYTES,
        store_url=host_pool_url,
        device_id=setup.info.device_id,
        broadcast=lambda value: _from_rank_zero(group, value),
    )
    engine = MemFabricEngine(
        host=config.runtime.host,
        device_id=setup.info.device_id,
        role="decode",
        protocol=config.transfer.protocol,
        store_url=f"tcp://{config.runtime.host}:{config.transfer.store_port}",
    )
    try:
        memory = DecodeMemory(geometry, DTYPES[config.model.dtype], device, pool)
    except DeviceOutOfMemory as error:
        raise ConfigError(
            f"{place.worker_id}: indexer caches of {geometry.num_blocks} blocks and hot buffers of "
            f"{geometry.hot.rows} rows do not fit the device: {error}; lower decode.host_pool_bytes, decode.hot_tokens "
            "or decode.max_requests, or raise hostcann.hbm_bytes"
        ) from error
    for indexer in memory.indexers.values():
        for tensor in indexer.tensors:
            engine.register(tensor.data_ptr(), tensor.nbytes)
    engine.register(pool.address, pool.nbytes)

    tables = RowTables(geometry)
    selector = SELECTORS[config.decode.selection](model, memory, tables)
    backend = DecodeBackend(model, memory, tables, selector, writes_host=place.tp_rank == 0)
    terms = PullTerms(config.prefill.tp // setup.ranks, config.decode.reservation_s)
    count = config.decode.speculative_tokens
    drafter = Drafter(DraftLayer(decoder), backend, count) if count else None
    leads = place.tp_rank == 0
    rank = Rank(
        decoder,
        backend,
        tables,
        geometry.block_size,
        terms,
        report,
        leads=leads,
        drafter=drafter,
        before_step=before_step(config.faults, place.worker_id),
    )
    puller = Puller(
        bind=f"tcp://{config.runtime.host}:*",
        worker_id=place.worker_id,
        epoch=setup.info.epoch,
        layout=setup.info.layout,
        tp_rank=place.tp_rank,
        tp_size=setup.ranks,
        memory=memory.pull_targets(),
        engine=reader(engine, config.faults, place.worker_id),
        scratch_address=pool.address + geometry.host_pool_bytes + place.tp_rank * SCRATCH_BYTES,
        read_timeout_s=config.transfer.read_timeout_s,
        read_retries=config.transfer.read_retries,
        handshake_timeout_s=config.transfer.handshake_timeout_s,
        on_terminal=rank.pull_ended,
        on_quiescent=rank.quiescent,
        outlet=transfer_faults.outlet(config.faults, place.worker_id),
    )
    rank.attach(puller)
    puller.start()
    resources.callback(puller.close)
    endpoint = RankEndpoint(puller.address, setup.info.epoch)
    return Node(rank, backend, memory, tables, puller, endpoint, device.allocated_bytes)


def _join_group(setup: NodeSetup, progress: Callable[[str], None], resources: ExitStack) -> TensorParallel:
    if setup.ranks == 1:
        return SingleRank()
    progress("joining the other TP ranks")
    shard = Shard(setup.place.tp_rank, setup.ranks)
    group = TensorParallelGroup(shard, setup.rendezvous, timeout_s=setup.config.runtime.collective_timeout_s)
    resources.callback(group.close)
    return group


def _from_rank_zero(group: TensorParallel, value: int) -> int:
    """Rank 0's value, on every rank: the sum of it and the others' zeros."""
    return int(group.all_reduce(torch.tensor([value if group.shard.rank == 0 else 0])))


def _load_decoder(setup: NodeSetup, group: TensorParallel, progress: Callable[[str], None]) -> DsaDecoder:
    dtype = DTYPES[setup.config.model.dtype]
    weights = load_weights(
        setup.config.model.path,
        setup.model,
        dtype,
        group.shard,
        progress=lambda done, total: progress(f"loading weights: {done} of {total} layers"),
    )
    return DsaDecoder(setup.model, weights, group, dtype)
