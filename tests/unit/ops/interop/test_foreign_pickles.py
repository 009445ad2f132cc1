"""Protects the import of pickles: items, arguments and keys of objects are imported, or listed as left out."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle

import numpy as np
import pytest
import torch

from ckstore.errors import UnsupportedError
from support.states import difference

PAIRS = [(1, "a"), (1, "b")]


class Rows(list):
    """A list subclass."""


class ItemsAndAttributes(dict):
    """A dict whose items are also attributes, such as ``options.rate``."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = dict(items)


class WithArguments:
    """An object that is created with arguments and then given a state."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return WithArguments, self.arguments, {"x": 3}


class Opaque:
    """An object whose state is not a dict of fields."""

    def __reduce__(self):
        return Opaque, (), [1, 2]


class Kind(enum.Enum):
    TRAIN = "train"
    PAIR = (1, 2)


@pytest.fixture(params=["pickle", "torch"])
def imported(request, store, tmp_path):
    """Import a state from a file, and return the restored state and the entry of the report."""

    def do(state, protocol=pickle.DEFAULT_PROTOCOL):
        file = tmp_path / ("step_1.pkl" if request.param == "pickle" else "step_1.pt")
        if request.param == "pickle":
            file.write_bytes(pickle.dumps({"step": 1, **state}, protocol))
        else:
            torch.save({"step": 1, **state}, file)
        report = store.import_from(file)
        restored = store.restore(1)
        del restored["step"]
        return restored, report.entries[0]

    return do


@pytest.mark.parametrize(
    ("filled", "wanted"),
    [
        (collections.deque(PAIRS, maxlen=7), collections.deque(PAIRS, maxlen=7)),
        (collections.deque([[1, 2]] * 3), collections.deque([[1, 2]] * 3)),
        (Rows(PAIRS), PAIRS),
        (Rows([(1, 2), (1, 3), "x"]), [(1, 2), (1, 3), "x"]),
        (Rows([Rows(PAIRS)]), [PAIRS]),
        (collections.defaultdict(list, a=PAIRS), collections.defaultdict(list, a=PAIRS)),
        (collections.defaultdict(int), collections.defaultdict(int)),
    ],
)
def test_appended_items_and_set_pairs_are_imported(imported, filled, wanted):
    restored, entry = imported({"buf": filled})
    assert difference(restored, {"buf": wanted}) is None
    assert not entry.left_out


@pytest.mark.parametrize("protocol", range(2, 6))
def test_queues_of_every_protocol_keep_content_and_maxlen(store, tmp_path, protocol):
    state = {"step": 1, "queue": collections.deque(PAIRS, maxlen=2), "none": collections.deque()}
    (tmp_path / "step_1.pkl").write_bytes(pickle.dumps(state, protocol))
    store.import_from(tmp_path / "step_1.pkl")
    assert difference(store.restore(1), state) is None


def test_deques_and_defaultdicts_keep_maxlen_and_factory(store, tmp_path):
    queue = collections.deque([torch.ones(1)], maxlen=3)
    state = {"queue": queue, "dict": collections.defaultdict(dict, w=torch.ones(2)), "rows": Rows([torch.ones(3)])}
    torch.save(state, tmp_path / "step_1.pt")
    report = store.import_from(tmp_path / "step_1.pt")
    assert difference(store.restore(1), state | {"rows": [torch.ones(3)]}) is None
    assert len(report.entries[0].warnings) == 1
    assert not report.is_partial


@pytest.mark.parametrize("item", [Opaque(), [Opaque()], {"in": (1, Opaque())}, {1, Opaque()}, {Opaque(): 1}])
def test_object_that_needs_code_is_refused_by_path(imported, item):
    with pytest.raises(UnsupportedError, match=r"cannot be stored.*here.*--skip-leaf here"):
        imported({"here": item})


def test_object_in_a_queue_is_refused_by_queue_path(imported):
    with pytest.raises(UnsupportedError, match=r"here: .*--skip-leaf here,"):
        imported({"here": collections.deque([1, Opaque()])})


@pytest.mark.parametrize("arguments", [(42,), (None, "a"), ({"deep": [1]},)])
@pytest.mark.parametrize("place", ["here", "in.0"])
def test_arguments_besides_a_state_are_listed(imported, arguments, place):
    made = WithArguments(*arguments)
    restored, entry = imported({"here": made} if place == "here" else {"in": [made]})
    assert restored == ({"here": {"x": 3}} if place == "here" else {"in": [{"x": 3}]})
    assert list(entry.left_out) == [place]
    assert "arguments with which" in entry.left_out[place]
    assert "WithArguments" in entry.left_out[place]


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        ([WithArguments(1), collections.deque([1])], ["k.0"]),
        ((Rows([Rows()]), WithArguments(2)), ["k.1"]),
        (Rows([1, WithArguments(3)]), ["k"]),
        (collections.deque([Rows()], maxlen=4), []),
    ],
)
def test_only_lost_arguments_are_listed(imported, state, lost):
    _, entry = imported({"k": state})
    assert list(entry.left_out) == lost


def test_items_that_are_attributes_are_imported_once(store, tmp_path):
    torch.save({"k": ItemsAndAttributes(a=[1], b=2), "n": 1}, tmp_path / "step_1.pt")
    store.import_from(tmp_path / "step_1.pt")
    assert difference(store.restore(1), {"k": {"a": [1], "b": 2}, "n": 1}) is None


def test_lost_factory_is_listed(imported):
    restored, entry = imported({"d": collections.defaultdict(collections.Counter, a=1)})
    assert restored == {"d": {"a": 1}}
    assert list(entry.left_out) == ["d"]


@pytest.mark.parametrize(
    ("keyed", "wanted"),
    [
        ({(0, 1): 0.3, None: 1, 0.5: 2, True: 3}, {(0, 1): 0.3, None: 1, 0.5: 2, True: 3}),
        (collections.Counter({(0, 1): 3}), collections.Counter({(0, 1): 3})),
        ({Kind.TRAIN: 1, (Kind.PAIR, 2): 2}, {"train": 1, ((1, 2), 2): 2}),
        ({datetime.date(2024, 1, 2): [Kind.PAIR]}, {datetime.date(2024, 1, 2): [(1, 2)]}),
    ],
)
def test_keys_of_any_kind_are_kept(imported, keyed, wanted):
    restored, entry = imported({"k": keyed})
    assert difference(restored, {"k": wanted}) is None
    assert not entry.left_out


def test_tensors_below_enum_keys_are_kept(store, tmp_path):
    torch.save({"k": {Kind.TRAIN: torch.ones(2), Kind.PAIR: {"w": torch.zeros(1)}}}, tmp_path / "step_1.pt")
    report = store.import_from(tmp_path / "step_1.pt")
    wanted = {"k": {"train": torch.ones(2), (1, 2): {"w": torch.zeros(1)}}}
    assert difference(store.restore(1), wanted) is None
    assert "k has objects for keys" in report.entries[0].warnings[0]


def test_keys_that_would_collide_are_refused(imported):
    with pytest.raises(UnsupportedError, match="--skip-leaf k"):
        imported({"k": {Kind.TRAIN: 1, "train": 2}})


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "leaf",
    [
        datetime.date(2024, 1, 2),
        datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.timezone.utc),
        datetime.timedelta(1, 2, 3),
        1 + 2j,
        range(0, 3),
        slice(1, None),
        bytearray(b"\xff"),
        fractions.Fraction(1, 3),
        decimal.Decimal("1.50"),
        frozenset({1, (2, "a")}),
        {frozenset({1}), 2},
        b"\xff",
        b"",
        bytearray(),
        set(),
        frozenset(),
    ],
)  # fmt: skip
def test_python_leaves_are_imported(store, tmp_path, leaf, protocol):
    (tmp_path / "step_1.pkl").write_bytes(pickle.dumps({"step": 1, "leaf": [leaf]}, protocol))
    report = store.import_from(tmp_path / "step_1.pkl")
    assert difference(store.restore(1), {"step": 1, "leaf": [leaf]}) is None
    assert not report.entries[0].warnings


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([True, False]),
        np.array([1, 2], ">i4"),
        np.zeros((0, 3)),
        np.array(2.5),
        np.float32(1.5),
        np.int64(3),
    ],
)
def test_arrays_of_every_protocol_are_imported(store, tmp_path, array, protocol):
    (tmp_path / "step_1.pkl").write_bytes(pickle.dumps({"step": 1, "array": array}, protocol))
    store.import_from(tmp_path / "step_1.pkl")
    assert difference(store.restore(1)["array"], array) is None


@pytest.mark.parametrize("leaf", [datetime.date(2024, 1, 2), 1 + 2j, range(3), decimal.Decimal("0.1"), frozenset({1})])
def test_python_leaves_in_torch_files_are_imported(store, tmp_path, leaf):
    torch.save({"leaf": [leaf], "w": torch.ones(1)}, tmp_path / "step_1.pt")
    report = store.import_from(tmp_path / "step_1.pt")
    assert difference(store.restore(1), {"leaf": [leaf], "w": torch.ones(1)}) is None
    assert not report.entries[0].warnings


@pytest.mark.parametrize(
    ("item", "form"),
    [
        (Kind.TRAIN, "type str"),
        (Kind.PAIR, "type tuple"),
        (pathlib.Path(), "type str"),
        (pathlib.Path("a"), "type str"),
    ],
)
def test_notes_name_the_stored_form(imported, item, form):
    _, entry = imported({"here": item})
    assert f"it is stored as a plain value of {form}." in entry.warnings[0]
