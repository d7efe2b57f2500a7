"""Entry of a prefill worker process, started by the launcher as `python -m prefill_node.main`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from engine.config import ConfigError, SluiceConfig, load_config
from engine.config_check import check_against_model, served_model
from engine.worker import WorkerProcess
from prefill_node.assembly import RankPlan
from prefill_node.identity import Place, worker_info
from prefill_node.shape import prefill_shape
from prefill_node.worker import PrefillWorker
from transfer.hostcann.runtime import end_process, end_process_within, ended_in_time

STOP_TIMEOUT_S = 4.0  # for the step under way and the closing of the transfers
END_TIMEOUT_S = 6.5  # for all of a stop but leaving the pool; then the process ends as it is


def main() -> int:
    """Runs until SIGTERM; exit status 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="prefill_node", description=__doc__)
    parser.add_argument("--config", required=True, help="resolved sluice.yaml of the run")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--tp-rank", type=int, required=True)
    parser.add_argument("--rendezvous", required=True, help="torch.distributed URL where the TP ranks meet")
    parser.add_argument("--device", type=int, help="of this rank; by its place in the deployment if absent")
    parser.add_argument("--grpc-port", type=int, default=0, help="where its services listen; 0 = a free port")
    arguments = parser.parse_args()
    place = Place(arguments.group, arguments.tp_rank)
    try:
        config = load_config(arguments.config)
        logging.basicConfig(
            level=config.runtime.log_level.upper(),
            format=f"%(asctime)s {place.worker_id} %(levelname)s %(name)s: %(message)s",
        )
        device = config.prefill_device(place.group, place.tp_rank) if arguments.device is None else arguments.device
        plan = _plan(config, place, device, arguments.rendezvous)
    except ValueError as error:  # every error of configuration and checkpoint is one
        print(f"{place.worker_id}: {error}", file=sys.stderr)
        return 1
    worker = PrefillWorker(plan)
    code = asyncio.run(_serve(plan, worker, arguments.grpc_port))
    ended_in_time()
    worker.leave_pool()
    return code


def _plan(config: SluiceConfig, place: Place, device: int, rendezvous: str) -> RankPlan:
    if config.runtime.run_dir is None:
        raise ConfigError("runtime.run_dir must be set for a worker process; `sluice up` chooses one")
    groups, ranks = config.prefill.groups, config.prefill.tp
    if not (0 <= place.group < groups and 0 <= place.tp_rank < ranks):
        raise ConfigError(f"{place.worker_id} is not one of prefill.groups = {groups} of prefill.tp = {ranks} ranks")
    model = served_model(config)
    check_against_model(config, model)
    shape = prefill_shape(config, model)
    info = worker_info(config, model, shape, place, device)
    return RankPlan(config, model, shape, info, place.group, rendezvous)


async def _serve(plan: RankPlan, worker: PrefillWorker, grpc_port: int) -> int:
    process = WorkerProcess(plan.config, plan.info, worker.status, grpc_port)
    await process.start(worker.add_services)
    loop = asyncio.get_running_loop()
    worker.start(
        on_ready=lambda: asyncio.run_coroutine_threadsafe(process.set_ready(), loop),
        on_failure=lambda reason: loop.call_soon_threadsafe(process.fail, reason),
    )
    code = await process.run()
    if code == 0:
        await worker.drained(plan.config.runtime.drain_s)
    end_process_within(END_TIMEOUT_S)
    ended = await asyncio.to_thread(worker.stop, STOP_TIMEOUT_S)
    await process.stop()
    if not ended:
        logging.getLogger(__name__).error("the engine thread did not end within %.0f s", STOP_TIMEOUT_S)
    return code if ended else code or 1


if __name__ == "__main__":
    end_process(main())
