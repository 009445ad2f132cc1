"""Protects the state tree: kinds, order, typed keys and plain values are restored; hostile trees are refused."""

import dataclasses
import math
import random
import struct
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import LeafTypeError, MalformedError, NotFoundError, UnsupportedError, UsageError
from ckstore.format.tree import (
    DEPTH_MAX,
    ConvertedNode,
    DictNode,
    ListNode,
    Selection,
    TensorNode,
    TupleNode,
    ValueNode,
    check_tree,
    decode_tree,
    encode_tree,
    format_path,
    leaves_of,
)
from ckstore.state.capture import LONG_NBYTES_MIN, capture
from ckstore.state.placement import prepare_restore
from ckstore.state.values import decode_plain, encode_plain, register_converter
from support.states import CopiedState, difference, round_trip

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 200), max_value=1 << 200),
    st.floats(),
    st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack("<d", bits)[0]),
    st.complex_numbers(allow_nan=True, allow_infinity=True),
    st.text(),
    st.text(st.characters(categories=["Cs", "L"])),
    st.binary(),
)
KEYS = st.one_of(st.text(max_size=8), st.integers(-(1 << 63), (1 << 63) - 1))
FACTORIES = (int, float, list, dict, str, tuple, set, bool, None)


def _containers(children):
    dicts = st.dictionaries(KEYS, children, max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda items: _filled(Counter(), items)),
        st.tuples(st.sampled_from(FACTORIES), dicts).map(lambda pair: defaultdict(*pair)),
    )


def _filled(target, items):
    dict.update(target, items)
    return target


STATES = st.recursive(PLAIN, _containers, max_leaves=20)


class Celsius:
    def __init__(self, degrees):
        self.degrees = degrees


class Shouting(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")


@given(STATES)
def test_any_plain_state_round_trips(state):
    kept = CopiedState.of(capture(state))
    tree = decode_tree(encode_tree(kept.tree), tensor_count=len(kept.tensors))
    assert tree == kept.tree
    again = CopiedState(tree, kept.tensors, kept.storages, kept.contents)
    assert difference(state, again.fill(again.place())) is None


@given(STATES, STATES)
def test_trees_are_equal_exactly_when_states_are(one, other):
    assert (capture(one).tree == capture(other).tree) == (difference(one, other) is None)


def test_floats_keep_nan_payload_and_sign_of_zero():
    odd = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8DEADBEEF0001, 0xFFF8000000000002)]
    back = round_trip([*odd, -0.0, 0.0, math.inf, complex(-0.0, math.nan)])
    assert [struct.pack("<d", value) for value in back[:2]] == [struct.pack("<d", value) for value in odd]
    assert [math.copysign(1, value) for value in back[2:4]] == [-1.0, 1.0]


@pytest.mark.parametrize("number", [0, -1, (1 << 63) - 1, 1 << 63, -(1 << 63), -(1 << 63) - 1, 1 << 64, -(1 << 1000)])
def test_integers_of_any_size_come_back(number):
    assert round_trip({"n": number}) == {"n": number}


def test_int_and_str_keys_of_equal_text_stay_apart():
    assert round_trip({1: "a", "1": "b"}) == {1: "a", "1": "b"}


def test_ordered_dict_keeps_order_and_metadata():
    state = OrderedDict([("b", 1), ("a", 2)])
    state._metadata = OrderedDict([("", {"version": 2})])
    back = round_trip(state)
    assert list(back) == ["b", "a"]
    assert difference(back._metadata, state._metadata) is None


def test_plain_dict_attributes_come_back_others_warn():
    state, count = OrderedDict(a=1), Counter("aab")
    state.extra, state.lost, count.note = (1, "x"), object(), {"n": 2}
    captured = capture({"here": [state, count]})
    assert [text for text in captured.warnings if "'lost'" in text and "here.0" in text] == captured.warnings
    back = round_trip({"here": [state, count]})["here"]
    assert (vars(back[0]), vars(back[1])) == ({"extra": (1, "x")}, {"note": {"n": 2}})


def test_long_text_and_bytes_are_chunks_and_come_back():
    state = {"text": "häß\ud800" * LONG_NBYTES_MIN, "raw": random.Random(1).randbytes(LONG_NBYTES_MIN)}
    captured = capture(state)
    assert [tensor.library for tensor in captured.tensors] == ["bytes", "bytes"]
    assert len(encode_tree(captured.tree)) < 200
    assert round_trip(state) == state


def test_repeated_container_is_stored_twice():
    shared = [1, 2]
    assert round_trip({"a": shared, "b": shared}) == {"a": [1, 2], "b": [1, 2]}


def test_a_cycle_is_refused_by_its_path():
    state = {"a": [{}]}
    state["a"][0]["back"] = state
    with pytest.raises(UsageError, match=r"contains itself: a\.0\.back"):
        capture(state)


def test_nesting_is_bounded():
    def nested(levels, core):
        for _ in range(levels):
            core = [core]
        return core

    deepest = nested(DEPTH_MAX, "x" * LONG_NBYTES_MIN)
    assert difference(deepest, round_trip(deepest)) is None
    with pytest.raises(UsageError, match="nested deeper"):
        capture(nested(DEPTH_MAX + 1, 0))
    with pytest.raises(UsageError, match="nested deeper"):
        capture(nested(5000, 0))


@pytest.mark.parametrize(
    "key",
    [Shouting("s"), object(), len, Celsius(1), (1, object())],
    ids=["subclass", "object", "function", "class", "tuple"],
)
def test_keys_that_cannot_be_stored_are_refused_by_path(key):
    with pytest.raises(UsageError, match="key") as caught:
        capture({"model": {key: 1}})
    assert caught.value.path == ("model",)


@pytest.mark.parametrize(
    "leaf",
    [object(), lambda: 0, Shouting("s"), int, memoryview(b"x"), time.gmtime(0)],
    ids=lambda leaf: type(leaf).__name__,
)
def test_leaves_of_other_types_are_refused_by_path(leaf):
    with pytest.raises(LeafTypeError, match="eave it out") as caught:
        capture({"a": [0, leaf]})
    assert caught.value.path == ("a", 1)
    assert "a.1" in str(caught.value)


def test_unknown_class_error_advises_a_converter():
    with pytest.raises(LeafTypeError, match=r"register_converter\(Celsius"):
        capture({"a": Celsius(1)})


def test_custom_default_factory_is_refused():
    with pytest.raises(LeafTypeError, match="default factory") as caught:
        capture(defaultdict(lambda: 0))
    assert "register_converter" not in str(caught.value)
    with pytest.raises(LeafTypeError, match="default factory"):
        capture(defaultdict(Counter))


def test_a_converter_is_used_by_exact_type_and_name():
    register_converter(Celsius, "test.celsius", lambda held: {"degrees": held.degrees}, lambda s: Celsius(s["degrees"]))
    back = round_trip({"t": [Celsius(21.5)]})
    assert type(back["t"][0]) is Celsius
    assert back["t"][0].degrees == 21.5

    class Kelvin(Celsius):
        pass

    with pytest.raises(LeafTypeError):
        capture(Kelvin(1))


def test_unregistered_converter_is_refused_before_reading():
    tree = ConvertedNode("test.nobody", ValueNode("none", None))
    with pytest.raises(UnsupportedError, match=r"test\.nobody"):
        prepare_restore(tree, [], [])


def test_converter_names_and_types_are_checked():
    register_converter(Celsius, "test.celsius", vars, Celsius)
    with pytest.raises(UsageError, match="belongs to"):
        register_converter(Point, "test.celsius", list, Point)
    with pytest.raises(UsageError, match="letters"):
        register_converter(Point, "ckstore:str", list, Point)
    with pytest.raises(UsageError, match="a converter cannot be registered"):
        register_converter(dict, "test.dict", dict, dict)


def test_paths_are_typed_and_shown_dotted():
    tree = capture({"model": [{"w": 1}], 2: (None,)}).tree
    assert [path for path, _ in leaves_of(tree)] == [("model", 0, "w"), (2, 0)]
    assert [format_path(path) for path, _ in leaves_of(tree)] == ["model.0.w", "2.0"]


STATE = {"model": {"a": {"w": 1, "b": 2}, "c": {"w": 3}}, "log": [{"w": 4}, 5], "pair": (6, {"w": 7}), "step": 8}


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("*", STATE),
        ("model.*", {"model": STATE["model"]}),
        ("model", {"model": STATE["model"]}),
        ("model.*.w", {"model": {"a": {"w": 1}, "c": {"w": 3}}}),
        ("*.b", {"model": {"a": {"b": 2}}}),
        ("log.0.w", {"log": STATE["log"]}),
        (["pair.1*", "step"], {"pair": STATE["pair"], "step": 8}),
    ],
)
def test_only_returns_nested_dicts_and_sequences_whole(only, expected):
    assert difference(round_trip(STATE, only=only), expected) is None


def test_only_without_match_is_reported():
    with pytest.raises(NotFoundError, match="no leaf"):
        round_trip(STATE, only="model.z*")
    with pytest.raises(UsageError, match="glob"):
        Selection([])


NOTHING = ValueNode("none", None)


@pytest.mark.parametrize(
    "tree",
    [
        TensorNode(1),
        TensorNode(-1),
        DictNode("dict", ("a", "a"), (NOTHING, NOTHING)),
        DictNode("dict", ("a",), ()),
        DictNode("set", (), ()),
        DictNode("defaultdict", (), (), None, "eval"),
        DictNode("defaultdict", (), ()),
        DictNode("dict", (), (), None, "int"),
        DictNode("dict", (), (), NOTHING),
        DictNode("OrderedDict", (), (), TensorNode(5)),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_invalid_trees_are_refused(tree):
    for held in (tree, ListNode((tree,)), TupleNode((tree,)), ConvertedNode("x", tree)):
        with pytest.raises(MalformedError):
            check_tree(held, 1)


def test_too_deep_tree_is_refused_without_overflow():
    node = NOTHING
    for _ in range(DEPTH_MAX + 2):
        node = ListNode((node,))
    with pytest.raises(MalformedError, match="deep"):
        check_tree(node, 0)


@given(
    st.sampled_from(["none", "bool", "int", "bigint", "float", "complex", "str", "surrogates", "bytes"]),
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(max_size=20)),
)
def test_values_are_decoded_with_right_type_or_refused(kind, value):
    node = ValueNode(kind, value)
    try:
        made = decode_plain(node)
    except MalformedError:
        return
    again = encode_plain(made)
    assert again is not None
    assert difference(decode_plain(again), made) is None


def test_an_unknown_type_of_value_is_unsupported():
    for kind in ("quaternion", "torch.dtype", "os.system"):
        with pytest.raises(UnsupportedError):
            prepare_restore(ValueNode(kind, "x"), [], [])


def test_tree_and_specs_need_neither_numpy_nor_torch():
    modules = "ckstore.format.tree, ckstore.format.tensors, ckstore.state.tensors, ckstore.state.values"
    script = f"import sys, {modules}; print({{'numpy', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@dataclasses.dataclass(eq=False)
class Place:
    row: int = 0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((math.nan, float("nan")), "nan"),
        ((complex(math.nan, 1), complex(math.nan, 1)), r"\(nan\+1j\)"),
        (((1, float("nan")), (1, float("nan"))), r"\(1, nan\)"),
        ((Place(3), Place(4), Place(3)), r"Place\("),
        ((frozenset([Place(1)]), frozenset([Place(1)])), "frozenset"),
    ],
)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_colliding_keys_are_refused_by_path(keys, expected, kind):
    with pytest.raises(UsageError, match=expected) as caught:
        capture({"log": [kind((key, number) for number, key in enumerate(keys))]})
    assert caught.value.path[:2] == ("log", 0)
    assert len(set(capture({"log": kind([(keys[0], 1), (0.5, 2)])}).tree.children[0].keys)) == 2
