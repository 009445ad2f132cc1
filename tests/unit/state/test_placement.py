"""Protects restores in place: all checks come before any write, the right tensors are filled, ties are kept."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import UsageError
from ckstore.state.capture import capture
from ckstore.state.torch_adapter import TorchAdapter
from support.states import CopiedState, difference
from support.states import round_trip as round_trip_with

ADAPTERS = (TorchAdapter(),)


def round_trip(state, **options):
    return round_trip_with(state, adapters=ADAPTERS, **options)


def place(state, **options):
    return CopiedState.of(capture(state, ADAPTERS)).place(adapters=ADAPTERS, **options)


def _state():
    return {
        "w": torch.arange(6.0).reshape(2, 3),
        "n": np.arange(4),
        "list": [torch.ones(2), {"deep": torch.zeros(1)}],
        "pair": (torch.full((1,), 7), 5),
        "step": 3,
        "name": None,
    }


def _blank():
    return {
        "w": torch.zeros(2, 3),
        "n": np.zeros(4, np.int64),
        "list": [torch.zeros(2), {"deep": torch.ones(1)}],
        "pair": (torch.zeros(1, dtype=torch.int64), 0),
        "step": 0,
        "name": "x",
    }


def test_into_fills_the_given_tensors_and_containers():
    target = _blank()
    held = [target["w"], target["n"], target["list"], target["list"][1]["deep"], target["pair"][0]]
    back = round_trip(_state(), into=target)
    assert back is target
    assert difference(back, _state()) is None
    now = [back["w"], back["n"], back["list"], back["list"][1]["deep"], back["pair"][0]]
    assert all(one is other for one, other in zip(held, now, strict=True))


def test_contiguous_tensors_need_no_second_copy():
    target = _blank()
    placement = place(_state(), into=target)
    assert all(placement.is_direct(storage) for storage in placement.storages)
    placement.destination(0)[:4] = np.float32(5).tobytes()
    assert target["w"][0, 0] == 5


def test_direct_write_increments_the_version_counter():
    target = {"w": torch.nn.Parameter(torch.zeros(3))}
    product = (target["w"] * target["w"]).sum()
    before = target["w"]._version
    round_trip({"w": torch.ones(3)}, into=target)
    assert target["w"]._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        product.backward()


@pytest.mark.parametrize(
    ("make", "expected_direct"),
    [
        (lambda: torch.zeros(4, 3), True),
        (lambda: torch.zeros(3, 4).t(), False),
        (lambda: torch.zeros(8, 3)[::2], False),
        (lambda: torch.zeros(5, 3)[1:], True),
        (lambda: torch.nn.Parameter(torch.zeros(4, 3)), True),
    ],
)
def test_targets_of_any_layout_are_filled(make, expected_direct):
    target = {"w": make()}
    source = {"w": torch.arange(12.0).reshape(4, 3)}
    assert place(source, into=target).is_direct(0) == expected_direct
    round_trip(source, into=target)
    assert torch.equal(target["w"], source["w"])


def test_only_elements_of_a_target_view_are_written():
    flat = torch.full((10,), -1.0)
    round_trip({"a": torch.arange(3.0), "b": torch.arange(2.0)}, into={"a": flat[1:7:2], "b": flat[8:]})
    assert flat.tolist() == [-1, 0, -1, 1, -1, 2, -1, -1, 0, 1]


def test_gaps_between_views_of_one_storage_are_not_written_to():
    base = torch.arange(10.0)
    flat = torch.full((10,), -1.0)
    round_trip({"a": base[:3], "b": base[5:]}, into={"a": flat[:3], "b": flat[5:]})
    assert flat.tolist() == [0, 1, 2, -1, -1, 5, 6, 7, 8, 9]


def test_views_that_tile_a_storage_are_written_in_one():
    base, flat = torch.arange(10.0), torch.zeros(10)
    state, target = {"a": base[:4], "b": base[4:]}, {"a": flat[:4], "b": flat[4:]}
    assert place(state, into=target).is_direct(0)
    round_trip(state, into=target)
    assert torch.equal(flat, base)
    apart = {"a": torch.zeros(4), "b": torch.zeros(6)}
    assert not place(state, into=apart).is_direct(0)
    round_trip(state, into=apart)
    assert torch.equal(torch.cat(list(apart.values())), base)


def test_only_leaves_the_bytes_of_other_leaves_alone():
    base = torch.arange(10.0)
    flat = torch.full((10,), -1.0)
    state, target = {"a": base[:4], "b": base[4:]}, {"a": flat[:4], "b": flat[4:], "own": 5}
    round_trip(state, into=target, only="a")
    assert flat.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, -1]
    assert target["own"] == 5


def test_equally_expanded_targets_are_filled():
    source = {"w": torch.tensor([[1.0], [2.0]]).expand(2, 5)}
    target = {"w": torch.zeros(4, 1)[::2].expand(2, 5)}
    with pytest.raises(UsageError, match="share memory"):
        round_trip(source, into=target)
    target = {"w": torch.zeros(2, 1).expand(2, 5)}
    round_trip(source, into=target)
    assert torch.equal(target["w"], source["w"])
    with pytest.raises(UsageError, match="share memory"):
        round_trip({"w": torch.zeros(2, 5)}, into=target)
    odd = {"a": torch.arange(4.0)[1:3].expand(3, 2), "b": torch.arange(2.0)}
    into = {"a": torch.zeros(2).expand(3, 2), "b": torch.zeros(2)}
    round_trip(odd, into=into)
    assert difference(into, {"a": torch.tensor([1.0, 2.0]).expand(3, 2), "b": odd["b"]}) is None


def test_missing_leaves_are_created():
    target = {"w": torch.zeros(2, 3), "list": [torch.zeros(2), None], "step": 1.5}
    back = round_trip(_state(), into=target)
    assert back is target
    assert difference({key: back[key] for key in _state()}, _state()) is None


def _wrong(change):
    target = _blank()
    change(target)
    return target


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (_wrong(lambda t: t.update(more=1)), "more"),
        (_wrong(lambda t: t["list"].append(torch.ones(1))), r"list\.2"),
        (_wrong(lambda t: t["list"][1].update(x={"y": [1, 2]})), r"2 leaves .*list\.1\.x\.y\.0, list\.1\.x\.y\.1"),
        (_wrong(lambda t: t.update({True: 1})), "True"),
        (_wrong(lambda t: t.update(w=torch.zeros(3, 2))), r"w is torch float32 \(2, 3\)"),
        (_wrong(lambda t: t.update(w=torch.zeros(2, 3).double())), "float64"),
        (_wrong(lambda t: t.update(w=np.zeros((2, 3), np.float32))), "numpy"),
        (_wrong(lambda t: t.update(w={"a": 1})), "a tensor in the checkpoint, dict"),
        (_wrong(lambda t: t.update(w=[1])), "list"),
        (_wrong(lambda t: t.update(step=torch.zeros(1))), "a plain value in the checkpoint, Tensor"),
        (_wrong(lambda t: t.update(step={"a": 1})), "dict"),
        (_wrong(lambda t: t.update(list=tuple(t["list"]))), "a list in the checkpoint, tuple"),
        (_wrong(lambda t: t.update(pair=list(t["pair"]))), "a tuple in the checkpoint, list"),
        (_wrong(lambda t: t.update(list={})), "a list in the checkpoint, dict"),
        ([], "a dict in the checkpoint, list"),
    ],
    ids=range(15),
)
def test_misfits_are_refused_by_path_before_writing(target, expected):
    before = CopiedState.of(capture({"t": _blank()}, ADAPTERS)).contents
    with pytest.raises(UsageError, match=expected):
        place(_state(), into=target)
    if isinstance(target, dict):
        same = {"t": {key: target[key] if key == "n" else value for key, value in _blank().items()}}
        assert CopiedState.of(capture(same, ADAPTERS)).contents == before


def test_first_five_misfits_are_named():
    with pytest.raises(UsageError, match=r"9 leaves .* x4 and 4 more") as caught:
        place({}, into={f"x{index}": 1 for index in range(9)})
    assert len(caught.value.paths) == 9


def test_lists_of_plain_values_are_replaced_whole():
    target = {"losses": [1, 2, 3, 4], "betas": [0, 0], "nested": [[1], [2, (3,)]]}
    held = target["losses"]
    back = round_trip({"losses": [9], "betas": (0.9, 0.99), "nested": [[1, 2, 3]]}, into=target)
    assert back == {"losses": [9], "betas": (0.9, 0.99), "nested": [[1, 2, 3]]}
    assert back["losses"] is held


def test_state_with_extra_ties_is_refused():
    tensor = torch.zeros(4)
    with pytest.raises(UsageError, match="b shares memory with a only in the state"):
        place({"a": torch.zeros(4), "b": torch.ones(4)}, into={"a": tensor, "b": tensor})
    with pytest.raises(UsageError, match="shares memory"):
        place({"a": torch.zeros(3), "b": torch.ones(3)}, into={"a": tensor[:3], "b": tensor[1:]})
    round_trip({"a": torch.ones(2), "b": torch.zeros(2)}, into={"a": tensor[::2], "b": tensor[1::2]})
    assert tensor.tolist() == [1, 0, 1, 0]


def test_tied_tensors_go_into_tied_and_untied_states():
    tensor = torch.arange(4.0)
    for other in (tensor, tensor.view(4)):
        tied = torch.zeros(4)
        target = {"a": tied, "b": tied}
        round_trip({"a": tensor, "b": other}, into=target)
        assert torch.equal(tied, tensor)
        target = {"a": torch.zeros(4), "b": torch.zeros(8)[::2]}
        round_trip({"a": tensor, "b": other}, into=target)
        assert torch.equal(target["a"], tensor)
        assert torch.equal(target["b"], tensor)
        target = {"a": torch.zeros(4)}
        back = round_trip({"a": tensor, "b": other}, into=target)
        assert torch.equal(back["b"], tensor)


def test_inference_tensors_are_filled():
    with torch.inference_mode():
        target = {"a": torch.zeros(3), "b": torch.zeros(6)[::2]}
    round_trip({"a": torch.ones(3), "b": torch.ones(3)}, into=target)
    assert (target["a"].tolist(), target["b"].tolist()) == ([1, 1, 1], [1, 1, 1])


@given(st.permutations(range(4)), st.permutations(range(4)), st.integers(0, 2))
def test_any_layout_goes_into_any_layout(source_order, target_order, step):
    shape = (2, 3, 1, 4)
    source = torch.arange(24).reshape(shape).permute(source_order)
    buffer = torch.zeros([length * (step + 1) for length in source.permute(target_order).shape], dtype=torch.int64)
    target = buffer[:: step + 1, :: step + 1, :: step + 1, :: step + 1]
    inverse = [target_order.index(dim) for dim in range(4)]
    target = target.permute(inverse)
    back = round_trip([source], into=[target])
    assert back[0] is target
    assert torch.equal(target, source)
    assert int((buffer != 0).sum()) == 23


def test_placement_reads_only_needed_storages():
    state = {"a": torch.ones(3), "b": torch.ones(4), "empty": torch.ones(0)}
    assert place(state, only="b").storages == [1]
    assert place(state, only="empty").storages == []
    assert difference(round_trip(state, only="empty"), {"empty": state["empty"]}) is None
