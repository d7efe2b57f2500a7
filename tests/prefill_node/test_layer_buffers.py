from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from sluice.v1 import wire_pb2

from prefill_node.geometry import REGION_ALIGNMENT, KvGeometry
from prefill_node.layer_buffers import LayerBuffers
from prefill_node.plan import plan_layer_buffers
from tests.prefill_node.harness import HostAllocator

GEOMETRY = KvGeometry(
    block_size=4, kv_lora_rank=10, rope_dim=6, index_dim=8, element_bytes=4, indexer_layers=frozenset({0, 1})
)


def buffers_of(independent, shared, layers=4, indexer_dtype="model"):
    allocator = HostAllocator()
    plan = plan_layer_buffers(layers, independent, shared)
    geometry = replace(GEOMETRY, indexer_dtype=indexer_dtype)
    return LayerBuffers(allocator, plan, geometry, 5, torch.float32), allocator


@pytest.mark.parametrize(("independent", "shared", "slots"), [([0], 1, 2), ([], 1, 1), ([0], 3, 4), ("all", 1, 4)])
def test_the_device_holds_one_allocation_per_slot(independent, shared, slots):
    buffers, allocator = buffers_of(independent, shared)
    assert len(buffers.slots) == slots
    assert len(allocator.tensors) == slots + 1  # and the generation words
    assert all(nbytes % REGION_ALIGNMENT == 0 for _, nbytes in buffers.regions())


@pytest.mark.parametrize("indexer_dtype", ["model", "int8"])
def test_tensors_of_a_slot_do_not_overlap(indexer_dtype):
    buffers, _ = buffers_of([0], 1, indexer_dtype=indexer_dtype)
    for slot in buffers.slots:
        for number, tensor in enumerate(slot.tensors):
            tensor.fill_(number)
        assert [float(tensor.min()) for tensor in slot.tensors] == list(range(len(slot.tensors)))
        assert [float(tensor.max()) for tensor in slot.tensors] == list(range(len(slot.tensors)))


def test_a_slot_has_indexer_keys_if_one_of_its_layers_owns_an_indexer():
    buffers, _ = buffers_of([0], 2)  # slots (0,), (1, 3), (2,)
    assert [slot.indexer is not None for slot in buffers.slots] == [True, True, False]


def test_the_hand_shake_lists_indexer_keys_of_owners_only():
    buffers, _ = buffers_of([0], 1)
    layouts = buffers.layouts()
    assert [layout.slot for layout in layouts] == [0, 1, 1, 1]
    kinds = [[tensor.kind for tensor in layout.tensors] for layout in layouts]
    main = [wire_pb2.TENSOR_KIND_CKV, wire_pb2.TENSOR_KIND_K_ROPE]
    owner = [*main, wire_pb2.TENSOR_KIND_INDEXER_KEY]
    assert kinds == [owner, owner, main, main]
    slot = buffers.slots[1]
    assert [tensor.address for tensor in layouts[1].tensors] == [tensor.data_ptr() for tensor in slot.tensors]
    assert [tensor.block_bytes for tensor in layouts[1].tensors] == [4 * 10 * 4, 4 * 6 * 4, 4 * 8 * 4]
    assert layouts[2].tensors[0].address == layouts[1].tensors[0].address
    assert {tensor.num_blocks for layout in layouts for tensor in layout.tensors} == {5}


def test_the_hand_shake_lists_the_scales_of_int8_keys():
    layout = buffers_of([0], 1, indexer_dtype="int8")[0].layouts()[1]
    key, scale = layout.tensors[2:]
    assert (key.kind, key.block_bytes) == (wire_pb2.TENSOR_KIND_INDEXER_KEY, 4 * 8)
    assert (scale.kind, scale.block_bytes) == (wire_pb2.TENSOR_KIND_INDEXER_SCALE, 4 * 2)
    assert scale.address == key.address + 5 * key.block_bytes


def test_nothing_is_written_before_the_gate_opens(make_rig):
    rig = make_rig(shared=1)  # layers 1, 2 and 3 take turns in slot 1
    publish, hold, published = rig.reader.publish, threading.Event(), threading.Event()

    def hold_layer_1(layer, slot, endpoint, entries, finished=()):
        if layer == 1:
            rig.reader._read, read = (lambda *batch: (hold.wait(10), read(*batch))), rig.reader._read
        sequence = publish(layer, slot, endpoint, entries, finished)
        if layer == 1:
            rig.reader._read = read
            published.set()
        return sequence

    rig.reader.publish = hold_layer_1
    rig.submit("a", torch.randint(2, 320, (40,)).tolist())
    engine = threading.Thread(target=rig.run, args=("a",))
    engine.start()
    assert published.wait(10)
    before = [tensor.view(torch.int32).clone() for tensor in rig.buffers.slots[1].tensors]
    time.sleep(0.2)
    assert engine.is_alive()
    after = [tensor.view(torch.int32) for tensor in rig.buffers.slots[1].tensors]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    hold.set()
    engine.join(10)
    assert not engine.is_alive()
    rig.settle()
    assert rig.reader.finished == ["a"]
