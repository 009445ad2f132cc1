"""Protects leaves and keys that are neither tensors nor plain values: whatever is committed can be restored.

Every row of the package's tables is drawn here. A row without a strategy fails a test.
"""

import argparse
import dataclasses
import datetime
import enum
import gc
import random
import uuid
import zoneinfo
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import CorruptError, LeafTypeError, MalformedError, UnsupportedError, UsageError
from ckstore.format.tree import (
    ConvertedNode,
    DictNode,
    ListNode,
    OtherKey,
    TupleNode,
    ValueNode,
    decode_tree,
    encode_tree,
    format_path,
    leaves_of,
)
from ckstore.state import standard_types, values
from ckstore.state.capture import capture
from ckstore.state.capture_cache import CaptureCache
from ckstore.state.markers import PerRankValues
from ckstore.state.named_types import StandIn
from ckstore.state.placement import prepare_restore
from support.states import CopiedState, difference, round_trip

torch = pytest.importorskip("torch")
from ckstore.state.torch_adapter import TorchAdapter  # noqa: E402

TORCH = (TorchAdapter(),)


class Colour(enum.Enum):
    RED = 1
    BLUE = ("b", 2.5)


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):
    STEPS = "steps"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Options:
    rate: object
    names: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    rate: object
    more: object = None


ZONES = st.one_of(
    st.none(),
    st.integers(-1439, 1439).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))),
    st.just(datetime.timezone(datetime.timedelta(hours=1), "somewhere")),
    st.just(zoneinfo.ZoneInfo("Europe/Berlin")),
)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(categories=["Cs", "L"]), max_size=4),
    st.binary(max_size=4),
)
PLAIN_OF = {
    "none": st.none(),
    "bool": st.booleans(),
    "int": st.integers(-(1 << 63), (1 << 63) - 1),
    "bigint": st.integers(1 << 63, 1 << 200),
    "float": st.floats(),
    "complex": st.complex_numbers(),
    "str": st.text(st.characters(exclude_categories=["Cs"])),
    "surrogates": st.text(st.characters(categories=["Cs"]), min_size=1),
    "bytes": st.binary(),
}
STANDARD_OF = {
    "set": st.sets(ATOMS.filter(lambda item: item == item), max_size=4),
    "frozenset": st.frozensets(ATOMS.filter(lambda item: item == item), max_size=4),
    "deque": st.builds(deque, st.lists(ATOMS, max_size=3), st.one_of(st.none(), st.integers(3, 5))),
    "SimpleNamespace": st.dictionaries(st.text("ab", min_size=1), ATOMS, max_size=3).map(
        lambda d: SimpleNamespace(**d)
    ),
    "Namespace": st.dictionaries(st.text("ab", min_size=1), ATOMS, max_size=3).map(lambda d: argparse.Namespace(**d)),
    "bytearray": st.binary(max_size=8).map(bytearray),
    "per_rank": st.dictionaries(st.integers(0, 9), ATOMS, min_size=1, max_size=3).map(
        lambda values: PerRankValues(sorted(values.items()))
    ),
    "range": st.builds(range, st.integers(), st.integers(), st.integers(1)),
    "slice": st.builds(slice, ATOMS, ATOMS, ATOMS),
    "UUID": st.uuids(),
    "PosixPath": st.lists(st.text("ab\ud800.", min_size=1), max_size=3).map(lambda parts: Path(*parts)),
    "PurePosixPath": st.text("ab/.", max_size=6).map(PurePosixPath),
    "PureWindowsPath": st.text("ab/.\\:", max_size=6).map(PureWindowsPath),
    "Fraction": st.fractions(),
    "Decimal": st.one_of(st.decimals(), st.sampled_from([Decimal("-0"), Decimal("sNaN7"), Decimal("1E+9")])),
    "date": st.dates(),
    "time": st.times(),
    "datetime": st.datetimes(timezones=ZONES),
    "timedelta": st.timedeltas(),
    "timezone": ZONES.filter(lambda zone: isinstance(zone, datetime.timezone)),
    "zone": st.sampled_from(["UTC", "Europe/Berlin", "Asia/Tokyo"]).map(zoneinfo.ZoneInfo),
}
NAMED_OF = {
    "enum": st.sampled_from([*Colour, *Level, *Word, *Right, Right.READ | Right.WRITE, Right(0)]),
    "namedtuple": st.builds(Point, ATOMS, ATOMS),
    "dataclass": st.one_of(st.builds(Options, ATOMS, st.lists(ATOMS, max_size=2)), st.builds(Slotted, ATOMS, ATOMS)),
}
TORCH_OF = {
    "torch.dtype": [value for value in vars(torch).values() if isinstance(value, torch.dtype)],
    "torch.layout": [value for value in vars(torch).values() if isinstance(value, torch.layout)],
    "torch.memory_format": [value for value in vars(torch).values() if isinstance(value, torch.memory_format)],
    "torch.qscheme": [value for value in vars(torch).values() if isinstance(value, torch.qscheme)],
    "torch.device": [torch.device("cpu"), torch.device("cuda:7"), torch.device("meta")],
    "torch.Size": [torch.Size(()), torch.Size((0, 3, 1 << 40))],
}
NUMPY = st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("a\0"), np.datetime64("2024-01-02")])
LEAVES = st.one_of(
    *PLAIN_OF.values(),
    *STANDARD_OF.values(),
    *NAMED_OF.values(),
    *(st.sampled_from(found) for found in TORCH_OF.values()),
    NUMPY,
)
NO_NAN = LEAVES.filter(lambda leaf: "nan" not in repr(leaf).lower())


def _is_key(leaf):
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


KEYS = st.one_of(NO_NAN.filter(_is_key), st.tuples(NO_NAN.filter(_is_key), NO_NAN.filter(_is_key)))


def wire_round_trip(state, **how):
    """Capture a state, encode and decode its tree, and restore it."""
    kept = CopiedState.of(capture(state, TORCH))
    tree = decode_tree(encode_tree(kept.tree), tensor_count=len(kept.tensors))
    assert tree == kept.tree
    again = CopiedState(tree, kept.tensors, kept.storages, kept.contents)
    return again.fill(again.place(adapters=TORCH, **how))


def test_every_table_row_has_a_strategy():
    assert {row.name for row in values._TABLE} == set(PLAIN_OF)
    assert {row.word for row in standard_types._TABLE} == set(STANDARD_OF)
    assert set(standard_types.KINDS) == set(NAMED_OF)


@given(leaf=LEAVES)
def test_any_leaf_comes_back_bit_for_bit(leaf):
    assert difference({"leaf": [leaf]}, wire_round_trip({"leaf": [leaf]})) is None


@given(items=st.dictionaries(KEYS, ATOMS, max_size=4))
def test_any_key_comes_back_with_its_type(items):
    for state in (items, OrderedDict(items)):
        assert difference(state, wire_round_trip({"here": state})["here"]) is None


@pytest.mark.parametrize("value", [value for found in TORCH_OF.values() for value in found], ids=str)
def test_every_named_value_of_torch_comes_back(value):
    assert wire_round_trip({"a": value, "b": {value: 1}}) == {"a": value, "b": {value: 1}}


def test_keys_of_optimizers_come_back():
    state = {(torch.bfloat16, torch.float32): 1, 0.5: 2, True: 3, None: 4, Colour.RED: 5, ("a", (2, None)): 6}
    back = wire_round_trip(state)
    assert difference(state, back) is None
    assert [type(key) for key in back] == [type(key) for key in state]


def test_non_string_keys_are_shown_as_literals():
    state = {(1, "a"): 0, 0.5: 0, True: 0, None: 0, Colour.RED: 0, b"x": 0, torch.bfloat16: 0, (torch.int8,): 0}
    shown = [format_path(path) for path, _ in leaves_of(capture({"k": state}, TORCH).tree)]
    wanted = ["(1, 'a')", "0.5", "True", "None", "Colour.RED", "b'x'", "torch.bfloat16", "(torch.int8,)"]
    assert shown == [f"k.{key}" for key in wanted]
    assert round_trip({"k": {0.5: {"w": 1}, 2: 3}}, only="k.0.5.*") == {"k": {0.5: {"w": 1}}}


def test_extreme_keys_come_back():
    state = {10**5000: 1, -(10**5000): 2, "\ud800": 3}
    assert wire_round_trip(state) == state


def test_tensors_in_containers_of_any_kind_come_back():
    w = torch.arange(4.0)
    state = {
        "point": Point(w, 1),
        "queue": deque([w, 2], 7),
        "options": Options(w),
        "slotted": Slotted({"w": w}),
        "space": SimpleNamespace(w=w),
        "args": argparse.Namespace(w=[w]),
        "keys": {(0, 1): w},
    }
    back = wire_round_trip(state)
    assert difference(state, back) is None
    assert back["point"].x is back["queue"][0] is back["keys"][0, 1]


def test_a_set_is_written_alike_in_every_order():
    members = ["a", 1, 2.5, None, (1, "x"), frozenset(["p", "q", "r"]), 10**5000]
    trees = set()
    for seed in range(5):
        random.Random(seed).shuffle(members)
        trees.add(encode_tree(capture({"s": set(members)}).tree))
    assert len(trees) == 1


def test_a_generator_comes_back_with_its_state():
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    back = wire_round_trip({"g": generator})["g"]
    assert torch.equal(torch.rand(5, generator=back), torch.rand(5, generator=generator))


def test_generator_of_missing_device_is_a_placeholder():
    content = {"device": "cuda:63", "state": np.arange(16, dtype=np.uint8)}
    stand_in = StandIn("torch.Generator", "cuda:63", content)
    back = wire_round_trip({"g": stand_in})["g"]
    assert (back.kind, back.content["device"]) == ("torch.Generator", "cuda:63")
    assert np.array_equal(back.content["state"], content["state"])


@pytest.mark.parametrize(
    ("kind", "content"),
    [("enum", {}), ("namedtuple", [1]), ("set", 5), ("Decimal", "a"), ("torch.Generator", 1), ("datetime", (1,))],
)
def test_unreadable_placeholder_is_refused_at_commit(kind, content):
    with pytest.raises(LeafTypeError):
        capture({"a": StandIn(kind, "x:y", content)}, TORCH)


class TestAttributesOfTensors:
    """torch.save keeps them, and libraries use them to mark parameters."""

    def test_plain_attributes_come_back_others_warn_once(self):
        tensor, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(3))
        for held in (tensor, parameter):
            held.sequence_parallel, held.shape_before, held.main_grad = True, torch.Size((1, 2)), torch.ones(1)
        captured = capture({"a": tensor, "b": parameter}, TORCH)
        assert len(captured.warnings) == 1
        assert "'main_grad'" in captured.warnings[0]
        back = wire_round_trip({"a": tensor, "b": parameter})
        for held in back.values():
            assert vars(held) == {"sequence_parallel": True, "shape_before": torch.Size((1, 2))}

    def test_attributes_are_set_on_live_tensors(self):
        tensor = torch.ones(3)
        tensor.mark = 2
        live = torch.zeros(3)
        live.other = 1
        back = wire_round_trip({"a": tensor}, into={"a": live})
        assert back["a"] is live
        assert vars(live) == {"mark": 2, "other": 1}

    def test_changed_attribute_is_committed(self):
        tensor, recapture = torch.ones(3), CaptureCache()
        recapture.capture({"a": tensor}, TORCH)
        tensor.mark = 1
        assert recapture.capture({"a": tensor}, TORCH).tree == capture({"a": tensor}, TORCH).tree
        tensor.mark = 2
        assert recapture.capture({"a": tensor}, TORCH).tree == capture({"a": tensor}, TORCH).tree


class TestIntoLiveStates:
    """Mutable containers are filled. Others are replaced, and the tensors in them filled."""

    def test_tensors_in_containers_are_filled_in_place(self):
        def state(value):
            w = torch.full((4,), float(value))
            point, options = Point(w.clone(), value), Options(w.clone(), [value])
            return {"p": point, "o": options, "q": deque([w.clone()]), "s": SimpleNamespace(w=w.clone()), (1, 2): w}

        live = state(0)
        held = [live["p"].x, live["o"].rate, live["q"][0], live["s"].w, live[1, 2]]
        boxes = live["o"], live["q"], live["s"]
        back = wire_round_trip(state(5), into=live)
        assert difference(back, state(5)) is None
        assert all(torch.equal(tensor, torch.full((4,), 5.0)) for tensor in held)
        assert all(back[key] is box for key, box in zip("oqs", boxes, strict=True))
        assert back["p"].x is held[0]

    def test_live_generator_set_and_list_are_changed(self):
        stored = {"g": torch.Generator().manual_seed(3), "seen": {1, 2}, "order": list(range(1, 5000)), "b": {0.5: 1}}
        live = {"g": torch.Generator().manual_seed(9), "seen": {7}, "order": [3], "b": {0.5: 2}}
        held = dict(live)
        back = wire_round_trip(stored, into=live)
        assert difference(back, stored) is None
        assert all(back[key] is held[key] for key in ("g", "seen", "order", "b"))

    def test_unknown_live_key_is_refused(self):
        with pytest.raises(UsageError, match="lacks"):
            wire_round_trip({0.5: 1}, into={0.5: 1, (1, object()): torch.ones(1)})


@pytest.mark.parametrize(
    ("name", "child"),
    [
        ("count", TupleNode((ValueNode("int", 0), ValueNode("int", 1 << 40)))),
        ("count", TupleNode((ValueNode("int", 5), ValueNode("int", 1)))),
        ("count", ValueNode("int", 5)),
        ("numbers", ValueNode("int", 5)),
        ("plain", ValueNode("bytes", b"\x81")),
        ("plain", ValueNode("int", 1)),
        ("set", ListNode((ListNode(()),))),
        ("set", ListNode((ValueNode("int", 1), ValueNode("bool", True)))),
        ("deque", ListNode(())),
        ("Namespace", DictNode("dict", (1,), (ValueNode("int", 1),))),
        ("range", TupleNode((ValueNode("int", 1),) * 2 + (ValueNode("int", 0),))),
        ("per_rank", ListNode(())),
        ("per_rank", DictNode("dict", (), ())),
        ("per_rank", DictNode("dict", ("a",), (ValueNode("int", 1),))),
        ("per_rank", DictNode("dict", (-1,), (ValueNode("int", 1),))),
        ("UUID", ValueNode("bytes", b"x")),
        ("PosixPath", ValueNode("str", "a//b")),
        ("Fraction", TupleNode((ValueNode("int", 2), ValueNode("int", 4)))),
        ("Fraction", TupleNode((ValueNode("int", 2), ValueNode("int", 0)))),
        ("Decimal", ValueNode("str", "1_0")),
        ("Decimal", ValueNode("str", "x")),
        ("date", TupleNode((ValueNode("int", 0),) * 3)),
        ("time", TupleNode(())),
        ("timedelta", TupleNode((ValueNode("int", 1 << 62),) * 3)),
        ("timezone", TupleNode((ValueNode("int", 1),))),
        ("enum:a:b", ValueNode("str", "RED")),
        ("enum:a", DictNode("dict", ("name",), (ValueNode("str", "x"),))),
        ("namedtuple:a:b", ListNode(())),
        ("torch.Generator", ValueNode("none", None)),
    ],
)
def test_invalid_leaf_is_refused_before_writing(name, child):
    with pytest.raises(MalformedError):
        prepare_restore(ConvertedNode(f"ckstore:{name}", child), [], [], adapters=TORCH)


@pytest.mark.parametrize("name", ["ckstore:quaternion", "ckstore:torch.Stream", "ckstore:WindowsPath", "ckstore:"])
def test_kinds_of_a_newer_version_are_unsupported(name):
    with pytest.raises(UnsupportedError):
        prepare_restore(ConvertedNode(name, ValueNode("str", "x")), [], [], adapters=TORCH)


@pytest.mark.parametrize(
    "keys",
    [
        (OtherKey(ValueNode("bool", True)), 1),
        (OtherKey(ListNode(())),),
        (OtherKey(ValueNode("float", b"123")),),
        (OtherKey(ConvertedNode("ckstore:set", ListNode(()))),),
    ],
)
def test_keys_from_disk_that_no_dict_has_are_refused(keys):
    with pytest.raises(CorruptError):
        prepare_restore(DictNode("dict", keys, (ValueNode("int", 1),) * len(keys)), [], [])


@given(
    name=st.one_of(
        st.sampled_from(
            [f"ckstore:{word}" for word in (*STANDARD_OF, "keys", "attributes", "count", "numbers", "plain")]
        ),
        st.sampled_from(
            [f"ckstore:{kind}:{__name__}:{cls}" for kind in NAMED_OF for cls in ("Colour", "Point", "Options")]
        ),
    ),
    child=ATOMS.flatmap(
        lambda atom: st.sampled_from([atom, [atom], (atom, atom), {"name": atom}, {"x": atom, "y": 1}])
    ),
)
def test_any_child_is_created_or_refused(name, child):
    node = ConvertedNode(name, capture(child).tree)
    try:
        tree = decode_tree(encode_tree(node), tensor_count=0)
        made = prepare_restore(tree, [], [], adapters=TORCH).finish()
    except (CorruptError, UnsupportedError):
        return
    assert difference(round_trip([made], adapters=TORCH), [made]) is None


def test_advice_suits_the_leaf():
    tensor = torch.ones(3)
    assert "register_converter(Tensor" not in _advice(torch.eye(3).to_sparse())
    assert "to_dense" in _advice(torch.eye(3).to_sparse())
    assert "register_converter" not in _advice(torch.ones(2, device="meta"))
    assert "register_converter" not in _advice(np.array([object()]))
    assert difference(wire_round_trip({"a": tensor}), {"a": tensor}) is None


def _advice(leaf):
    with pytest.raises(LeafTypeError) as caught:
        capture({"x": leaf}, TORCH)
    return str(caught.value)


def test_no_reference_cycle_is_left():
    state = {"a": Counter("ab"), "p": Path("x"), "u": uuid.UUID(int=5), "t": torch.ones(2)}
    gc.collect()
    gc.disable()
    try:
        capture(state, TORCH)
        assert gc.collect() == 0
    finally:
        gc.enable()
