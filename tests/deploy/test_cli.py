"""The command line: what users see when they make a mistake, and that it stays light."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from sluice.v1 import client_pb2, common_pb2

from deploy.client import Client, ClientError
from deploy.status_view import format_bytes, status_as_json, status_view
from tests.cluster import CONFIG, REPOSITORY


def sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--config", "absent.yaml"], "absent.yaml: cannot be read"),
        (["up", "--config", str(CONFIG), "--set", "decode.hotness=1"], "decode.hotness: unknown key; legal keys: dp,"),
        (
            ["up", "--config", str(CONFIG), "--set", "prefill.tp=3", "--set", "decode.tp=2"],
            "prefill.tp = 3 must be a multiple of decode.tp = 2",
        ),
        (["up", "--config", str(CONFIG), "--set", "transfer.protocol=tcp"], "'sdma', 'device_rdma' or 'device_urma'"),
        (["up", "--config", str(CONFIG), "--set", "decode.hot_tokens=32"], "decode.hot_tokens = 32"),
        (["up", "--config", str(CONFIG), "--model", "/absent"], "model.path: /absent"),
        (["status", "--address", "127.0.0.1:1"], "no deployment answers at 127.0.0.1:1"),
        (["status", "--address", ""], "--address '': write HOST:PORT"),
        (["status", "--address", "localhost:notaport"], "--address 'localhost:notaport': write HOST:PORT"),
        (["up", "--model", ""], "model.path = ''"),
        (["generate", "--address", "127.0.0.1:1"], "give either --prompt TEXT or --tokens"),
        (["generate", "--address", "127.0.0.1:1", "--prompt", "ab\udcff"], "--prompt: is not UTF-8 at character 2"),
        (["generate", "--address", "127.0.0.1:1", "--tokens", "1,x"], "write token ids as 1,2,3"),
    ],
)
def test_mistakes_get_one_clear_message(arguments: list[str], message: str) -> None:
    result = sluice(*arguments)
    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


def test_an_http_port_is_told_from_one_of_grpc() -> None:
    class Answer(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Into no test's output."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        address = f"127.0.0.1:{server.server_port}"
        with Client(address) as client, pytest.raises(ClientError, match=f"{address} does not speak gRPC"):
            client.status()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_ctrl_c_while_the_command_is_imported_ends_it_quietly(tmp_path: Path) -> None:
    package = tmp_path / "typer"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    command = [sys.executable, "-c", "from deploy.entry import main; main()"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, env=environment)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


def test_the_command_line_needs_no_torch() -> None:
    code = "import sys, deploy.cli, deploy.launcher, deploy.status_view; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def snapshot() -> client_pb2.GetStatusResponse:
    status = client_pb2.GetStatusResponse(model="m", max_model_len=4096, requests_in_flight=2, ready=True)
    worker = status.workers.add(health="ready")
    worker.info.worker_id, worker.info.tp_size = "decode-0/dp0/tp0", 1
    worker.status.pools.append(common_pb2.PoolUsage(name="host_blocks", used=3, total=12, unit="blocks"))
    status.pools.append(common_pb2.PoolUsage(name="memcache", used=0, total=3 << 30, unit="bytes"))
    return status


def test_json_status_has_numbers_and_zero_values() -> None:
    tree = status_as_json(snapshot())
    assert tree["requests_in_flight"] == 2
    assert tree["workers"][0]["status"]["pools"] == [{"name": "host_blocks", "used": 3, "total": 12, "unit": "blocks"}]
    assert tree["pools"][0]["used"] == 0 and tree["pools"][0]["total"] == 3 << 30


def test_status_table_shows_workers_and_pools() -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(status_view(snapshot()))
    text = console.export_text()
    for part in ("decode-0/dp0/tp0", "host_blocks", "3 blocks", "12 blocks", "25%", "3.0 GiB", "in flight 2"):
        assert part in text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
