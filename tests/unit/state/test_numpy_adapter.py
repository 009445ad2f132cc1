"""Protects numpy leaves: every dtype, stride and shared byte is restored; specs from disk are checked."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ckstore
from ckstore.errors import CapacityError, CkstoreError, LeafTypeError, MalformedError, UnsupportedError, UsageError
from ckstore.format.tensors import StorageSpec, TensorSpec, is_dense, overlaps_itself
from ckstore.format.tree import TensorNode, ValueNode
from ckstore.state.capture import GAP_NBYTES_MAX, capture
from ckstore.state.memory import allocate
from ckstore.state.numpy_adapter import dtype_name, dtype_named
from ckstore.state.placement import prepare_restore
from support.states import CopiedState, difference, round_trip

SIMPLE = ["?", "i1", "u1", "<i2", ">i2", "<u4", ">i8", "<f2", ">f2", "<f4", ">f4", "<f8", "<c8", ">c16", "S3", "<U2"]
DTYPES = [np.dtype(name) for name in [*SIMPLE, "V5", "V0", "U0", "M8[ns]", "<M8[25s]", "m8[D]", "M8", np.longdouble]]
PAIR = np.dtype({"names": ["b", "a"], "formats": ["<f4", ">i2"], "offsets": [8, 1], "itemsize": 16})
STRUCTURED = [
    PAIR,
    np.dtype([("x", "f4", (2, 3)), ("y", PAIR), ("z", "U4")]),
    np.dtype([("x", "i1"), ("y", "f8")], align=True),
    np.dtype([(("a title", "x"), "f4"), ("y", "i8")]),
    np.dtype([]),
]


def _random(dtype, count=12):
    return np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, np.uint8).tobytes()


def _array(dtype, shape=(3, 4)):
    count = int(np.prod(shape))
    return np.ndarray(shape, dtype, bytearray(_random(dtype, count)))


@pytest.mark.parametrize("dtype", [*DTYPES, *STRUCTURED], ids=str)
def test_every_dtype_without_objects_comes_back_bit_for_bit(dtype):
    array = _array(dtype)
    back = round_trip({"a": array})["a"]
    assert back.dtype == dtype
    assert back.dtype.isalignedstruct == dtype.isalignedstruct
    assert (back.shape, back.strides, back.tobytes()) == (array.shape, array.strides, array.tobytes())


@pytest.mark.parametrize(
    "dtype", [d for d in [*DTYPES, PAIR, *STRUCTURED[2:]] if d.itemsize and d.kind != "U"], ids=str
)
def test_scalars_of_every_dtype_come_back(dtype):
    scalar = _array(dtype)[0, 0]
    back = round_trip([scalar])[0]
    assert type(back) is type(scalar)
    assert back.dtype == scalar.dtype
    # Bytes between the fields are padding. The fields are compared one by one.
    assert [back[name].tobytes() for name in dtype.names or ()] == [
        scalar[name].tobytes() for name in dtype.names or ()
    ]
    assert dtype.names is not None or back.tobytes() == scalar.tobytes()


@pytest.mark.parametrize("scalar", [np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.bytes_(b"")])
def test_text_scalars_keep_their_zeros(scalar):
    back = round_trip([scalar])[0]
    assert type(back) is type(scalar)
    assert (len(back), back) == (len(scalar), scalar)


@given(st.data())
def test_any_view_comes_back_with_its_strides(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    base = _array(dtype, data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
    view = base[data.draw(hnp.basic_indices(base.shape, allow_newaxis=True, allow_ellipsis=True))]
    assume(isinstance(view, np.ndarray))
    view = view.transpose(data.draw(st.permutations(range(view.ndim))))
    assert difference(round_trip([view]), [view]) is None


@given(st.data())
def test_views_of_one_array_share_memory_again(data):
    base = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    views = [base[data.draw(hnp.basic_indices(base.shape))] for _ in range(3)]
    assume(all(isinstance(view, np.ndarray) and view.size for view in views))
    captured = capture(views)
    assert len(captured.storages) == 1
    assert captured.nbytes <= base.nbytes
    back = round_trip(views)
    assert difference(back, views) is None
    for one in range(3):
        for other in range(3):
            expected = np.shares_memory(views[one], views[other])
            assert np.shares_memory(back[one], back[other]) == expected


def _two_widths(nbytes, middle, head, tail):
    raw = np.frombuffer(bytearray(_random(np.dtype(np.uint8), nbytes)), np.uint8)
    return [raw[:middle].view(head), raw[middle:].view(tail)]


RECORDS = np.ndarray((7,), np.dtype([("x", "i1"), ("y", "<f8")]), bytearray(range(63)))


@pytest.mark.parametrize(
    "views",
    [
        _two_widths(402, 400, "<f4", "u1"),
        _two_widths(402, 400, "<f4", "<i2"),
        _two_widths(812, 800, "<c16", "<i4"),
        _two_widths(403, 400, "<U2", "u1"),
        # Whole elements, but not aligned to the start of the span.
        _two_widths(404, 4, "u1", "<f8"),
        _two_widths(402, 2, "<i2", "<f4"),
        [RECORDS["y"]],
        [RECORDS["y"][::-2]],
        [RECORDS["x"], RECORDS["y"]],
    ],
)
def test_views_of_mixed_widths_are_stored_as_bytes(views, tmp_path):
    (storage,) = capture(views).storages
    assert (storage.element_width, storage.is_float) == (1, False)
    with ckstore.open(tmp_path / "store") as store:
        store.commit(views, step=1)
        assert difference(store.restore(), views) is None


def test_captured_bytes_are_the_arrays_own_memory():
    array = np.zeros(1000, np.float32)
    storage = capture(array).storages[0]
    before = storage.read(0, 4)
    array[0] = 1
    assert bytes(before) == np.float32(1).tobytes()
    assert before.readonly
    assert (storage.nbytes, storage.element_width, storage.is_float) == (4000, 4, True)


def test_unusual_array_layouts_come_back():
    frozen = np.arange(6.0)
    frozen.flags.writeable = False
    state = [
        frozen,
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.broadcast_to(np.int32(7), (1000, 1000)),
        np.arange(10)[::-3],
        np.array(5),
        np.zeros((0, 3)),
    ]
    captured = capture(state)
    assert captured.nbytes < 400
    back = round_trip(state)
    assert difference(back, state) is None
    assert back[0].flags.writeable


def test_the_same_array_twice_is_one_object_again():
    array = np.arange(3)
    back = round_trip({"a": array, "b": [array]})
    assert back["a"] is back["b"][0]


def test_gap_between_distant_views_is_not_stored():
    base = np.zeros(10 * GAP_NBYTES_MAX, np.uint8)
    captured = capture({"head": base[:10], "tail": base[-10:]})
    assert [storage.nbytes for storage in captured.storages] == [10, 10]


def test_sparse_view_is_stored_as_its_span_with_warning():
    captured = capture({"column": np.zeros((1 << 12, 1 << 12), np.uint16)[:, 0]})
    assert captured.nbytes == (1 << 25) - (1 << 13) + 2
    assert "column is a sparse view" in captured.warnings[0]


def test_storages_come_in_the_order_of_the_tree():
    arrays = [np.full(size, size, np.uint8) for size in (5, 3, 9, 1)]
    assert [storage.nbytes for storage in capture(arrays).storages] == [5, 3, 9, 1]


@pytest.mark.parametrize(
    "leaf",
    [
        np.array([object()]),
        np.zeros(2, np.dtype([("x", object)])),
        np.ma.array([1, 2]),
        np.rec.array([(1,)], dtype=[("x", int)]),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_arrays_of_objects_and_subclasses_are_refused_by_path(leaf):
    with pytest.raises(LeafTypeError) as caught:
        capture({"a": {"b": leaf}})
    assert caught.value.path == ("a", "b")


@given(st.text(max_size=30))
def test_dtype_names_are_resolved_or_refused(name):
    try:
        dtype = dtype_named(name)
    except CkstoreError:
        return
    assert dtype_name(dtype) == name


@pytest.mark.parametrize(
    "name",
    [
        *("O", "|O", "<f4,<i4", "float32", "f4", "<f3", "{", "{}", "<U99999999999", "(2,)f4"),
        '{"base":"<f4","shape":[-1]}',
        '{"names":["x"],"formats":["|O"],"offsets":[0],"titles":[null],"itemsize":8,"aligned":false}',
        *("{" * 5000, '{"base":' * 5000),
    ],
    ids=lambda name: name[:20],
)
def test_hostile_dtype_names_are_refused(name):
    with pytest.raises((MalformedError, UnsupportedError)):
        dtype_named(name)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("numpy.<f4", b"123"), ("numpy.<f4", "1234"), ("numpy.O", b"12345678"), ("numpy.", b""), ("numpy.str_", b"\xff")],
)
def test_hostile_scalars_are_refused(kind, value):
    with pytest.raises((MalformedError, UnsupportedError)):
        prepare_restore(ValueNode(kind, value), [], [])


def _prepare(nbytes=48, **changes):
    spec = {"library": "numpy", "dtype": "<f4", "shape": (3, 4), "strides": (16, 4), "storage": 0, "offset": 0}
    return prepare_restore(TensorNode(0), [TensorSpec(**{**spec, **changes})], [StorageSpec(nbytes, 4, True, ())])


@pytest.mark.parametrize(
    "changes",
    [
        {"nbytes": 47},
        {"offset": 4},
        {"offset": -4},
        {"offset": 1 << 70},
        {"strides": (-16, 4)},
        {"strides": (16, 8)},
        {"strides": (16,)},
        {"strides": (1 << 80, 4)},
        {"shape": (3, -4)},
        {"shape": (1 << 61, 4), "strides": (0, 0)},
        {"shape": (1 << 40, 1 << 40), "strides": (0, 0)},
        {"shape": (1,) * 65, "strides": (0,) * 65},
        {"storage": 1},
        {"storage": -1},
        {"dtype": "|O"},
        {"is_parameter": True},
        {"library": "bytes"},
    ],
    ids=repr,
)
def test_invalid_specs_are_refused(changes):
    assert _prepare() is not None
    with pytest.raises(MalformedError):
        _prepare(**changes)


@given(
    st.lists(st.integers(-2, 6), max_size=3).map(tuple),
    st.lists(st.integers(-40, 40), max_size=3).map(tuple),
    st.integers(-10, 60),
)
def test_no_spec_from_disk_reaches_outside_its_storage(shape, strides, offset):
    try:
        placement = _prepare(shape=shape, strides=strides, offset=offset)
    except MalformedError:
        return
    placement.destination(0)[:] = bytes(48)
    placement.complete(0)
    assert placement.finish().tobytes() == bytes(4 * int(np.prod(shape)))


def test_an_unknown_library_is_unsupported():
    with pytest.raises(UnsupportedError, match="jax"):
        _prepare(library="jax")


def test_memory_shortage_is_a_capacity_error():
    with pytest.raises(CapacityError):
        allocate(1 << 62)
    with pytest.raises(CapacityError):
        allocate(1 << 80)


@pytest.mark.parametrize(("nbytes", "align"), [(1, 64), (1 << 20, 4096), ((1 << 20) + 5, 4096)])
def test_memory_is_aligned(nbytes, align):
    memory = allocate(nbytes)
    assert memory.nbytes == nbytes
    assert memory.__array_interface__["data"][0] % align == 0


@given(
    st.lists(st.integers(1, 3), max_size=3).flatmap(
        lambda shape: st.tuples(st.just(shape), st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    )
)
def test_dense_and_overlapping_match_a_byte_count(layout):
    shape, strides = layout
    touched = [sum(step * at for step, at in zip(strides, index, strict=True)) for index in np.ndindex(*shape)]
    touched = [start + byte for start in touched for byte in range(2)]
    is_clean = len(set(touched)) == len(touched)
    if is_clean and is_dense(tuple(shape), tuple(strides), 2):
        assert set(touched) == set(range(max(touched) + 1))
    if not is_clean:
        assert overlaps_itself(tuple(shape), tuple(strides), 2)


def test_kept_state_is_independent_of_its_source():
    array = np.arange(4)
    kept = CopiedState.of(capture(array))
    array[:] = 0
    assert kept.fill(kept.place()).tolist() == [0, 1, 2, 3]


def test_only_selects_the_whole_list_of_an_array():
    state = {"layers": [np.arange(3), np.arange(4)], "other": np.arange(5)}
    kept = CopiedState.of(capture(state))
    placement = kept.place(only="layers.0")
    assert len(placement.storages) == 2
    assert difference(kept.fill(placement), {"layers": state["layers"]}) is None


def test_device_is_ignored_for_arrays():
    assert round_trip(np.arange(2), device="cuda").tolist() == [0, 1]
    with pytest.raises(UsageError, match="read-only"):
        round_trip(np.arange(2), into=np.broadcast_to(np.arange(2), (2,)))
