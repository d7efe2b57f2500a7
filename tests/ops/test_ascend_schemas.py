"""The back end against the schemas of the torch_npu wheel, loaded over the emulated driver in a child process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.ops.ascend_schemas import NPU_SCHEMAS, TORCH_NPU_VERSION
from tests.ops.ascend_calls import CALLS
from tests.transfer.hostcann_worker import Worker, WorkerError

WHEEL = Path(__file__).resolve().parents[2] / "build" / "torch_npu"


@pytest.fixture(scope="module")
def wheel() -> Iterator[Worker]:
    """A process that has imported torch_npu."""
    assert (WHEEL / "torch_npu").is_dir(), f"torch_npu is not in {WHEEL}: run `make setup`"
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostcann-test-") as folder,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(WHEEL), os.environ.get("PYTHONPATH", "")])))
        with Worker(Path(folder) / "root", devices=1) as worker:
            worker.run("import torch, torch_npu", deadline_s=120)
            worker.run("from engine.ops import ascend, ascend_schemas")
            worker.run("from tests.ops import ascend_calls")
            yield worker


def test_the_stored_schemas_are_those_of_the_wheel(wheel: Worker) -> None:
    assert wheel.value("torch_npu.__version__") == TORCH_NPU_VERSION
    for schema in NPU_SCHEMAS:
        name = schema.partition("(")[0]
        registered, stored = wheel.value(
            f"[str(ascend_schemas.operator({name!r})._schema), str(torch._C.parse_schema({schema!r}))]"
        )
        assert registered == stored


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("npu_lightning_indexer", ("Tensor key,", "Tensor keys,"), "argument 1 is Tensor key, expected Tensor keys"),
        (
            "npu_lightning_indexer",
            ("Tensor key, Tensor weights", "Tensor weights, Tensor key"),
            "argument 1 is Tensor key, expected Tensor weights",
        ),
        (
            "npu_quant_lightning_indexer",
            ("int key_quant_mode, *,", "*, int key_quant_mode=0,"),
            r"argument 6 is int key_quant_mode, expected int key_quant_mode=0 \(keyword only\)",
        ),
        ("npu_sparse_flash_attention", ("attention_mode=0", "attention_mode=2"), "attention_mode=0 .*attention_mode=2"),
        ("npu_sparse_flash_attention", (", Tensor? sinks=None", ""), "Tensor. sinks=None .* expected absent"),
        ("npu_rms_norm", ("(Tensor, Tensor)", "Tensor"), r"results is \(Tensor, Tensor\), expected \(Tensor\)"),
        ("npu_rms_norm", ("npu_rms_norm", "npu_rms_norms"), "npu_rms_norms is not registered: import torch_npu"),
    ],
)
def test_schema_drift_is_noticed(wheel: Worker, name: str, change: tuple[str, str], message: str) -> None:
    (schema,) = (text for text in NPU_SCHEMAS if text.startswith(f"npu::{name}("))
    assert change[0] in schema
    wheel.run(f"ascend_schemas.check_registered([{schema!r}])")
    with pytest.raises(WorkerError, match=message):
        wheel.run(f"ascend_schemas.check_registered([{schema.replace(*change)!r}])")


QUANT_MODES = {"query_quant_mode": 0, "key_quant_mode": 0}
PAGED = {
    "actual_seq_lengths_query": "int32[2]",
    "actual_seq_lengths_key": "int32[2]",
    "block_table": "int32[2, 4]",
    "layout_query": "TND",
    "layout_key": "PA_BSND",
}
EXPECTED: dict[str, tuple[str, dict[str, object], object]] = {
    "lightning_indexer": (
        "npu_lightning_indexer",
        {
            "query": "bfloat16[3, 64, 128]",
            "key": "bfloat16[9, 128, 1, 128]",
            "weights": "bfloat16[3, 64]",
            **PAGED,
        },
        "int32[3, 2048]",
    ),
    "quant_lightning_indexer": (
        "npu_quant_lightning_indexer",
        {
            "query": "int8[3, 32, 128]",
            "key": "int8[9, 128, 1, 128]",
            "weights": "float16[3, 32]",
            "query_dequant_scale": "float16[3, 32]",
            "key_dequant_scale": "float16[9, 128, 1]",
            **QUANT_MODES,
            **PAGED,
        },
        "int32[3, 2048]",
    ),
    "sparse_flash_attention": (
        "npu_sparse_flash_attention",
        {
            "query": "bfloat16[3, 8, 512]",
            "key": "bfloat16[9, 128, 1, 512]",
            "value": "bfloat16[9, 128, 1, 512]",
            "sparse_indices": "int32[3, 1, 2048]",
            "scale_value": 0.07,
            "block_table": "int32[2, 4]",
            "actual_seq_lengths_query": "int32[2]",
            "actual_seq_lengths_kv": "int32[2]",
            "query_rope": "bfloat16[3, 8, 64]",
            "key_rope": "bfloat16[9, 128, 1, 64]",
            "layout_query": "TND",
            "layout_kv": "PA_BSND",
            "sparse_mode": 0,
            "attention_mode": 2,
        },
        "bfloat16[3, 4, 512]",
    ),
    "write_kv": (
        "npu_kv_rmsnorm_rope_cache",
        {
            "kv": "bfloat16[3, 1, 1, 576]",
            "gamma": "bfloat16[512]",
            "cos": "bfloat16[3, 1, 1, 64]",
            "sin": "bfloat16[3, 1, 1, 64]",
            "index": "int64[3]",
            "k_cache": "bfloat16[9, 128, 1, 64]",
            "ckv_cache": "bfloat16[9, 128, 1, 512]",
            "epsilon": 1e-6,
            "cache_mode": "PA",
        },
        None,
    ),
    "write_rows": (
        "npu_scatter_nd_update_",
        {"input": "bfloat16[1152, 128]", "indices": "int64[3, 1]", "updates": "bfloat16[3, 128]"},
        None,
    ),
    "rope_interleaved": (
        "npu_interleave_rope",
        {"x": "bfloat16[3, 16, 1, 64]", "cos": "bfloat16[3, 1, 1, 64]", "sin": "bfloat16[3, 1, 1, 64]"},
        "bfloat16[3, 16, 64]",
    ),
    "rope_half_split": (
        "npu_rotary_mul",
        {"input": "bfloat16[3, 16, 1, 64]", "r1": "bfloat16[3, 1, 1, 64]", "r2": "bfloat16[3, 1, 1, 64]"},
        "bfloat16[3, 16, 64]",
    ),
    "rms_norm": (
        "npu_rms_norm",
        {"input": "bfloat16[3, 512]", "gamma": "bfloat16[512]", "epsilon": 1e-5},
        "bfloat16[3, 512]",
    ),
    "hadamard_quantise": (
        "npu_dynamic_quant",
        {"input": "bfloat16[3, 64, 128]"},
        ["int8[3, 64, 128]", "float16[3, 64]"],
    ),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_every_call_binds_to_the_wheels_operator(wheel: Worker, call: str) -> None:
    """By the wheel's own shape functions; what equals a default is not passed on and so not listed."""
    name, arguments, result = EXPECTED[call]
    assert wheel.value(f"ascend_calls.record({call!r})") == [[[name, arguments]], result]


def test_every_operator_is_called() -> None:
    assert {f"npu::{name}" for name, _, _ in EXPECTED.values()} == {text.partition("(")[0] for text in NPU_SCHEMAS}


def test_npu_tensors_run_on_ascend_once_enabled(wheel: Worker) -> None:
    operators = (
        *("lightning_indexer", "quant_lightning_indexer", "hadamard_quantise", "sparse_flash_attention"),
        *("fused_lightning_indexer_manage", "fused_quant_lightning_indexer_manage"),
        *("fused_scatter_copy_sparse_flash_attention", "lru_residency"),
    )

    def registered() -> list[bool]:
        names = [f"sluice::{name}" for name in operators]
        has = "torch._C._dispatch_has_kernel_for_dispatch_key"
        value: list[bool] = wheel.value(f"[{has}(name, 'PrivateUse1') for name in {names!r}]")
        return value

    assert not any(registered())
    assert [wheel.value("ascend.enable()") for _ in range(2)] == ["unfused", "unfused"]
    assert all(registered())


def test_a_fused_operator_without_its_package_says_so(wheel: Worker) -> None:
    with pytest.raises(WorkerError, match="npu_fused_lightning_indexer_manage is not registered: import vllm-ascend's"):
        wheel.run("ascend_schemas.check_registered(ascend_schemas.FUSED_SCHEMAS)")
