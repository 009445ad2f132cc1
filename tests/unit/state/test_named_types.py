"""Protects readers from classes: restoring an object by its class name imports no module and runs no code."""

import dataclasses
import enum
import sys
import types
from collections import OrderedDict, namedtuple

import pytest
import torch

from ckstore.errors import LeafTypeError
from ckstore.format.tree import ConvertedNode, DictNode, ValueNode
from ckstore.state.capture import capture
from ckstore.state.capture_cache import CaptureCache
from ckstore.state.named_types import DistinctStandIn, StandIn
from ckstore.state.placement import prepare_restore
from ckstore.state.torch_adapter import TorchAdapter
from support.states import CopiedState, difference, round_trip


class Colour(enum.Enum):
    RED = 1


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Options:
    rate: object
    names: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    rate: object
    more: object = None


def with_attribute(item, value):
    item.origin = value
    return item


@dataclasses.dataclass(eq=False)
class Node:
    value: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object = 0


def changed(name, **options):
    """Return a dataclass of the same name and fields, made with other options."""

    @dataclasses.dataclass(**options)
    class Changed:
        value: object = 0

    Changed.__qualname__ = name
    return Changed


class TestMembersAndKeys:
    """The number of restored members and keys is the stored one, even if their classes changed."""

    @pytest.mark.parametrize(
        "state",
        [
            {"s": {Node(1), Node(1)}},
            {"s": frozenset({Node(1), Node(1), Node(2), 3})},
            {"s": {(Node(1), 0), (Node(1), 0)}},
            {"s": {frozenset({Node(1)}), frozenset({Node(1)})}},
        ],
    )
    def test_equal_members_stay_distinct_without_their_class(self, monkeypatch, state):
        kept = CopiedState.of(capture(state))
        assert len(kept.fill(kept.place())["s"]) == len(state["s"])
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, __name__)
            back = kept.fill(kept.place())
            assert type(back["s"]) is type(state["s"])
            assert len(back["s"]) == len(state["s"])
            again = CopiedState.of(capture(back))
            assert again.tree == kept.tree
            assert not capture(back).warnings
        assert len(again.fill(again.place())["s"]) == len(state["s"])
        assert all(type(each) is not StandIn for each in again.fill(again.place())["s"])

    @pytest.mark.parametrize(
        "state",
        [
            {"s": {Frozen(1)}},
            {"s": {Frozen(1), Frozen(2), "x"}},
            {"s": {(Frozen(1), "x")}},
            {"s": {Frozen(Frozen(1))}},
            {"s": {Frozen(1): 2}},
            {"s": {(0, Frozen(1)): 2, Frozen(2): 3, "x": 4}},
        ],
    )
    def test_unhashable_class_gives_placeholders(self, monkeypatch, state):
        kept = CopiedState.of(capture(state))
        monkeypatch.setattr(sys.modules[__name__], "Frozen", changed("Frozen"))
        back = kept.fill(kept.place())["s"]
        assert len(back) == len(state["s"])
        objects = [
            each for key in back for each in (key if isinstance(key, tuple) else (key,)) if type(each) not in (int, str)
        ]
        assert objects
        assert all(isinstance(each, StandIn) and each.kind == "dataclass" for each in objects)
        assert capture({"s": back}).tree == kept.tree

    @pytest.mark.parametrize("live", [{}, {"x": 5}])
    def test_placeholder_keys_go_into_live_dicts(self, monkeypatch, live):
        kept = CopiedState.of(capture({"k": {Frozen(1): [2], "x": 3}}))
        monkeypatch.setattr(sys.modules[__name__], "Frozen", changed("Frozen"))
        back = kept.fill(kept.place(into={"k": live}))["k"]
        assert list(map(type, back)) == [DistinctStandIn, str]
        assert list(back.values()) == [[2], 3]

    def test_members_that_became_equal_stay_distinct(self, monkeypatch):
        state = {"s": {Frozen(1), Frozen(2)}, "t": {(Frozen(1), 5), (Frozen(2), 5)}, "k": {Frozen(1): 0, Frozen(2): 1}}
        kept = CopiedState.of(capture(state))
        other = dataclasses.make_dataclass("Frozen", [("value", object, dataclasses.field(compare=False))], frozen=True)
        other.__module__ = __name__
        monkeypatch.setattr(sys.modules[__name__], "Frozen", other)
        back = kept.fill(kept.place())
        assert [len(back[name]) for name in "stk"] == [2, 2, 2]
        assert list(back["k"].values()) == [0, 1]
        again = CopiedState.of(capture(back))
        assert [len(again.fill(again.place())[name]) for name in "stk"] == [2, 2, 2]


class TestNamedClasses:
    """Classes come from loaded modules, and only if they equal what was stored."""

    def _restored(self, monkeypatch, state, change):
        captured = CopiedState.of(capture(state))
        change()
        return captured.fill(captured.place())

    def test_unloaded_class_gives_a_placeholder(self, monkeypatch):
        state = {"c": Colour.RED, "p": Point(1, [2]), "o": Options(1.5)}
        kept = CopiedState.of(capture(state))
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, __name__)
            back = kept.fill(kept.place())
            assert back["c"] == StandIn("enum", f"{__name__}:Colour", {"name": "RED", "value": 1})
            assert back["p"].content == {"x": 1, "y": [2]}
            assert back["o"].content == {"rate": 1.5, "names": []}
            assert {back["c"]: 1}[StandIn("enum", f"{__name__}:Colour", {"name": "RED", "value": 1})] == 1
            again = CopiedState.of(capture(back))
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
            f"{__name__}:CopiedState",
        ],
    )
    @pytest.mark.parametrize("kind", ["enum", "namedtuple", "dataclass"])
    def test_other_name_gives_a_placeholder_without_import(self, kind, name):
        fields = DictNode("dict", ("name",), (ValueNode("str", "RED"),))
        loaded = set(sys.modules)
        made = prepare_restore(ConvertedNode(f"ckstore:{kind}:{name}", fields), [], []).finish()
        assert made == StandIn(kind, name, {"name": "RED"})
        assert set(sys.modules) == loaded

    def test_no_code_of_a_class_runs(self, monkeypatch):
        state = {"o": Options(1), "p": Point(1, 2), "s": Slotted(3)}
        kept = CopiedState.of(capture(state))

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

    def test_lazy_module_attributes_are_not_read(self, monkeypatch):
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                raise AssertionError("the module was asked")

        monkeypatch.setitem(sys.modules, "lazily", Lazy("lazily"))
        fields = DictNode("dict", (), ())
        made = prepare_restore(ConvertedNode("ckstore:dataclass:lazily:Config", fields), [], []).finish()
        assert isinstance(made, StandIn)

    def test_member_with_changed_value_is_a_placeholder(self, monkeypatch):
        class Other(enum.Enum):
            RED = 2

        Other.__qualname__ = "Colour"
        kept = CopiedState.of(capture({"c": Colour.RED}))
        monkeypatch.setattr(sys.modules[__name__], "Colour", Other)
        assert isinstance(kept.fill(kept.place())["c"], StandIn)

    def test_named_tuple_with_changed_fields_is_a_placeholder(self, monkeypatch):
        other = namedtuple("Point", "y x")
        other.__module__ = __name__
        kept = CopiedState.of(capture({"p": Point(1, 2)}))
        monkeypatch.setattr(sys.modules[__name__], "Point", other)
        assert kept.fill(kept.place())["p"] == StandIn("namedtuple", f"{__name__}:Point", {"x": 1, "y": 2})

    def test_new_dataclass_field_has_its_default(self, monkeypatch):
        @dataclasses.dataclass
        class Newer:
            rate: object
            names: list
            clip: float = 1.0
            more: dict = dataclasses.field(default_factory=dict)

        Newer.__qualname__ = "Options"
        kept = CopiedState.of(capture({"o": Options(1)}))
        monkeypatch.setattr(sys.modules[__name__], "Options", Newer)
        assert vars(kept.fill(kept.place())["o"]) == {"rate": 1, "names": [], "clip": 1.0, "more": {}}

    def test_local_class_warns(self):
        @dataclasses.dataclass
        class Inner:
            x: int = 1

        captured = capture({"a": [Inner(), Inner()]})
        assert len(captured.warnings) == 1
        assert "a.0 and 1 more" in captured.warnings[0]
        assert isinstance(round_trip({"a": Inner()})["a"], StandIn)

    @pytest.mark.parametrize(
        "state_of",
        [
            lambda member: {member: 1},
            lambda member: {"a": {(1, member): [2]}},
            lambda member: {"a": OrderedDict([(frozenset([member]), 2)])},
            lambda member: with_attribute(torch.zeros(2), member),
            lambda member: {"a": with_attribute(OrderedDict(), [member])},
            lambda member: {"a": with_attribute(torch.zeros(2), {member: 1})},
        ],
    )
    @pytest.mark.parametrize("is_again", [False, True])
    def test_local_class_as_key_or_attribute_warns(self, state_of, is_again):
        class Inner(enum.Enum):
            ONE = 1

        state = state_of(Inner.ONE)
        recapture, adapters = CaptureCache(), (TorchAdapter(),)
        for _ in range(1 + is_again):
            (warning,) = recapture.capture(state, adapters).warnings
            assert "Inner will be restored as ckstore.StandIn" in warning

    def test_dataclass_with_getstate_is_refused(self):
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

    def test_extra_attributes_of_a_dataclass_come_back(self):
        options = Options(1)
        options.device = "cpu"
        assert vars(round_trip(options)) == {"rate": 1, "names": [], "device": "cpu"}
