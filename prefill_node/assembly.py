"""Makes one prefill rank out of its parts."""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from sluice.v1 import registry_pb2

from engine import ops
from engine.config import SluiceConfig
from engine.device import Device
from engine.faults import before_step, open_device
from engine.model.config import ModelConfig
from engine.model.decoder import DsaDecoder
from engine.model.draft import DraftLayer
from engine.model.loader import load_weights
from engine.model.parallel import TensorParallelGroup
from engine.model.shard import Shard
from prefill_node.backend import PrefillBackend
from prefill_node.block_keys import Writers
from prefill_node.block_sums import stamp_for
from prefill_node.faulty_pool import FaultyPool
from prefill_node.generation import GenerationWords
from prefill_node.joining_pool import JoiningPool
from prefill_node.layer_buffers import LayerBuffers
from prefill_node.link import SourceInfo
from prefill_node.pool_client import PoolClient
from prefill_node.pool_health import GuardedPool
from prefill_node.pool_loader import PoolLoader
from prefill_node.pool_objects import PoolObjects
from prefill_node.pool_saver import PoolSaver
from prefill_node.pool_watch import PoolWatch
from prefill_node.publisher import Publisher
from prefill_node.rank import PrefillRank
from prefill_node.reuse_gate import ReuseGate
from prefill_node.routes import Routes
from prefill_node.saved_steps import saved_steps
from prefill_node.shape import PrefillShape
from transfer import faults as transfer_faults
from transfer.mem_pool import PoolError
from transfer.mem_pool_messages import PoolOptions
from transfer.mem_pool_process import PoolProcess
from transfer.memfabric import MemFabricEngine
from transfer.pool_monitor import PoolMonitor

LEASES_PER_STEP = 2  # what a step needs is leased for twice its longest time, and renewed at half of that
CALL_PATIENCE = 1.5  # a pool call is given up after this many `pool.timeout_s`, before those who wait for it
TELL_PATIENCE = 0.4  # a rank waits for rank 0's word that long, and with one call behind it less than those who wait
MONITOR_S = 5.0  # a pool's service that takes longer to say how it is counts as restarted
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RankParts:
    """A running rank, and what its status is made from."""

    rank: PrefillRank
    device: Device
    engine: MemFabricEngine  # serves readers for as long as it is referenced
    gate: ReuseGate
    publisher: Publisher
    pool: GuardedPool
    watch: PoolWatch
    loader: PoolLoader
    saver: PoolSaver
    backend: PrefillBackend


@dataclass(frozen=True)
class RankPlan:
    """What a rank is to be made of."""

    config: SluiceConfig
    model: ModelConfig
    shape: PrefillShape
    info: registry_pb2.WorkerInfo
    group: int
    rendezvous: str  # where the group's ranks meet, a torch.distributed URL; unused with one rank


def assemble(
    plan: RankPlan, stack: contextlib.ExitStack, farewell: contextlib.ExitStack, progress: Callable[[str], None]
) -> RankParts:
    """Loads the model, takes the device memory, opens the transfers; `stack` closes what must take its leave, and
    `farewell` leaves the pool, as the last thing the process does.

    Device memory and the transfer engine are left to the end of the process: readers may be at work until then.

    `progress` is told what is being done, and may raise to give up. Errors of the parts pass through.
    """
    config, model, shape, info = plan.config, plan.model, plan.shape, plan.info
    torch.set_num_threads(config.prefill.threads)
    ops.set_device(info.device_id)
    decoder = _load(plan, stack, progress)
    progress("taking device memory")
    device = open_device(info.device_id, config.faults)
    buffers = LayerBuffers(
        device,
        shape.plan,
        shape.geometry,
        shape.kv_blocks,
        decoder.dtype,
        checksums=config.pool.checksum == "on",
    )
    words = GenerationWords(buffers.generation_words)
    progress("opening the transfer engine")
    engine = _open_engine(plan, buffers)
    progress("opening the pool")
    monitor = PoolMonitor(f"http://{config.pool_host}:{config.pool.metrics_port}", deadline_s=MONITOR_S)
    with contextlib.suppress(PoolError):
        monitor.usage()  # before the pool is joined, so that no restart after that is missed
    joining = JoiningPool(partial(_open_pool, plan, buffers))
    farewell.callback(joining.close)
    joining.join_within(config.pool.timeout_s)
    pool = GuardedPool(_with_faults(plan, joining))
    gate = ReuseGate(
        shape.plan.num_slots, words, save_grace_s=config.pool.timeout_s, closes=not config.faults.reuse_gate_off
    )
    errors: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    source = SourceInfo(
        worker_id=info.worker_id,
        epoch=info.epoch,
        session_id=engine.session_id,
        tp_rank=info.tp_rank,
        tp_size=info.tp_size,
        layout=info.layout,
        layers=buffers.layouts(),
        generation_address=words.address,
    )
    publisher = Publisher(
        source,
        gate,
        words,
        lease_s=config.transfer.lease_s,
        handshake_timeout_s=config.transfer.handshake_timeout_s,
        on_request_error=lambda request_id, text: errors.put((request_id, text)),
        stamp=stamp_for(config.transfer.checksum, source),
        outlet=transfer_faults.outlet(config.faults, info.worker_id),
    )
    publisher.start()
    stack.callback(publisher.close)
    loader = stack.enter_context(
        contextlib.closing(PoolLoader(pool, shape.object_layout, buffers, config.pool.timeout_s))
    )
    folder = config.runtime.run_dir or "."
    patience_s = TELL_PATIENCE * config.pool.timeout_s
    told = saved_steps(folder, info.group, info.tp_rank, info.tp_size, patience_s, stack)
    saver = PoolSaver(
        pool,
        PoolObjects(
            pool,
            Writers(plan.group, config.prefill.groups),
            shape.object_layout.object_bytes,
            lease_s=LEASES_PER_STEP * config.runtime.collective_timeout_s,
        ),
        shape.object_layout,
        buffers,
        gate,
        writes=info.tp_rank == 0,
        timeout_s=config.pool.timeout_s,
        saved_steps=told,
    )
    stack.callback(saver.close)
    routes = stack.enter_context(contextlib.closing(Routes(publisher)))
    backend = PrefillBackend(model, buffers, gate, publisher, routes, loader, saver)
    stack.callback(backend.close)
    watch = PoolWatch(joining, pool, monitor, period_s=config.runtime.heartbeat_s)
    stack.callback(watch.close)
    draft = DraftLayer(decoder) if config.decode.speculative_tokens else None
    rank = PrefillRank(
        decoder,
        backend,
        routes,
        publisher,
        saver,
        errors,
        shape.geometry.block_size,
        draft,
        before_step(config.faults, info.worker_id),
    )
    return RankParts(rank, device, engine, gate, publisher, pool, watch, loader, saver, backend)


def _load(plan: RankPlan, stack: contextlib.ExitStack, progress: Callable[[str], None]) -> DsaDecoder:
    config, shard = plan.config, Shard(plan.info.tp_rank, plan.info.tp_size)
    group = None
    if shard.size > 1:
        progress("meeting the other TP ranks")
        group = TensorParallelGroup(shard, plan.rendezvous, timeout_s=config.runtime.collective_timeout_s)
        stack.callback(group.close)
    dtype = DTYPES[config.model.dtype]
    weights = load_weights(
        config.model.path,
        plan.model,
        dtype,
        shard,
        progress=lambda layer, layers: progress(f"loading weights: layer {layer} of {layers}"),
    )
    return DsaDecoder(plan.model, weights, group, dtype)


def _open_engine(plan: RankPlan, buffers: LayerBuffers) -> MemFabricEngine:
    """It serves readers until the process ends: its own farewell would only sleep for five seconds."""
    config = plan.config
    engine = MemFabricEngine(
        host=config.runtime.host,
        device_id=plan.info.device_id,
        role="prefill",
        protocol=config.transfer.protocol,
        store_url=f"tcp://{config.runtime.host}:{config.transfer.store_port}",
    )
    for address, nbytes in (*buffers.regions(), buffers.generation_region()):
        engine.register(address, nbytes)
    return engine


def _open_pool(plan: RankPlan, buffers: LayerBuffers) -> PoolProcess:
    config = plan.config
    host = config.pool_host
    options = PoolOptions(
        meta_url=f"tcp://{host}:{config.pool.meta_port}",
        config_store_url=f"tcp://{host}:{config.pool.config_port}",
        device_id=plan.info.device_id,
        dram_bytes=config.pool.dram_bytes,
        # Twice the ranks: a new client may join before its predecessor has left.
        world_size=2 * config.prefill.groups * config.prefill.tp,
        protocol=config.pool.protocol,
        timeout_s=math.ceil(config.pool.timeout_s / 2),  # an operation makes up to two calls to the meta service
    )
    return PoolProcess(options, buffers.pool_regions(), call_s=CALL_PATIENCE * config.pool.timeout_s)


def _with_faults(plan: RankPlan, pool: PoolClient) -> PoolClient:
    faults = plan.config.faults
    if not (faults.pool_delay_s or faults.pool_failure):
        return pool
    seed = f"{faults.seed} {plan.info.worker_id}"
    return FaultyPool(pool, delay_s=faults.pool_delay_s, failure=faults.pool_failure, seed=seed)
