"""What is pulled when index keys are int8: keys and their scales, from and to the same blocks."""

from __future__ import annotations

import pytest
from sluice.v1 import wire_pb2

from decode_node.pull_plan import LayerMemory, PullPlanner, PullRefused, TensorMemory
from tests.kv_peers import small_layout
from transfer.layout import block_bytes, kinds_of

BLOCKS = 8
LAYOUT = small_layout(indexer_dtype="int8", index_dim=4)  # layers 0 and 2 own an indexer
KEY, SCALE = wire_pb2.TENSOR_KIND_INDEXER_KEY, wire_pb2.TENSOR_KIND_INDEXER_SCALE


def memory(layer: int, kind: int, side: int) -> TensorMemory:
    return TensorMemory(side + 10_000 * layer + 1000 * kind, block_bytes(LAYOUT, kind), BLOCKS)


def planner() -> PullPlanner:
    layers = [LayerMemory(*(memory(layer, kind, 1 << 20) for kind in kinds_of(LAYOUT, layer))) for layer in range(3)]
    return PullPlanner(LAYOUT, layers, name="decode-0/dp0/tp0", tp_rank=0, tp_size=1)


def hello(tp_rank: int = 0, tp_size: int = 1) -> wire_pb2.Hello:
    greeting = wire_pb2.Hello(
        worker_id=f"prefill-0/tp{tp_rank}",
        epoch="e",
        session_id="host:1",
        tp_rank=tp_rank,
        tp_size=tp_size,
        layout=LAYOUT,
        generation_address=8,
    )
    for layer in range(3):
        described = greeting.layers.add(layer=layer, slot=layer)
        for kind in kinds_of(LAYOUT, layer):
            tensor = memory(layer, kind, 2 << 20)
            described.tensors.add(kind=kind, address=tensor.address, block_bytes=tensor.block_bytes, num_blocks=BLOCKS)
    return greeting


ENTRY = wire_pb2.ReadEntry(request_id="r", main_blocks=[5, 6], indexer_blocks=[3, 1])


def pulled(tp_rank: int, tp_size: int, kind: int) -> list[tuple[int, int, int]]:
    """(prefill block, decode block, bytes) of one kind of layer 2."""
    plan = planner()
    moves = plan.entry(plan.source(hello(tp_rank, tp_size)), 2, ENTRY, [0, 2], [7, 4])
    here, there = memory(2, kind, 1 << 20), memory(2, kind, 2 << 20)
    return [
        ((remote - there.address) // there.block_bytes, (local - here.address) // here.block_bytes, size)
        for local, remote, size in zip(moves.local, moves.remote, moves.sizes, strict=True)
        if 0 <= remote - there.address < 1000
    ]


def test_a_scale_moves_with_its_key() -> None:
    assert pulled(0, 1, KEY) == [(3, 7, 2 * 4), (1, 4, 2 * 4)]
    assert pulled(0, 1, SCALE) == [(3, 7, 2 * 2), (1, 4, 2 * 2)]


def test_contributors_share_keys_and_scales_alike() -> None:
    for kind in (KEY, SCALE):
        parts = [[(source, target) for source, target, _ in pulled(rank, 2, kind)] for rank in (0, 1)]
        assert parts == [[(3, 7)], [(1, 4)]]


def test_int8_keys_without_scales_are_refused() -> None:
    greeting = hello()
    del greeting.layers[2].tensors[3]
    with pytest.raises(PullRefused, match=r"layer 2 consists of ckv, k_rope, indexer_key; it must be .* indexer_scale"):
        planner().source(greeting)


def test_a_side_with_keys_in_the_models_dtype_is_refused() -> None:
    greeting = hello()
    greeting.layout.indexer_dtype = "model"
    with pytest.raises(PullRefused, match=r"indexer_dtype: int8 \(decode-0/dp0/tp0\) != model \(prefill-0/tp0\)"):
        planner().source(greeting)


def test_a_packed_main_cache_is_refused() -> None:
    greeting = hello()
    greeting.layers[1].tensors[0].block_bytes = 656
    with pytest.raises(PullRefused, match="layer 1: ckv has blocks of 656 bytes; decode-0/dp0/tp0 expects 32"):
        planner().source(greeting)
