"""Protects leaves and keys that are neither tensors nor plain values: what is committed can be restored, always.

Every row of the tables that the package goes by is drawn from here; a row without a strategy fails a test.
"""

import argparse
import dataclasses
import datetime
import enum
import gc
import math
import random
import sys
import types
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

from ckstore import packed, standard_types, values
from ckstore.capture import capture
from ckstore.errors import CorruptError, LeafTypeError, MalformedError, UnsupportedError, UsageError
from ckstore.format.nodes import decode_tree, encode_tree
from ckstore.named_types import StandIn
from ckstore.placement import prepare_restore
from ckstore.recapture import Recapture
from ckstore.testing.states import Kept, difference, round_trip
from ckstore.tree import ConvertedNode, DictNode, ListNode, OtherKey, TupleNode, ValueNode, format_path, leaves_of

torch = pytest.importorskip("torch")
from ckstore.adapters.torch_state import TorchAdapter  # noqa: E402

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


def through_the_wire(state, **how):
    """Take a state apart, write its tree, read it, and restore it."""
    kept = Kept.of(capture(state, TORCH))
    tree = decode_tree(encode_tree(kept.tree), tensor_count=len(kept.tensors))
    assert tree == kept.tree
    again = Kept(tree, kept.tensors, kept.storages, kept.contents)
    return again.fill(again.place(adapters=TORCH, **how))


def test_every_row_of_the_tables_is_drawn_from():
    assert {row.name for row in values._TABLE} == set(PLAIN_OF)
    assert {row.word for row in standard_types._TABLE} == set(STANDARD_OF)
    assert set(standard_types.KINDS) == set(NAMED_OF)


@given(leaf=LEAVES)
def test_any_leaf_comes_back_bit_for_bit(leaf):
    assert difference({"leaf": [leaf]}, through_the_wire({"leaf": [leaf]})) is None


@given(items=st.dictionaries(KEYS, ATOMS, max_size=4))
def test_any_key_comes_back_with_its_type(items):
    for state in (items, OrderedDict(items)):
        assert difference(state, through_the_wire({"here": state})["here"]) is None


@pytest.mark.parametrize("value", [value for found in TORCH_OF.values() for value in found], ids=str)
def test_every_named_value_of_torch_comes_back(value):
    assert through_the_wire({"a": value, "b": {value: 1}}) == {"a": value, "b": {value: 1}}


def test_keys_of_optimizers_come_back():
    state = {(torch.bfloat16, torch.float32): 1, 0.5: 2, True: 3, None: 4, Colour.RED: 5, ("a", (2, None)): 6}
    back = through_the_wire(state)
    assert difference(state, back) is None
    assert [type(key) for key in back] == [type(key) for key in state]


def test_keys_that_are_no_text_are_shown_as_people_write_them():
    state = {(1, "a"): 0, 0.5: 0, True: 0, None: 0, Colour.RED: 0, b"x": 0, torch.bfloat16: 0, (torch.int8,): 0}
    shown = [format_path(path) for path, _ in leaves_of(capture({"k": state}, TORCH).tree)]
    wanted = ["(1, 'a')", "0.5", "True", "None", "Colour.RED", "b'x'", "torch.bfloat16", "(torch.int8,)"]
    assert shown == [f"k.{key}" for key in wanted]
    assert round_trip({"k": {0.5: {"w": 1}, 2: 3}}, only="k.0.5.*") == {"k": {0.5: {"w": 1}}}


def test_a_key_of_thousands_of_digits_or_with_lone_surrogates_comes_back():
    state = {10**5000: 1, -(10**5000): 2, "\ud800": 3}
    assert through_the_wire(state) == state


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
    back = through_the_wire(state)
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
    back = through_the_wire({"g": generator})["g"]
    assert torch.equal(torch.rand(5, generator=back), torch.rand(5, generator=generator))


def test_a_generator_of_a_device_that_is_not_here_comes_back_as_a_stand_in_and_is_stored_as_such():
    content = {"device": "cuda:63", "state": np.arange(16, dtype=np.uint8)}
    stand_in = StandIn("torch.Generator", "cuda:63", content)
    back = through_the_wire({"g": stand_in})["g"]
    assert (back.kind, back.content["device"]) == ("torch.Generator", "cuda:63")
    assert np.array_equal(back.content["state"], content["state"])


class TestNamedClasses:
    """Classes come from modules that are loaded, and only if they are what was stored."""

    def _restored(self, monkeypatch, state, change):
        captured = Kept.of(capture(state))
        change()
        return captured.fill(captured.place())

    def test_a_class_that_is_not_loaded_comes_back_as_a_stand_in_that_is_stored_again(self, monkeypatch):
        state = {"c": Colour.RED, "p": Point(1, [2]), "o": Options(1.5)}
        kept = Kept.of(capture(state))
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, __name__)
            back = kept.fill(kept.place())
            assert back["c"] == StandIn("enum", f"{__name__}:Colour", {"name": "RED", "value": 1})
            assert back["p"].content == {"x": 1, "y": [2]}
            assert back["o"].content == {"rate": 1.5, "names": []}
            assert {back["c"]: 1}[StandIn("enum", f"{__name__}:Colour", {"name": "RED", "value": 1})] == 1
            again = Kept.of(capture(back))
        assert difference(again.fill(again.place()), state) is None

    @pytest.mark.parametrize(
        "name",
        [
            "os:path",
            "os:system",
            "subprocess:Popen",
            "builtins:dict",
            "builtins:eval",
            "collections:OrderedDict",
            "nowhere.at_all:Thing",
            ":",
            "enum:Enum",
            "types:SimpleNamespace",
            f"{__name__}:Point.x",
            f"{__name__}:Kept",
        ],
    )
    @pytest.mark.parametrize("kind", ["enum", "namedtuple", "dataclass"])
    def test_a_name_of_anything_else_makes_a_stand_in_and_imports_nothing(self, kind, name):
        fields = DictNode("dict", ("name",), (ValueNode("str", "RED"),))
        loaded = set(sys.modules)
        made = prepare_restore(ConvertedNode(f"ckstore:{kind}:{name}", fields), [], []).finish()
        assert made == StandIn(kind, name, {"name": "RED"})
        assert set(sys.modules) == loaded

    def test_no_code_of_a_class_runs(self, monkeypatch):
        state = {"o": Options(1), "p": Point(1, 2), "s": Slotted(3)}
        kept = Kept.of(capture(state))

        def forbidden(*_, **__):
            raise AssertionError("code of a class ran")

        for cls in (Options, Point, Slotted):
            for name in ("__init__", "__new__", "__setattr__", "__getattribute__"):
                if name in vars(cls):
                    monkeypatch.setattr(cls, name, forbidden)
        monkeypatch.setattr(Options, "__post_init__", forbidden, raising=False)
        monkeypatch.setattr(Options, "rate", property(fset=forbidden), raising=False)
        back = kept.fill(kept.place())
        assert back["o"].__dict__ == {"rate": 1, "names": []}
        assert tuple(back["p"]) == (1, 2)
        assert Slotted.rate.__get__(back["s"]) == 3

    def test_a_module_is_not_asked_for_what_it_would_import(self, monkeypatch):
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                raise AssertionError("the module was asked")

        monkeypatch.setitem(sys.modules, "lazily", Lazy("lazily"))
        fields = DictNode("dict", (), ())
        made = prepare_restore(ConvertedNode("ckstore:dataclass:lazily:Config", fields), [], []).finish()
        assert isinstance(made, StandIn)

    def test_a_member_whose_value_is_another_one_today_is_a_stand_in(self, monkeypatch):
        class Other(enum.Enum):
            RED = 2

        Other.__qualname__ = "Colour"
        kept = Kept.of(capture({"c": Colour.RED}))
        monkeypatch.setattr(sys.modules[__name__], "Colour", Other)
        assert isinstance(kept.fill(kept.place())["c"], StandIn)

    def test_a_named_tuple_with_other_fields_today_is_a_stand_in(self, monkeypatch):
        other = namedtuple("Point", "y x")
        other.__module__ = __name__
        kept = Kept.of(capture({"p": Point(1, 2)}))
        monkeypatch.setattr(sys.modules[__name__], "Point", other)
        assert kept.fill(kept.place())["p"] == StandIn("namedtuple", f"{__name__}:Point", {"x": 1, "y": 2})

    def test_a_field_that_a_dataclass_got_since_has_its_default(self, monkeypatch):
        @dataclasses.dataclass
        class Newer:
            rate: object
            names: list
            clip: float = 1.0
            more: dict = dataclasses.field(default_factory=dict)

        Newer.__qualname__ = "Options"
        kept = Kept.of(capture({"o": Options(1)}))
        monkeypatch.setattr(sys.modules[__name__], "Options", Newer)
        assert vars(kept.fill(kept.place())["o"]) == {"rate": 1, "names": [], "clip": 1.0, "more": {}}

    def test_a_class_within_a_function_is_warned_of(self):
        @dataclasses.dataclass
        class Inner:
            x: int = 1

        captured = capture({"a": [Inner(), Inner()]})
        assert len(captured.warnings) == 1
        assert "a.0 and 1 more" in captured.warnings[0]
        assert isinstance(round_trip({"a": Inner()})["a"], StandIn)

    def test_a_dataclass_that_says_itself_how_it_is_stored_is_refused(self):
        @dataclasses.dataclass
        class Own:
            x: int = 1

            def __getstate__(self):
                return {}

        @dataclasses.dataclass
        class Table(dict):
            x: int = 1

        for leaf in (Own(), Table()):
            with pytest.raises(LeafTypeError, match="dataclass"):
                capture({"a": leaf})

    def test_attributes_beside_the_fields_come_back(self):
        options = Options(1)
        options.device = "cpu"
        assert vars(round_trip(options)) == {"rate": 1, "names": [], "device": "cpu"}


@pytest.mark.parametrize(
    ("kind", "content"),
    [("enum", {}), ("namedtuple", [1]), ("set", 5), ("Decimal", "a"), ("torch.Generator", 1), ("datetime", (1,))],
)
def test_a_stand_in_that_could_not_be_read_is_refused_at_the_commit(kind, content):
    with pytest.raises(LeafTypeError):
        capture({"a": StandIn(kind, "x:y", content)}, TORCH)


class TestAttributesOfTensors:
    """torch.save keeps them, and libraries mark parameters by them."""

    def test_plain_ones_come_back_and_others_are_warned_of_once(self):
        tensor, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(3))
        for held in (tensor, parameter):
            held.sequence_parallel, held.shape_before, held.main_grad = True, torch.Size((1, 2)), torch.ones(1)
        captured = capture({"a": tensor, "b": parameter}, TORCH)
        assert len(captured.warnings) == 1
        assert "'main_grad'" in captured.warnings[0]
        back = through_the_wire({"a": tensor, "b": parameter})
        for held in back.values():
            assert vars(held) == {"sequence_parallel": True, "shape_before": torch.Size((1, 2))}

    def test_they_go_into_live_tensors(self):
        tensor = torch.ones(3)
        tensor.mark = 2
        live = torch.zeros(3)
        live.other = 1
        back = through_the_wire({"a": tensor}, into={"a": live})
        assert back["a"] is live
        assert vars(live) == {"mark": 2, "other": 1}

    def test_a_change_of_them_is_seen_by_the_next_commit(self):
        tensor, recapture = torch.ones(3), Recapture()
        recapture.capture({"a": tensor}, TORCH)
        tensor.mark = 1
        assert recapture.capture({"a": tensor}, TORCH).tree == capture({"a": tensor}, TORCH).tree
        tensor.mark = 2
        assert recapture.capture({"a": tensor}, TORCH).tree == capture({"a": tensor}, TORCH).tree


class TestIntoLiveStates:
    """Containers that can be changed are filled; the others are replaced, and the tensors in them filled."""

    def test_tensors_in_containers_are_overwritten_where_they_are(self):
        def state(value):
            w = torch.full((4,), float(value))
            point, options = Point(w.clone(), value), Options(w.clone(), [value])
            return {"p": point, "o": options, "q": deque([w.clone()]), "s": SimpleNamespace(w=w.clone()), (1, 2): w}

        live = state(0)
        held = [live["p"].x, live["o"].rate, live["q"][0], live["s"].w, live[1, 2]]
        boxes = live["o"], live["q"], live["s"]
        back = through_the_wire(state(5), into=live)
        assert difference(back, state(5)) is None
        assert all(torch.equal(tensor, torch.full((4,), 5.0)) for tensor in held)
        assert all(back[key] is box for key, box in zip("oqs", boxes, strict=True))
        assert back["p"].x is held[0]

    def test_a_live_generator_set_or_list_that_others_hold_is_changed(self):
        stored = {"g": torch.Generator().manual_seed(3), "seen": {1, 2}, "order": list(range(1, 5000)), "b": {0.5: 1}}
        live = {"g": torch.Generator().manual_seed(9), "seen": {7}, "order": [3], "b": {0.5: 2}}
        held = dict(live)
        back = through_the_wire(stored, into=live)
        assert difference(back, stored) is None
        assert all(back[key] is held[key] for key in ("g", "seen", "order", "b"))

    def test_a_live_state_with_a_key_that_the_checkpoint_lacks_is_refused(self):
        with pytest.raises(UsageError, match="lacks"):
            through_the_wire({0.5: 1}, into={0.5: 1, (1, object()): torch.ones(1)})


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
    def test_they_leave_the_tree_short_and_come_back(self, name):
        state = {"x": {"here": LONG[name], "epoch": 3}}
        assert len(encode_tree(capture(state).tree)) < 300
        assert difference(through_the_wire(state), state) is None

    @pytest.mark.parametrize("name", LONG)
    def test_a_second_capture_is_the_same(self, name):
        state, recapture = {"x": {"here": LONG[name]}, "w": torch.ones(3)}, Recapture()
        for _ in range(2):
            again, anew = recapture.capture(state, TORCH), capture(state, TORCH)
            assert (again.tree, again.tensors) == (anew.tree, anew.tensors)
            assert [bytes(each.read(0, each.nbytes)) for each in again.storages] == [
                bytes(each.read(0, each.nbytes)) for each in anew.storages
            ]

    def test_lists_that_change_what_they_are_are_captured_as_if_anew(self):
        lists = [
            list(range(2_000)),
            [1.5] * 2_000,
            ORDER[:2_000],
            ["a", *range(1_999)],
            list(range(2_000)),
            [1, "b"] * 9_000,
        ]
        recapture = Recapture()
        for items in lists:
            state = {"x": items, "w": torch.ones(2)}
            assert recapture.capture(state, TORCH).tree == capture(state, TORCH).tree

    def test_what_an_optimizer_says_stays_in_the_tree(self):
        groups = [{"params": [number], "lr": 0.1, "betas": (0.9, 0.99)} for number in range(3_000)]
        tree = capture({"opt": {"state": {}, "param_groups": groups}}).tree
        assert isinstance(tree.children[0].children[1], ListNode)

    def test_a_path_into_one_brings_it_whole(self):
        state = {"x": {"order": ORDER, "words": LONG["words"], "epoch": 3}}
        assert round_trip(state, only="x.order.5") == {"x": {"order": ORDER}}
        assert round_trip(state, only="x.words.w5") == {"x": {"words": LONG["words"]}}
        assert round_trip(state, only="x.ep*") == {"x": {"epoch": 3}}


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
def test_leaves_from_disk_that_no_capture_makes_are_refused_before_anything_is_written(name, child):
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
def test_any_child_of_any_kind_is_made_or_refused_with_our_errors(name, child):
    node = ConvertedNode(name, capture(child).tree)
    try:
        tree = decode_tree(encode_tree(node), tensor_count=0)
        made = prepare_restore(tree, [], [], adapters=TORCH).finish()
    except (CorruptError, UnsupportedError):
        return
    assert difference(round_trip([made], adapters=TORCH), [made]) is None


def test_a_converter_that_hands_back_the_leaf_itself_lets_it_be_stored_as_ever():
    tensor = torch.ones(3)
    assert "register_converter(Tensor" not in _advice(torch.eye(3).to_sparse())
    assert "to_dense" in _advice(torch.eye(3).to_sparse())
    assert "register_converter" not in _advice(torch.ones(2, device="meta"))
    assert "register_converter" not in _advice(np.array([object()]))
    assert difference(through_the_wire({"a": tensor}), {"a": tensor}) is None


def _advice(leaf):
    with pytest.raises(LeafTypeError) as caught:
        capture({"x": leaf}, TORCH)
    return str(caught.value)


def test_no_reference_cycle_is_left_by_the_new_kinds():
    state = {"a": Counter("ab"), "p": Path("x"), "u": uuid.UUID(int=5), "t": torch.ones(2)}
    gc.collect()
    gc.disable()
    try:
        capture(state, TORCH)
        assert gc.collect() == 0
    finally:
        gc.enable()


assert packed.NAMES
