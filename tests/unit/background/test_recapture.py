"""Protects what is remembered from one capture to the next: it must never show, but in the time that a capture takes.

Each test changes a state in one way, and compares what is told of it with a capture that remembers nothing.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import struct
import weakref
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch

import ckstore
from ckstore.background.arena_layout import LAZY, NOW
from ckstore.background.optimizer_guard import OptimizerGuard
from ckstore.background.staged_head import HeadWriter
from ckstore.background.staging import StagingArea
from ckstore.config import Limits
from ckstore.errors import LeafTypeError, UsageError
from ckstore.format.tree import ConvertedNode, OtherKey
from ckstore.state.capture import capture
from ckstore.state.capture_cache import CaptureCache
from ckstore.state.tensors import LeafBatch
from ckstore.state.torch_adapter import TorchAdapter
from ckstore.state.values import LONG_TEXT
from support.changing_states import CHANGES, Case, Holder, Point


def copies_in(node):
    """Yield the tensors that each capture makes a copy of: texts."""
    if isinstance(node, ConvertedNode) and node.name == LONG_TEXT:
        yield node.child.tensor
    for child in getattr(node, "children", ()) or [getattr(node, "child", None)]:
        yield from () if child is None else copies_in(child)


def described(captured, lazy=()):
    """Return everything that a capture tells, bytes included, and where they lie."""
    copied = {captured.tensors[number].storage for number in (*copies_in(captured.tree), *lazy)}
    storages = [
        (
            None if number in copied else each.start,
            (each.nbytes, each.element_width, each.is_float, each.is_host),
            bytes(each.read(0, each.nbytes)),
        )
        for number, each in enumerate(captured.storages)
    ]
    return captured.tree, captured.paths, captured.tensors, storages, captured.warnings


def is_lazy(part, path):
    """Whether what lies at a path is resolved by each capture anew."""
    for key in path:
        if not isinstance(part, (dict, list, tuple)) or isinstance(key, OtherKey):
            return False
        part = part[key]
    return isinstance(part, torch.Tensor) and (part.is_conj() or part.is_neg())


def kept_by(captured):
    """Return of each storage how many parts keep it alive, and whether torch has the first of them."""
    return [(len(each.keep), isinstance(first_of(each.keep), torch.Tensor)) for each in captured.storages]


def first_of(keep):
    first = keep[0] if keep else None
    return first[0] if isinstance(first, tuple) else first


class Remembering(CaptureCache):
    """All that remembers something of the last commit, on the way from a state to a slot."""

    def __init__(self):
        super().__init__()
        self.guarded, self.dock, self.writer = OptimizerGuard(lambda: None), StagingArea(Limits()), HeadWriter()
        self.optimizers = weakref.WeakSet()
        self.tensors = None

    def attach(self, optimizer):
        self.optimizers.add(optimizer)
        self.guarded.attach(optimizer)
        return self

    def capture(self, *given):
        captured = super().capture(*given)
        self.tensors = captured.tensors
        return captured


def spans_of(remembering):
    """Return what the optimizers own, as one that remembers nothing tells it."""
    fresh = OptimizerGuard(lambda: None)
    for optimizer in remembering.optimizers:
        fresh.attach(optimizer)
    spans = fresh.spans()
    fresh.release()
    return spans


def head_by(writer, captured, stowage):
    told = {"step": 3, "metrics": {"loss": 1.5}, "tags": ["best"], "policy": ckstore.Policy()}
    return writer.encode(writer.head_of(captured, stowage.places, samples=stowage.samples, **told))


def laid_out(stowage):
    """Return all that a layout says."""
    sections = [(each.begin, each.firsts.tolist(), each.rows.tolist(), each.storages) for each in stowage.sections]
    return stowage.places, stowage.samples, sections, stowage.end


def same(remembering, state):
    """Compare what is told of a state with what is told by those who remember nothing; return if it was remembered."""
    before = remembering.tensors
    found = remembering.capture(state, [TorchAdapter()])
    lazy = [number for number, path in enumerate(found.paths) if is_lazy(state, path)]
    copy_error = capture(state, [TorchAdapter()])
    assert described(found, lazy) == described(copy_error, lazy)
    # The way to a device knows by this what lies there.
    assert kept_by(found) == kept_by(copy_error)
    spans = remembering.guarded.spans()
    assert spans == spans_of(remembering)
    stowage, starts = remembering.dock.plan_layout(found, spans)
    fresh, fresh_starts = StagingArea(Limits()).plan_layout(found, spans)
    assert laid_out(stowage) == laid_out(fresh)
    assert starts.tolist() == fresh_starts.tolist() == [storage.start for storage in found.storages]
    assert head_by(remembering.writer, found, stowage) == head_by(HeadWriter(), found, fresh)
    # What has not changed is not told anew.
    return found.tensors is before


@pytest.fixture
def points():
    """Have points converted; they stay so, and nobody else has any."""
    name = "test.recapture.point"
    ckstore.register_converter(Point, name, lambda point: {"x": point.x}, lambda state: Point(state["x"]))


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_a_capture_tells_the_same_as_one_that_remembers_nothing(change):
    case = Case()
    recapture = Remembering().attach(case.optimizer)
    same(recapture, case.state)
    case.state["rng"] = torch.get_rng_state()
    assert same(recapture, case.state), "nothing has changed but an allocation"
    change(case)
    same(recapture, case.state)
    # What was remembered of the change is right too.
    assert same(recapture, case.state) or is_lazy(case.state, ("views", "far"))


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize("seed", range(8))
def test_many_changes_in_a_row_never_show(seed):
    draw, case = random.Random(seed), Case()
    recapture = Remembering().attach(case.optimizer)
    same(recapture, case.state)
    for _ in range(30):
        for change in draw.sample(list(CHANGES.values()), draw.randrange(3)):
            try:
                change(case)
            except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError):
                # Another change has taken what this one wanted.
                continue
        same(recapture, case.state)


FACTS = ("type", "dtype", "shape", "requires_grad", "strides", "offset")
TOLD_BY = {
    "type": "a tensor is a parameter",
    "dtype": "the same bytes get another dtype",
    "shape": "a view ends elsewhere",
    "strides": "strides are others",
    "offset": "a view begins elsewhere",
    "requires_grad": "a tensor wants a gradient",
}


def blind_to(number, facts):
    """Return what is seen of a tensor without one of its facts."""
    kind, (dtype, shape, requires_grad), *rest = facts
    flat = [kind, dtype, shape, requires_grad, *rest]
    flat[number] = None
    return tuple(flat)


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize("fact", TOLD_BY)
def test_without_a_fact_these_tests_would_fail(monkeypatch, fact):
    describe_many, number = TorchAdapter.describe_many, FACTS.index(fact)

    def blind(self, leaves):
        seen = describe_many(self, leaves)
        facts = seen and [blind_to(number, each) for each in seen.facts]
        return seen and LeafBatch(facts, seen.starts, seen.keeps, seen.readers)

    monkeypatch.setattr(TorchAdapter, "describe_many", blind)
    case = Case()
    recapture = Remembering().attach(case.optimizer)
    same(recapture, case.state)
    CHANGES[TOLD_BY[fact]](case)
    with pytest.raises(AssertionError):
        same(recapture, case.state)


@pytest.mark.usefixtures("points")
def test_guards_follow_what_an_optimizer_owns_now():
    """Memory that left the optimizer is copied at once from then on, though the capture has not changed at all."""
    case = Case()
    recapture = Remembering().attach(case.optimizer)
    same(recapture, case.state)
    parameter = case.optimizer.param_groups[0]["params"].pop()
    del case.optimizer.state[parameter]
    case.state["optimizer"] = 1
    same(recapture, case.state)
    found = recapture.capture(case.state, [TorchAdapter()])
    stowage, _ = recapture.dock.plan_layout(found, recapture.guarded.spans())
    now, lazy = (stowage.sections[kind].storages for kind in (NOW, LAZY))
    left = found.tensors[found.paths.index(("model", "2.bias"))].storage
    assert left in now
    assert found.tensors[found.paths.index(("model", "2.weight"))].storage in lazy


@pytest.mark.usefixtures("points")
def test_without_addresses_these_tests_would_fail(monkeypatch):
    describe_many = TorchAdapter.describe_many

    def blind(self, leaves):
        seen = describe_many(self, leaves)
        return seen and LeafBatch(seen.facts, [64] * len(leaves), seen.keeps, seen.readers)

    monkeypatch.setattr(TorchAdapter, "describe_many", blind)
    case = Case()
    recapture = Remembering().attach(case.optimizer)
    same(recapture, case.state)
    CHANGES["a tensor is another one of the same kind"](case)
    with pytest.raises(AssertionError):
        same(recapture, case.state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0, 0, 1], [0, 1, 1]),
        ([0, 0, 1], [1, 0, 0]),
        ([0, 1, 0], [0, 1, 1]),
        ([0, 1, 0], [0, 1, 2]),
        ([0, 1, 2], [0, 1, 1]),
        ([[0, 1], [2]], [[0], [1, 2]]),
        ([[0, 1], [0]], [[0], [1, 0]]),
        ([[0, 1], [2, "word"]], [[0, 1, 2], ["word"]]),
    ],
)
def test_tensors_that_look_alike_are_told_apart_by_where_they_stand(before, after):
    tensors = [torch.full((3,), float(number)) for number in range(3)]

    def placed(part):
        if isinstance(part, list):
            return [placed(each) for each in part]
        return tensors[part] if isinstance(part, int) else part

    recapture = Remembering()
    for places in (before, before, after, after, before):
        same(recapture, {"placed": placed(places)})


def test_a_tensor_that_moves_into_its_neighbours_memory_shares_its_storage():
    pool = torch.arange(100.0)
    state, recapture = {"first": pool[:10], "second": torch.ones(100)}, Remembering()
    same(recapture, state)
    state["second"] = torch.ones(100)
    assert same(recapture, state), "alone before and alone now"
    state["second"] = pool
    assert not same(recapture, state)


def test_what_moves_is_followed_as_long_as_it_moves():
    state, recapture = {"fixed": torch.ones(5), "step": 0}, Remembering()
    kept = []
    same(recapture, {**state, "rng": torch.zeros(9)})
    for step in range(20):
        kept.append(torch.full((9,), float(step)))
        assert same(recapture, {**state, "rng": kept[-1], "step": step})


def test_nothing_is_kept_alive_between_captures():
    tensor = torch.ones(1000)
    state, recapture = {"tensor": tensor, "array": (array := np.ones(1000))}, Remembering()
    watched = [weakref.ref(tensor), weakref.ref(array)]
    for _ in range(3):
        recapture.capture(state, [TorchAdapter()])
    del tensor, array, state
    gc.collect()
    assert [each() for each in watched] == [None, None]


def test_a_capture_keeps_alive_what_it_tells_of():
    recapture = Remembering()
    state = {"tensor": torch.full((1000,), 1.0)}
    recapture.capture(state, [TorchAdapter()])
    captured = recapture.capture(state, [TorchAdapter()])
    watched = weakref.ref(state["tensor"])
    del state
    gc.collect()
    assert watched() is not None
    assert bytes(captured.storages[0].read(0, 4)) == np.float32(1).tobytes()
    del captured
    assert watched() is None


def test_an_object_is_asked_for_its_state_once_a_capture():
    holder, recapture = Holder(torch.ones(3)), Remembering()
    state = {"holder": holder, "again": holder, "step": 0, "last": 1}
    for asked in (2, 4):
        recapture.capture(state, [TorchAdapter()])
        assert holder.asked == asked
    state["last"] = torch.ones(2)
    same(recapture, state)
    assert holder.asked == 8, "twice by this capture, though the first walk was given up, twice by the other one"


class Late(Holder):
    """Is converted by nobody but one test."""


@pytest.mark.usefixtures("points")
def test_a_converter_that_is_registered_later_counts():
    state, recapture = {"point": {"x": 1}, "tensor": torch.ones(2)}, Remembering()
    same(recapture, state)
    assert same(recapture, state)
    name = "test.recapture.late"
    ckstore.register_converter(Late, name, lambda one: [one.tensor], lambda state: Late(state[0]))
    assert not same(recapture, state)
    state["point"] = Late(torch.ones(1))
    same(recapture, state)
    assert same(recapture, state)


def test_attributes_that_are_not_stored_are_warned_of_each_time():
    odd = OrderedDict(a=1)
    state, recapture = {"odd": odd, "tensor": torch.ones(2)}, Remembering()
    same(recapture, state)
    odd.note = object()
    for _ in range(2):
        assert not same(recapture, state)
        assert "'note' of an OrderedDict is not a plain value" in recapture.capture(state, [TorchAdapter()]).warnings[0]


def test_what_cannot_be_stored_is_refused_as_ever():
    state, recapture = {"a": [torch.ones(2), 1]}, Remembering()
    same(recapture, state)
    state["a"][1] = object()
    with pytest.raises(LeafTypeError, match=r"a\.1"):
        recapture.capture(state, [TorchAdapter()])
    state["a"][1] = state["a"]
    with pytest.raises(UsageError, match="contains itself"):
        recapture.capture(state, [TorchAdapter()])
    state["a"][1] = {object(): 1}
    with pytest.raises(UsageError, match=r"a key of type builtins\.object"):
        recapture.capture(state, [TorchAdapter()])
    state["a"][1] = 1
    same(recapture, state)


def test_a_truth_as_a_key_is_seen_where_a_number_was():
    state, recapture = {"a": {1: torch.ones(2)}}, Remembering()
    same(recapture, state)
    for key in (True, 1.0):
        state["a"] = {key: torch.ones(2)}
        assert not same(recapture, state)


def test_a_library_that_is_loaded_later_counts():
    state, recapture = {"array": np.ones(3)}, Remembering()
    recapture.capture(state)
    assert same(recapture, state) is False
    assert same(recapture, state)


def test_warnings_of_one_commit_do_not_reach_the_next():
    state, recapture = {"tensor": torch.ones(2)}, Remembering()
    recapture.capture(state, [TorchAdapter()]).warnings.append("for this one")
    assert recapture.capture(state, [TorchAdapter()]).warnings == []


LONG = {
    "text": [f"file-{number}" for number in range(60)],
    "mixed": [None, *range(60)],
    "dict": {f"key {number}": number / 7 for number in range(60)},
    "pairs": [(number, str(number)) for number in range(40)],
    "nested": {"a": [{"b": (number, [True, b"raw", 1j])} for number in range(40)]},
}


@pytest.fixture
def short(monkeypatch):
    """Have values of a few dozens be long ones."""
    monkeypatch.setattr("ckstore.state.capture.PLAIN_MIN", 50)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_a_long_plain_value_that_did_not_change_is_not_taken_apart_again(value, monkeypatch):
    state, recapture = (
        {"x": {"long": value, "step": 0}, "w": torch.ones(2), "twin": copy.deepcopy(value)},
        CaptureCache(),
    )
    for _ in range(2):
        recapture.capture(state, [TorchAdapter()])
    with monkeypatch.context() as patch:
        patch.setattr("ckstore.state.capture.encode_tree", None)
        for step in range(3):
            state["x"] = {"long": copy.deepcopy(value), "step": step}
            found = recapture.capture(state, [TorchAdapter()])
    copy_error = capture(state, [TorchAdapter()])
    assert (found.tree, found.tensors) == (copy_error.tree, copy_error.tensors)
    contents = [[bytes(each.read(0, each.nbytes)) for each in captured.storages] for captured in (found, copy_error)]
    assert contents[0] == contents[1]


class Text(str):
    """Cannot be stored."""

    __slots__ = ()


ALIKE = {
    "truth": [0, False, 0.0, -0.0, 0j, np.int64(0), np.float64(0.0), np.bool_(False), b"\0" * 8, bytearray(8)],
    "nan": [math.nan, struct.unpack("<d", b"\1" + struct.pack("<d", math.nan)[1:])[0], np.float64(math.nan)],
    "raw": [b"xyz", bytearray(b"xyz"), "xyz", "xy\ud800", np.bytes_(b"xyz"), np.frombuffer(b"xyz", np.uint8)],
    "items": [[1, 2], (1, 2), {1, 2}, frozenset({1, 2}), [1, True], [True, 2], deque([1, 2])],
    "dict": [{"a": 1, "b": 2}, {"b": 2, "a": 1}, OrderedDict(a=1, b=2), Counter(a=1, b=2), {"a": True, "b": 2}],
    "keys": [{1: 2}, {True: 2}, {1.0: 2}, {"1": 2}, {(1,): 2}, {None: 2}],
    "complex": [0j, -0j, complex(0.0, -0.0), complex(-0.0, 0.0), complex(math.nan, 0), "0j"],
    "long": [1 << 20_000, -1 << 20_000, (1 << 20_000) + 1, 1 << 63, "\\ud800", "\ud800", "'", '"'],
    "kept": [None, Ellipsis, "None", Text("None"), int],
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("values", ALIKE.values(), ids=ALIKE)
def test_long_plain_values_that_look_alike_are_told_apart(values):
    def told(take, value):
        try:
            captured = take({"x": [value, *["more"] * 60], "w": np.ones(2)})
        except UsageError as error:
            return str(error)
        return captured.tree, captured.tensors, [bytes(each.read(0, each.nbytes)) for each in captured.storages]

    for before in values:
        for after in values:
            recapture = CaptureCache()
            for value in (before, before, after, after, before):
                assert told(recapture.capture, value) == told(capture, value)


@pytest.mark.usefixtures("short")
def test_a_long_plain_value_that_begins_to_hold_itself_is_refused():
    items = ["word"] * 60
    recapture = CaptureCache()
    for _ in range(3):
        recapture.capture({"x": items})
    items[5:] = [items] * 60
    with pytest.raises(UsageError, match="contains itself"):
        recapture.capture({"x": items})
