"""Protects long plain values: stored in chunks, restored bit for bit, and reused if they did not change."""

import datetime
import math
import random
from collections import deque

import numpy as np
import pytest

import ckstore
from ckstore.format.tree import ListNode, decode_tree, encode_tree
from ckstore.state.capture import capture
from ckstore.state.capture_cache import CaptureCache
from support.states import CopiedState, difference, round_trip

ORDER = list(range(20_000))
random.Random(0).shuffle(ORDER)
LONG = {
    "shuffled": ORDER,
    "counted": list(range(-7, 9_000)),
    "counted tuple": tuple(range(2_000)),
    "floats": [number / 7 for number in ORDER],
    "odd floats": [math.nan, -0.0, math.inf, 5e-324] * 400,
    "bools": [number % 3 == 0 for number in ORDER],
    "tuple": tuple(ORDER),
    "text": [f"file-{number}" for number in ORDER],
    "log": [{"step": number, "loss": 0.5, "at": datetime.date(2024, 1, 1)} for number in range(4_000)],
    "words": {f"w{number}": number for number in range(9_000)},
    "pairs": [(number, str(number)) for number in range(5_000)],
    "set": set(range(0, 30_000, 2)),
    "queue": deque(ORDER, 50_000),
    "bigints": [1 << 70] * 9_000,
}


class TestLongPlainValues:
    """A manifest must not grow with a sampler's order: every commit writes, reads and checks all of it."""

    @pytest.mark.parametrize("name", LONG)
    def test_long_value_is_not_in_the_tree(self, name):
        state = {"x": {"here": LONG[name], "epoch": 3}}
        assert len(encode_tree(capture(state).tree)) < 300
        assert difference(wire_round_trip(state), state) is None

    @pytest.mark.parametrize("name", LONG)
    def test_second_capture_is_equal(self, name):
        state, recapture = {"x": {"here": LONG[name]}, "w": np.ones(3)}, CaptureCache()
        for _ in range(2):
            again, fresh = recapture.capture(state), capture(state)
            assert (again.tree, again.tensors) == (fresh.tree, fresh.tensors)
            assert [bytes(each.read(0, each.nbytes)) for each in again.storages] == [
                bytes(each.read(0, each.nbytes)) for each in fresh.storages
            ]

    def test_changed_list_is_captured_again(self):
        lists = [
            list(range(2_000)),
            [1.5] * 2_000,
            ORDER[:2_000],
            ["a", *range(1_999)],
            list(range(2_000)),
            [1, "b"] * 9_000,
        ]
        recapture = CaptureCache()
        for items in lists:
            state = {"x": items, "w": np.ones(2)}
            assert recapture.capture(state).tree == capture(state).tree

    def test_optimizer_values_stay_in_the_tree(self):
        groups = [{"params": [number], "lr": 0.1, "betas": (0.9, 0.99)} for number in range(3_000)]
        tree = capture({"opt": {"state": {}, "param_groups": groups}}).tree
        assert isinstance(tree.children[0].children[1], ListNode)

    def test_path_into_a_long_value_selects_all_of_it(self):
        state = {"x": {"order": ORDER, "words": LONG["words"], "epoch": 3}}
        assert round_trip(state, only="x.order.5") == {"x": {"order": ORDER}}
        assert round_trip(state, only="x.words.w5") == {"x": {"words": LONG["words"]}}
        assert round_trip(state, only="x.ep*") == {"x": {"epoch": 3}}


def wire_round_trip(state):
    """Capture a state, encode and decode its tree, and restore it."""
    kept = CopiedState.of(capture(state))
    tree = decode_tree(encode_tree(kept.tree), tensor_count=len(kept.tensors))
    again = CopiedState(tree, kept.tensors, kept.storages, kept.contents)
    return again.fill(again.place())


def test_unchanged_list_writes_no_chunk(tmp_path):
    state = {"sampler": {"order": ORDER * 5, "epoch": 1, "log": LONG["log"]}, "w": np.ones(3)}
    with ckstore.open(tmp_path / "store") as store:
        store.commit(state, 0)
        receipt = store.commit(state, 1)
        assert (receipt.chunks_new, receipt.bytes_written) == (0, 0)
        assert difference(store.restore(), state) is None
        assert store.diff(0, 1).is_equal
        state["sampler"]["order"][7] += 1
        store.commit(state, 2)
        assert not store.diff(1, 2).is_equal
    sizes = [path.stat().st_size for path in (tmp_path / "store").rglob("*.ckm")]
    assert max(sizes) < 5_000


def test_large_optimizer_is_filled_in_place():
    torch = pytest.importorskip("torch")
    from ckstore.state.torch_adapter import TorchAdapter

    def trained(value):
        weights = [torch.nn.Parameter(torch.full((1,), value)) for _ in range(1_100)]
        optimizer = torch.optim.Adam(weights, lr=0.1, foreach=True)
        for weight in weights:
            weight.grad = torch.full((1,), value)
        optimizer.step()
        return optimizer

    stored, live = trained(1.0), trained(-2.0)
    kept = CopiedState.of(capture({"opt": stored}, [TorchAdapter()]))
    kept.fill(kept.place(into={"opt": live}, adapters=[TorchAdapter()]))
    assert difference(live.state_dict(), stored.state_dict()) is None
