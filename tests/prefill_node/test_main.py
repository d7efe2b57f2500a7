"""A prefill worker refuses to start with a configuration it cannot serve, and says which field is wrong."""

from __future__ import annotations

import pytest
import yaml

from prefill_node import main as entry


@pytest.mark.parametrize(
    ("changes", "arguments", "text"),
    [
        ({"prefill": {"kv_blocks": 3}}, (0, 0), "prefill.kv_blocks = 3 cannot hold one request of model.max_model_len"),
        ({"hostcann": {"hbm_bytes": "2MiB"}}, (0, 0), "hostcann.hbm_bytes"),
        ({"prefill": {"independent_layers": [9]}}, (0, 0), "prefill.independent_layers"),
        ({"prefill": {"tp": 3}}, (0, 0), "prefill.tp = 3"),
        ({"prefill": {"unknown": 3}}, (0, 0), "prefill.unknown: unknown key"),
        ({"model": {"path": "/nowhere"}}, (0, 0), "/nowhere"),
        ({"runtime": {}}, (0, 0), "runtime.run_dir must be set"),
        ({}, (1, 0), "prefill-1/tp0 is not one of prefill.groups = 1"),
        ({}, (0, 1), "prefill-0/tp1 is not one of prefill.groups = 1 of prefill.tp = 1"),
    ],
)
def test_a_start_that_cannot_work_is_refused(tiny_model, tmp_path, monkeypatch, capsys, changes, arguments, text):
    tree = {"model": {"path": str(tiny_model)}, "runtime": {"run_dir": str(tmp_path)}} | changes
    file = tmp_path / "sluice.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    group, tp_rank = map(str, arguments)
    command = ["main", "--config", str(file), "--group", group, "--tp-rank", tp_rank, "--rendezvous", "file:///none"]
    monkeypatch.setattr("sys.argv", command)
    assert entry.main() == 1
    assert text in capsys.readouterr().err
