"""The pool's meta service, as a process of its own: `python -m transfer.mem_pool_service --meta-url tcp://...`.

It holds no object data, only where objects are. One runs per cluster; it ends on SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    """Run the service until it is told to end; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="transfer.mem_pool_service", description=__doc__)
    parser.add_argument("--meta-url", required=True, help="where pool clients connect, tcp://host:port")
    parser.add_argument("--config-store-url", required=True, help="where pool members meet, tcp://host:port")
    parser.add_argument("--metrics-url", required=True, help="its HTTP service, http://host:port")
    parser.add_argument("--log-dir", required=True, type=Path, help="folder for its log files")
    parser.add_argument("--log-level", default="warn", choices=("debug", "info", "warn", "error"))
    arguments = parser.parse_args()
    arguments.log_dir.mkdir(parents=True, exist_ok=True)

    from memcache_hybrid import MetaConfig, MetaService

    config = MetaConfig()
    config.meta_service_url = arguments.meta_url
    config.config_store_url = arguments.config_store_url
    config.metrics_url = arguments.metrics_url
    config.log_level = arguments.log_level
    config.log_path = os.fspath(arguments.log_dir)
    config.log_output_target = "file"
    code = MetaService.setup(config)
    if code != 0:
        print(f"the pool's meta service refused its settings (code {code}):\n{config.str()}", file=sys.stderr)
        return 1
    return int(MetaService.main())


if __name__ == "__main__":
    sys.exit(main())
