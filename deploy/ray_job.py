"""A deployment as a job of Ray: ``ray job submit --working-dir . -- python -m deploy.ray_job --config sluice.yaml``.

1. reserve room for all units (deploy/units.py) in one placement group (deploy/ray_job_placement.py);
2. start MemCache's MetaService and the meta server here, on the node where Ray runs the job: the head;
3. start one actor per unit (deploy/ray_job_actor.py), which starts the unit's worker processes on its node;
4. wait until the meta server reports all of them ready, print ``sluice ready`` with the addresses;
5. watch: dead processes start again where they were, units of lost nodes elsewhere (deploy/ray_job_watch.py);
6. on SIGTERM, which ``ray job stop`` sends, end everything in the few seconds that Ray leaves for it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path

import ray
import ray.util
from rich.console import Console

from deploy.launcher import DeploymentFailed
from deploy.ray_job_run import RayJob
from deploy.resolve import check
from deploy.signals import Signals, Stopped
from deploy.spread import ClusterPlan
from engine.config import ConfigError, SluiceConfig, load_config


def serve(config: SluiceConfig) -> None:
    """Until a signal ends it. Raises ConfigError; DeploymentFailed when it did not start or cannot go on."""
    check(config)
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level=logging.WARNING)
    except ConnectionError as error:
        raise DeploymentFailed(f"there is no Ray cluster here ({error}); start one, or use `sluice up`") from None
    signals = Signals()  # after Ray has set its own handlers
    with contextlib.suppress(Stopped):
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        plan = ClusterPlan.of(config, host)
        RayJob(plan, Console(), signals).run()


def main() -> int:
    """Exit status 0 after a clean stop, 1 for a deployment that failed, 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="deploy.ray_job", description="Runs a deployment as a job of Ray.")
    parser.add_argument("--config", type=Path, required=True, help="the deployment's sluice.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a field; repeatable")
    options = parser.parse_args()
    try:
        serve(load_config(options.config, options.set))
    except ConfigError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 2
    except DeploymentFailed as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
