"""A decode worker's process: `python -m decode_node.main --config R --group G --dp-rank D --tp-rank T ...`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from decode_node.geometry import plan_geometry
from decode_node.identity import Place, worker_info
from decode_node.node import NodeSetup
from decode_node.worker import DecodeWorker
from engine.config import ConfigError, load_config
from engine.config_check import served_model
from engine.model.config_reader import ModelConfigError
from transfer.hostcann.runtime import end_process


def read_setup(arguments: list[str] | None) -> NodeSetup:
    """From the command line, the configuration and the checkpoint. Raises ConfigError, ModelConfigError."""
    parser = argparse.ArgumentParser(prog="decode_node", description=__doc__)
    parser.add_argument("--config", required=True, help="resolved sluice.yaml")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--dp-rank", type=int, default=0)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="", help="torch.distributed init_method; needed when decode.tp > 1")
    parser.add_argument("--device", type=int, help="of this rank; by its place in the deployment if absent")
    parser.add_argument("--grpc-port", type=int, default=0, help="where its services listen; 0 = a free port")
    options = parser.parse_args(arguments)
    config = load_config(options.config)
    for name, value, total in (
        ("--group", options.group, config.decode.groups),
        ("--dp-rank", options.dp_rank, config.decode.dp),
        ("--tp-rank", options.tp_rank, config.decode.tp),
    ):
        if not 0 <= value < total:
            raise ConfigError(f"{name} {value}: legal: 0 to {total - 1}")
    if config.decode.tp > 1 and not options.rendezvous:
        raise ConfigError(f"--rendezvous is needed with decode.tp = {config.decode.tp}")
    model = served_model(config)
    geometry = plan_geometry(config, model)
    place = Place(options.group, options.dp_rank, options.tp_rank)
    device = config.decode_device(*place.ranks) if options.device is None else options.device
    info = worker_info(config, model, geometry, place, device)
    return NodeSetup(config, model, geometry, place, info, options.rendezvous, options.grpc_port)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 after a clean stop, 1 when it cannot start or has failed."""
    try:
        setup = read_setup(arguments)
    except (ConfigError, ModelConfigError) as error:
        print(f"decode worker: {error}", file=sys.stderr)
        return 1
    logging.basicConfig(
        level=setup.config.runtime.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    return asyncio.run(DecodeWorker(setup).serve())


if __name__ == "__main__":
    end_process(main())
