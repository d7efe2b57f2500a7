"""What a decode worker refuses to start with, and what it registers as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sluice.v1 import common_pb2

from decode_node.main import main, read_setup
from tests.checkpoints import random_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model") / "m", "glm_moe_dsa")


def written(tmp_path: Path, checkpoint: Path, **sections: Any) -> str:
    path = tmp_path / "sluice.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(checkpoint)}, **sections}))
    return str(path)


def test_identity_tells_place_sizes_and_layout(tmp_path: Path, checkpoint: Path) -> None:
    sections = {
        "prefill": {"tp": 2},
        "decode": {"groups": 2, "dp": 2, "tp": 2, "max_requests": 5, "host_pool_bytes": 1 << 20},
    }
    config = written(tmp_path, checkpoint, **sections)
    place = ["--group", "1", "--dp-rank", "1", "--tp-rank", "1", "--rendezvous", "file:///unused"]
    setup = read_setup(["--config", config, *place])
    info = setup.info
    assert (info.worker_id, info.group, info.role) == ("decode-1/dp1/tp1", "decode-1", common_pb2.WORKER_ROLE_DECODE)
    assert (info.dp_rank, info.tp_rank, info.tp_size) == (1, 1, 2)
    assert info.device_id == 2 + 7  # after prefill's two
    assert info.max_requests == 5
    assert info.max_request_tokens == setup.geometry.max_request_tokens == (1 << 20) // (4 * 64 * 4 * 16) * 16
    assert list(info.layout.indexer_layers) == [0, 1, 2, 3]
    assert info.epoch != read_setup(["--config", config, *place]).info.epoch


@pytest.mark.parametrize(
    ("arguments", "sections", "message"),
    [
        (["--group", "1"], {}, "--group 1: legal: 0 to 0"),
        (["--group", "0", "--dp-rank", "2"], {"decode": {"dp": 2}}, "--dp-rank 2: legal: 0 to 1"),
        (["--group", "0", "--tp-rank", "-1"], {}, "--tp-rank -1: legal: 0 to 0"),
        (["--group", "0"], {"decode": {"tp": 2}, "prefill": {"tp": 2}}, "--rendezvous is needed with decode.tp = 2"),
        (["--group", "0"], {"decode": {"hot_tokens": 32}}, "decode.hot_tokens = 32 cannot hold the 64 tokens"),
        (["--group", "0"], {"decode": {"host_pool_bytes": 100}}, "decode.host_pool_bytes = 100 holds no block"),
        (["--group", "0"], {"decode": {"cold_tokens": 1}}, "decode.cold_tokens: unknown key"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    arguments: list[str],
    sections: dict[str, Any],
    message: str,
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", written(tmp_path, checkpoint, **sections), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", written(tmp_path, tmp_path / "nowhere"), "--group", "0"]) == 1
    assert f"{tmp_path}/nowhere" in capsys.readouterr().err
