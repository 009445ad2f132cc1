"""Protects the capture cache: a capture that reuses the previous one equals a capture without a cache.

Each test changes a state in one way, and compares the two captures.
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
    """Yield the tensors that each capture copies: strings."""
    if isinstance(node, ConvertedNode) and node.name == LONG_TEXT:
        yield node.child.tensor
    for child in getattr(node, "children", ()) or [getattr(node, "child", None)]:
        yield from () if child is None else copies_in(child)


def described(captured, lazy=()):
    """Return everything in a capture: tree, tensors, bytes and addresses."""
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
    """Whether the tensor at a path is resolved again in each capture."""
    for key in path:
        if not isinstance(part, (dict, list, tuple)) or isinstance(key, OtherKey):
            return False
        part = part[key]
    return isinstance(part, torch.Tensor) and (part.is_conj() or part.is_neg())


def keep_counts(captured):
    """Return for each storage how many objects keep it alive, and whether the first of them is a torch tensor."""
    return [(len(each.keep), isinstance(first_of(each.keep), torch.Tensor)) for each in captured.storages]


def first_of(keep):
    first = keep[0] if keep else None
    return first[0] if isinstance(first, tuple) else first


class AllCaches(CaptureCache):
    """Every cache between a state and a slot."""

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
    """Return the spans that the optimizers own, computed without a cache."""
    fresh = OptimizerGuard(lambda: None)
    for optimizer in remembering.optimizers:
        fresh.attach(optimizer)
    spans = fresh.spans()
    fresh.release()
    return spans


def head_by(writer, captured, stowage):
    captured_or_error = {"step": 3, "metrics": {"loss": 1.5}, "tags": ["best"], "policy": ckstore.Policy()}
    return writer.encode(writer.head_of(captured, stowage.places, samples=stowage.samples, **captured_or_error))


def laid_out(stowage):
    """Return all parts of a layout."""
    sections = [(each.begin, each.firsts.tolist(), each.rows.tolist(), each.storages) for each in stowage.sections]
    return stowage.places, stowage.samples, sections, stowage.end


def same(remembering, state):
    """Compare a cached capture with a fresh one, and return whether the cache was used."""
    before = remembering.tensors
    found = remembering.capture(state, [TorchAdapter()])
    lazy = [number for number, path in enumerate(found.paths) if is_lazy(state, path)]
    fresh_capture = capture(state, [TorchAdapter()])
    assert described(found, lazy) == described(fresh_capture, lazy)
    # Device copies use this to find out where the tensors are.
    assert keep_counts(found) == keep_counts(fresh_capture)
    spans = remembering.guarded.spans()
    assert spans == spans_of(remembering)
    stowage, starts = remembering.dock.plan_layout(found, spans)
    fresh, fresh_starts = StagingArea(Limits()).plan_layout(found, spans)
    assert laid_out(stowage) == laid_out(fresh)
    assert starts.tolist() == fresh_starts.tolist() == [storage.start for storage in found.storages]
    assert head_by(remembering.writer, found, stowage) == head_by(HeadWriter(), found, fresh)
    # The cached object is returned if nothing changed.
    return found.tensors is before


@pytest.fixture
def points():
    """Register a converter for points. It stays registered, and no other test uses points."""
    name = "test.recapture.point"
    ckstore.register_converter(Point, name, lambda point: {"x": point.x}, lambda state: Point(state["x"]))


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_cached_capture_equals_a_fresh_one(change):
    case = Case()
    recapture = AllCaches().attach(case.optimizer)
    same(recapture, case.state)
    case.state["rng"] = torch.get_rng_state()
    assert same(recapture, case.state), "only an allocation has changed"
    change(case)
    same(recapture, case.state)
    # A second capture compares the newly cached facts.
    assert same(recapture, case.state) or is_lazy(case.state, ("views", "far"))


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize("seed", range(8))
def test_cached_capture_is_right_after_many_changes(seed):
    draw, case = random.Random(seed), Case()
    recapture = AllCaches().attach(case.optimizer)
    same(recapture, case.state)
    for _ in range(30):
        for change in draw.sample(list(CHANGES.values()), draw.randrange(3)):
            try:
                change(case)
            except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError):
                # An earlier change has removed what this one needs.
                continue
        same(recapture, case.state)


FACTS = ("type", "dtype", "shape", "requires_grad", "strides", "offset")
CHANGE_OF_FACT = {
    "type": "a tensor is a parameter",
    "dtype": "the same bytes get another dtype",
    "shape": "a view ends elsewhere",
    "strides": "strides are others",
    "offset": "a view begins elsewhere",
    "requires_grad": "a tensor wants a gradient",
}


def without_fact(number, facts):
    """Return the facts of a tensor without one of them."""
    kind, (dtype, shape, requires_grad), *rest = facts
    flat = [kind, dtype, shape, requires_grad, *rest]
    flat[number] = None
    return tuple(flat)


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize("fact", CHANGE_OF_FACT)
def test_ignoring_a_fact_is_detected(monkeypatch, fact):
    describe_many, number = TorchAdapter.describe_many, FACTS.index(fact)

    def describe_blindly(self, leaves):
        seen = describe_many(self, leaves)
        facts = seen and [without_fact(number, each) for each in seen.facts]
        return seen and LeafBatch(facts, seen.starts, seen.keeps, seen.readers)

    monkeypatch.setattr(TorchAdapter, "describe_many", describe_blindly)
    case = Case()
    recapture = AllCaches().attach(case.optimizer)
    same(recapture, case.state)
    CHANGES[CHANGE_OF_FACT[fact]](case)
    with pytest.raises(AssertionError):
        same(recapture, case.state)


@pytest.mark.usefixtures("points")
def test_guard_follows_current_optimizer_memory():
    """Memory that left the optimizer is copied in the call from then on, though the capture has not changed."""
    case = Case()
    recapture = AllCaches().attach(case.optimizer)
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
def test_ignoring_addresses_is_detected(monkeypatch):
    describe_many = TorchAdapter.describe_many

    def describe_blindly(self, leaves):
        seen = describe_many(self, leaves)
        return seen and LeafBatch(seen.facts, [64] * len(leaves), seen.keeps, seen.readers)

    monkeypatch.setattr(TorchAdapter, "describe_many", describe_blindly)
    case = Case()
    recapture = AllCaches().attach(case.optimizer)
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
def test_similar_tensors_are_distinguished_by_position(before, after):
    tensors = [torch.full((3,), float(number)) for number in range(3)]

    def filled(part):
        if isinstance(part, list):
            return [filled(each) for each in part]
        return tensors[part] if isinstance(part, int) else part

    recapture = AllCaches()
    for places in (before, before, after, after, before):
        same(recapture, {"filled": filled(places)})


def test_tensor_moved_into_another_shares_its_storage():
    pool = torch.arange(100.0)
    state, recapture = {"first": pool[:10], "second": torch.ones(100)}, AllCaches()
    same(recapture, state)
    state["second"] = torch.ones(100)
    assert same(recapture, state), "it shares no memory before or after"
    state["second"] = pool
    assert not same(recapture, state)


def test_moving_tensor_keeps_the_cache_valid():
    state, recapture = {"fixed": torch.ones(5), "step": 0}, AllCaches()
    kept = []
    same(recapture, {**state, "rng": torch.zeros(9)})
    for step in range(20):
        kept.append(torch.full((9,), float(step)))
        assert same(recapture, {**state, "rng": kept[-1], "step": step})


def test_cache_keeps_no_tensor_alive():
    tensor = torch.ones(1000)
    state, recapture = {"tensor": tensor, "array": (array := np.ones(1000))}, AllCaches()
    watched = [weakref.ref(tensor), weakref.ref(array)]
    for _ in range(3):
        recapture.capture(state, [TorchAdapter()])
    del tensor, array, state
    gc.collect()
    assert [each() for each in watched] == [None, None]


def test_capture_keeps_its_tensors_alive():
    recapture = AllCaches()
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


def test_state_dict_is_called_once_per_capture():
    holder, recapture = Holder(torch.ones(3)), AllCaches()
    state = {"holder": holder, "again": holder, "step": 0, "last": 1}
    for asked in (2, 4):
        recapture.capture(state, [TorchAdapter()])
        assert holder.asked == asked
    state["last"] = torch.ones(2)
    same(recapture, state)
    assert holder.asked == 8, "twice by each capture, including an abandoned first walk"


class Late(Holder):
    """Converted in one test only."""


@pytest.mark.usefixtures("points")
def test_later_registered_converter_is_used():
    state, recapture = {"point": {"x": 1}, "tensor": torch.ones(2)}, AllCaches()
    same(recapture, state)
    assert same(recapture, state)
    name = "test.recapture.late"
    ckstore.register_converter(Late, name, lambda one: [one.tensor], lambda state: Late(state[0]))
    assert not same(recapture, state)
    state["point"] = Late(torch.ones(1))
    same(recapture, state)
    assert same(recapture, state)


def test_unstored_attributes_warn_every_time():
    odd = OrderedDict(a=1)
    state, recapture = {"odd": odd, "tensor": torch.ones(2)}, AllCaches()
    same(recapture, state)
    odd.note = object()
    for _ in range(2):
        assert not same(recapture, state)
        assert "'note' of an OrderedDict is not a plain value" in recapture.capture(state, [TorchAdapter()]).warnings[0]


def test_unsupported_value_is_refused_every_time():
    state, recapture = {"a": [torch.ones(2), 1]}, AllCaches()
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


def test_bool_key_in_place_of_a_number_is_detected():
    state, recapture = {"a": {1: torch.ones(2)}}, AllCaches()
    same(recapture, state)
    for key in (True, 1.0):
        state["a"] = {key: torch.ones(2)}
        assert not same(recapture, state)


def test_later_imported_library_is_used():
    state, recapture = {"array": np.ones(3)}, AllCaches()
    recapture.capture(state)
    assert same(recapture, state) is False
    assert same(recapture, state)


def test_warnings_are_not_cached():
    state, recapture = {"tensor": torch.ones(2)}, AllCaches()
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
    """Lower the length limit, so that values with a few dozen items count as long."""
    monkeypatch.setattr("ckstore.state.capture.PLAIN_MIN", 50)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_unchanged_long_value_is_not_traversed(value, monkeypatch):
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
    fresh_capture = capture(state, [TorchAdapter()])
    assert (found.tree, found.tensors) == (fresh_capture.tree, fresh_capture.tensors)
    contents = [[bytes(each.read(0, each.nbytes)) for each in captured.storages] for captured in (found, fresh_capture)]
    assert contents[0] == contents[1]


class Text(str):
    """A subclass of str, which cannot be stored."""

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
def test_similar_long_values_are_distinguished(values):
    def captured_or_error(take, value):
        try:
            captured = take({"x": [value, *["more"] * 60], "w": np.ones(2)})
        except UsageError as error:
            return str(error)
        return captured.tree, captured.tensors, [bytes(each.read(0, each.nbytes)) for each in captured.storages]

    for before in values:
        for after in values:
            recapture = CaptureCache()
            for value in (before, before, after, after, before):
                assert captured_or_error(recapture.capture, value) == captured_or_error(capture, value)


@pytest.mark.usefixtures("short")
def test_long_value_that_contains_itself_is_refused():
    items = ["word"] * 60
    recapture = CaptureCache()
    for _ in range(3):
        recapture.capture({"x": items})
    items[5:] = [items] * 60
    with pytest.raises(UsageError, match="contains itself"):
        recapture.capture({"x": items})
