from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.ops import BACKENDS, backend
from tests.ops.copy_case import copy_case, run
from tests.ops.paged_case import TOLERANCE, dense_attention, gather, generator


def cloned(case: dict[str, Tensor | float]) -> dict[str, Tensor | float]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in case.items()}


def fill_misses(case: dict[str, Tensor | float], *, listed: bool) -> list[dict[int, int]]:
    """Select random slots in [0, C) for each row and make some of them misses, as the fused indexer would.

    Misses of a row lead its entries. With `listed` the request's list names them too. Returns slot -> source position
    per request.
    """
    rng = generator(99)
    maps, start = [], 0
    for i, end in enumerate(case["actual_seq_lengths_query"].tolist()):
        limit, context = int(case["num_cache_tokens"][i]), int((case["dram_block_table"][i] < 1 << 20).sum()) * 4
        placed: dict[int, int] = {}
        for row in range(start, end):
            topk = case["topk_dst_slots"].shape[2]
            if limit == 0:
                continue
            slots = torch.randperm(limit, generator=rng)[:topk].tolist()
            misses = int(torch.randint(0, len(slots) + 1, (1,), generator=rng))
            for j, slot in enumerate(slots):
                source = placed.get(slot, int(torch.randint(0, min(context, 20), (1,), generator=rng)))
                if j < misses:
                    placed[slot] = source
                case["topk_dst_slots"][row, 0, j], case["topk_src_ids"][row, 0, j] = slot, source
            case["topk_miss_counts"][row] = misses
        if listed:
            for j, (slot, source) in enumerate(placed.items()):
                case["miss_src_ids"][i, j], case["miss_dst_slots"][i, j] = source, slot
            case["miss_counts"][i] = len(placed)
        maps.append(placed)
        start = end
    return maps


CASES = {
    "steady": {"rows": [1, 3], "contexts": [40, 31], "hot_lens": [30, 28], "cache_tokens": [24, 24]},
    "first fill": {"rows": [2, 1], "contexts": [40, 24], "hot_lens": [14, 9], "cache_tokens": [4, 8]},
    "dense and inactive": {
        "rows": [2, 2, 1],
        "contexts": [20, 20, 20],
        "hot_lens": [9, 0, 17],
        "cache_tokens": [0, 4, 12],
    },
}


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(CASES))
def test_hot_rows_are_exact_copies_and_attention_covers_slots_and_tail(
    each_backend: str, name: str, dtype: torch.dtype, listed: bool
) -> None:
    case = copy_case(**CASES[name], topk=6, heads=9, dtype=dtype, seed=4)
    maps = fill_misses(case, listed=listed)
    before = cloned(case)
    run(case)
    block, start = 4, 0
    expected_hot = {key: before[key].clone() for key in ("hbm_kv_cache", "hbm_k_rope")}
    for i, placed in enumerate(maps):
        for slot, source in placed.items():
            to = int(case["hbm_block_table"][i, slot // block]), slot % block
            at = int(case["dram_block_table"][i, source // block]), source % block
            expected_hot["hbm_kv_cache"][to[0], to[1], 0] = case["dram_kv_cache"][at]
            expected_hot["hbm_k_rope"][to[0], to[1], 0] = case["dram_k_rope"][at]
    for key, expected in expected_hot.items():
        assert torch.equal(case[key], expected)
    for i, end in enumerate(case["actual_seq_lengths_query"].tolist()):
        length, kept = int(case["actual_seq_lengths_kv"][i]), int(case["num_cache_tokens"][i])
        for row in range(start, end):
            visible = length - (end - 1 - row) if length else 0
            slots = {s for s in case["topk_dst_slots"][row, 0].tolist() if s >= 0} if kept and length else set()
            attended = sorted(slots | set(range(kept, visible)))
            ckv, k_rope = (
                (gather(case[key], case["hbm_block_table"][i], length) for key in ("hbm_kv_cache", "hbm_k_rope"))
                if length
                else (torch.empty(0, 16), torch.empty(0, 8))
            )
            wanted = dense_attention(
                case["query"][row], case["query_rope"][row], ckv, k_rope, attended, case["scale_value"]
            )
            torch.testing.assert_close(
                case["attention_out"][row].double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
            )
        start = end
    for key in before.keys() - {"hbm_kv_cache", "hbm_k_rope", "attention_out"}:
        assert case[key] == before[key] if isinstance(case[key], float) else torch.equal(case[key], before[key])


def test_bytes_are_those_of_the_distinct_misses_and_back_ends_agree() -> None:
    case = copy_case(**CASES["steady"], topk=6, seed=8)
    maps = fill_misses(case, listed=True)
    copied = {}
    for name in BACKENDS:
        with backend(name):
            copied[name] = run(cloned(case))
    assert copied["cpu"] == copied["reference"] == sum(len(placed) for placed in maps) * (16 + 8) * 4


def test_a_list_without_row_counts_is_copied_and_padding_is_skipped(each_backend: str) -> None:
    """What an unfused residency hands over: misses in the list only, -1 among slots, no tail."""
    case = copy_case(rows=[1], contexts=[40], hot_lens=[16], cache_tokens=[16], topk=6, seed=1)
    case["topk_dst_slots"][0, 0] = torch.tensor([3, -1, 9, -1, 3, 15])
    case["miss_src_ids"][0, :3], case["miss_dst_slots"][0, :3] = torch.tensor([30, -1, 7]), torch.tensor([9, 2, 15])
    case["miss_counts"][0] = 3
    assert run(case) == 2 * (16 + 8) * 4
    rows = []
    for key in ("kv_cache", "k_rope"):
        hot = gather(case[f"hbm_{key}"], case["hbm_block_table"][0], 16)
        host = gather(case[f"dram_{key}"], case["dram_block_table"][0], 40)
        assert torch.equal(hot[9], host[30]) and torch.equal(hot[15], host[7])
        rows.append(hot)
    wanted = dense_attention(case["query"][0], case["query_rope"][0], *rows, [3, 9, 15], case["scale_value"])
    torch.testing.assert_close(case["attention_out"][0].double(), wanted, atol=2e-5, rtol=2e-5)


def test_without_a_cache_the_selection_is_ignored(each_backend: str) -> None:
    """C = 0: the row is dense over what it sees, whatever its slots say."""
    case = copy_case(rows=[2], contexts=[40], hot_lens=[10], cache_tokens=[0], topk=3, seed=1)
    case["topk_dst_slots"][:] = torch.tensor([2, 9, 11])
    run(case)
    ckv, k_rope = (gather(case[f"hbm_{key}"], case["hbm_block_table"][0], 10) for key in ("kv_cache", "k_rope"))
    for row, visible in enumerate((9, 10)):
        query = case["query"][row], case["query_rope"][row]
        wanted = dense_attention(*query, ckv, k_rope, list(range(visible)), case["scale_value"])
        torch.testing.assert_close(case["attention_out"][row].double(), wanted, atol=2e-5, rtol=2e-5)


def test_errors_name_the_argument(each_backend: str) -> None:
    def refused(match: str, **changes: Tensor) -> None:
        case = copy_case(rows=[1, 1], contexts=[20, 20], hot_lens=[16, 16], cache_tokens=[8, 8], topk=4)
        with pytest.raises(ValueError, match=match):
            run({**case, **changes})

    two = torch.tensor([0, 5], dtype=torch.int32)
    refused("hbm_kv_cache is torch.bfloat16", hbm_kv_cache=torch.zeros(4, 4, 1, 16, dtype=torch.bfloat16))
    refused(r"dram_k_rope has shape", dram_k_rope=torch.zeros(4, 4, 9))
    refused(r"topk_src_ids has shape \[2, 4\]", topk_src_ids=torch.zeros(2, 4, dtype=torch.int32))
    refused(r"miss_counts\[1\] is 5; legal: 0 to 4", miss_counts=two)
    refused(r"topk_miss_counts\[1\] is 5; legal: 0 to 4", topk_miss_counts=two)
    refused(r"num_cache_tokens\[0\] is -1", num_cache_tokens=torch.tensor([-1, 0], dtype=torch.int32))
    refused("actual_seq_lengths_query", actual_seq_lengths_query=torch.tensor([1, 3], dtype=torch.int32))
    refused("hbm_block_table", hbm_block_table=torch.full((2, 4), 99, dtype=torch.int32))
    far = torch.full((2, 4), 1000, dtype=torch.int32)
    refused("block table|dram_block_table", miss_src_ids=far, miss_dst_slots=far, miss_counts=two.clamp(max=1))


COUNTER = r"""
#include <stdint.h>
uint64_t calls[3];
int hostcann_count_copy(int device, int kind, uint64_t bytes) {
  calls[0] += bytes, calls[1] = device, calls[2] = kind;
  return 0;
}
"""


def test_copies_are_reported_to_the_driver_in_the_process(tmp_path: Path) -> None:
    """Runs in a process of its own, since the symbol must be in the global scope before the first copy."""
    source, library = tmp_path / "counter.c", tmp_path / "counter.so"
    source.write_text(COUNTER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    script = f"""
import ctypes
driver = ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)
from engine.ops import set_device
from tests.ops.copy_case import copy_case, run
set_device(3)
case = copy_case(rows=[1], contexts=[40], hot_lens=[16], cache_tokens=[16], topk=6)
case["miss_src_ids"][0, 0] = case["miss_dst_slots"][0, 0] = 1
case["miss_counts"][0] = 1
bytes_copied = run(case)
assert bytes_copied == 24 * 4
assert list((ctypes.c_uint64 * 3).in_dll(driver, "calls")) == [bytes_copied, 3, 0]
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=root)
    assert not hasattr(ctypes.CDLL(None), "hostcann_count_copy")
