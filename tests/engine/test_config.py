"""sluice.yaml: every wrong value is refused with its path, the value and what is legal."""

from pathlib import Path

import pytest

from engine.config import ConfigError, build_config, load_config

LOCAL = Path(__file__).parents[2] / "deploy/configs/local.yaml"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("prefill.tpp=2", r"prefill\.tpp: unknown key; legal keys: .*tp"),
        ("nonsense=1", r"nonsense: unknown key; legal keys: decode, "),
        ("transfer.protocol=tcp", r"transfer\.protocol = 'tcp': .*'sdma', 'device_rdma' or 'device_urma'"),
        ("decode.tp=2", r"prefill\.tp = 1 must be a multiple of decode\.tp = 2; legal decode\.tp: \[1\]"),
        ("decode.hot_tokens=100", r"decode\.hot_tokens = 100 must be a multiple of kv\.block_size = 16"),
        ("prefill.max_tokens_per_step=8", r"must be at least kv\.block_size = 16"),
        ("prefill.tp=0", r"prefill\.tp = 0: .*greater than or equal to 1"),
        ("prefill.tp=true", r"prefill\.tp = True: .*valid integer"),
        ("decode.host_pool_bytes=lots", r"decode\.host_pool_bytes = 'lots': 'lots' is not a size"),
        ("http.port=70000", r"http\.port = 70000: .*65535"),
        ("model.path.deep=1", r"model\.path is a value, not a section"),
        ("prefill=3", r"^prefill = 3: must be a section; its keys: groups, "),
        (
            "prefill.independent_layers=first",
            r"^prefill\.independent_layers = 'first': must be a valid list, or must be 'all'$",
        ),
        ("model.path=''", r"^model\.path = '': "),
        ("security.api_keys=env:", r"^security\.api_keys = \{'env': None\}: write a file's name, or env:NAME"),
        ("security.api_keys='env:'", r"^security\.api_keys = 'env:': write a file's name, or env:NAME"),
        ("kv={block_size: 16, block_size: 32}", r"the key 'block_size' is given twice"),
        ("justtext", r"write it as key\.path=value"),
        ("hostcann.devices=1", r"hostcann\.devices = 1, but the worker processes need 2"),
    ],
)
def test_a_wrong_value_is_refused_by_path_and_value(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(LOCAL, [override])


def test_overrides_win_and_are_typed() -> None:
    sizes = ["prefill.tp=4", "decode.tp=2", "decode.host_pool_bytes=64MiB"]
    config = load_config(LOCAL, [*sizes, "transfer.protocol= SDMA "])
    assert (config.prefill.tp, config.decode.tp, config.decode.host_pool_bytes) == (4, 2, 64 << 20)
    assert config.transfer.protocol == "sdma"
    assert config.worker_count == 6
    assert [config.decode_device(0, 0, t) for t in range(2)] == [4, 5]


def test_a_missing_or_broken_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file or directory$"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must be a mapping of sections, not a list"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "twice.yaml").write_text("model: {path: a}\nhttp: {port: 1}\nhttp: {host: a}\n")
    with pytest.raises(ConfigError, match=r"the key 'http' is given twice\n.*line 3"):
        load_config(tmp_path / "twice.yaml")
    (tmp_path / "merged.yaml").write_text("model: &m {path: a}\nhttp: {port: 1}\ngrpc: {<<: {port: 2}, host: b}\n")
    assert load_config(tmp_path / "merged.yaml").grpc.port == 2
    with pytest.raises(ConfigError, match="model: required"):
        build_config({})
