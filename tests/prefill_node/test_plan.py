import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.plan import plan_layer_buffers


@pytest.mark.parametrize(
    ("layers", "independent", "shared", "slots"),
    [
        (6, [0], 2, ((0,), (1, 3, 5), (2, 4))),
        (5, [0], 2, ((0,), (1, 3), (2, 4))),
        (6, [], 1, ((0, 1, 2, 3, 4, 5),)),
        (4, [-1], 1, ((3,), (0, 1, 2))),
        (3, "all", 2, ((0,), (1,), (2,))),
        (3, [0], 8, ((0,), (1,), (2,))),
        (1, [0], 1, ((0,),)),
        (4, [0, -4, 2], 1, ((0,), (2,), (1, 3))),
    ],
)
def test_layers_take_turns_in_shared_buffers(layers, independent, shared, slots):
    plan = plan_layer_buffers(layers, independent, shared)
    assert plan.slots == slots
    assert [layer in plan.slots[plan.slot_of_layer[layer]] for layer in range(layers)] == [True] * layers


def test_worked_numbers_of_27_layers():
    plan = plan_layer_buffers(27, [0], 6)
    assert plan.slots[1] == (1, 7, 13, 19, 25)
    assert plan.slots[2] == (2, 8, 14, 20, 26)
    assert (plan.prefetch_of[7], plan.prefetch_of[8]) == (1, 2)
    assert plan.num_slots == 7
    assert plan.footprint == 7 / 27
    assert plan_layer_buffers(27, [-1], 6).independent == (26,)
    assert plan_layer_buffers(27, [0], 27).num_slots == 27


def test_prefetch_takes_over_the_layer_b_before():
    assert dict(plan_layer_buffers(5, [0], 2).prefetch_of) == {3: 1, 4: 2}
    assert dict(plan_layer_buffers(6, [], 1).prefetch_of) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}


def test_only_layers_of_overwritten_buffers_are_reused():
    plan = plan_layer_buffers(4, [0], 2)
    assert [plan.is_reused(layer) for layer in range(4)] == [False, True, False, True]
    assert plan.has_reuse
    assert not plan_layer_buffers(4, "all", 1).has_reuse


@given(
    layers=st.integers(1, 40),
    independent=st.lists(st.integers(0, 39), max_size=10),
    shared=st.integers(1, 50),
)
def test_device_holds_independent_plus_the_smaller_of_b_and_r(layers, independent, shared):
    independent = [layer % layers for layer in independent]
    plan = plan_layer_buffers(layers, independent, shared)
    own = len(set(independent))
    assert plan.num_slots == own + min(shared, layers - own)
    assert sorted(layer for slot in plan.slots for layer in slot) == list(range(layers))
    for layer, source in plan.prefetch_of.items():
        assert plan.slot_of_layer[layer] == plan.slot_of_layer[source]


@pytest.mark.parametrize("shared", [True, 1.0, "2", None])
def test_shared_must_be_an_integer(shared):
    with pytest.raises(TypeError, match=r"prefill\.shared_buffers"):
        plan_layer_buffers(6, [0], shared)


@pytest.mark.parametrize("independent", [3, "1,4", [0, "1"], [True], None, {0}])
def test_independent_must_be_a_list_or_all(independent):
    with pytest.raises(TypeError, match=r"prefill\.independent_layers.*-6\.\.5"):
        plan_layer_buffers(6, independent, 2)


@pytest.mark.parametrize("independent", [[6], [-7]])
def test_independent_layers_must_exist(independent):
    with pytest.raises(ValueError, match=r"the model has no layer .*-6\.\.5"):
        plan_layer_buffers(6, independent, 2)


def test_at_least_one_shared_buffer():
    with pytest.raises(ValueError, match=r"prefill\.shared_buffers = 0"):
        plan_layer_buffers(6, [0], 0)
