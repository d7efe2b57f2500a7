"""The meta server's process: `python -m meta_server.main --config sluice.yaml`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys

from engine.config import ConfigError, SluiceConfig, load_config
from engine.model.config_reader import ModelConfigError
from engine.tokenizer import TokenizerError
from meta_server.server import MetaServer

log = logging.getLogger("meta_server")


async def serve(config: SluiceConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = MetaServer(config)
    await server.start()
    log.info("gRPC on %s:%d, HTTP on %s:%d", config.grpc.host, server.grpc_port, config.http.host, server.http_port)
    await stop.wait()
    log.info("stopping")
    await server.drain()
    await server.stop()


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 after a clean stop, 1 with one line on stderr when it cannot start."""
    parser = argparse.ArgumentParser(prog="meta_server", description=__doc__)
    parser.add_argument("--config", required=True, help="resolved sluice.yaml")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config)
        logging.basicConfig(
            level=config.runtime.log_level.upper(),
            stream=sys.stderr,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        asyncio.run(serve(config))
    except (ConfigError, ModelConfigError, TokenizerError, OSError) as error:
        print(f"meta server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
