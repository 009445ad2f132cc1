"""Protects torch leaves: dtypes, strides, ties and flags are restored bit for bit; others are refused by path."""

import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ckstore.errors import BackendError, LeafTypeError, MalformedError, UnsupportedError, UsageError
from ckstore.format.tensors import StorageSpec, TensorSpec
from ckstore.format.tree import TensorNode, ValueNode
from ckstore.state import torch_adapter
from ckstore.state.capture import capture
from ckstore.state.placement import libraries_needed, prepare_restore
from ckstore.state.torch_adapter import DTYPES, DeviceBytes, TorchAdapter
from support.states import CopiedState, difference
from support.states import round_trip as round_trip_with

ADAPTERS = (TorchAdapter(),)
ALL_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
QUANTIZED = {"torch.qint8", "torch.quint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4"}


def round_trip(state, **options):
    return round_trip_with(state, adapters=ADAPTERS, **options)


def _noise(dtype, shape=(5, 3), seed=1):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, np.uint8))
    steps = torch.empty(shape, device="meta").stride()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, steps)


def _words(tensor):
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.dtype.itemsize)
    return torch.view_as_real(tensor).view(torch.int64) if words is None else tensor.view(words)


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_torch_dtype_comes_back_bit_for_bit(name):
    dtype = getattr(torch, name.removeprefix("torch."))
    if name in QUANTIZED:
        assert name.removeprefix("torch.") not in DTYPES
        return
    tensor = _noise(dtype)
    state = {"a": tensor, "t": tensor.t(), "scalar": _noise(dtype, ()), "empty": _noise(dtype, (0, 3)), "d": dtype}
    back = round_trip(state)
    assert difference(back, state) is None
    assert back["a"].untyped_storage().data_ptr() == back["t"].untyped_storage().data_ptr()
    target = {"a": _noise(dtype, seed=2)}
    held = target["a"]
    assert round_trip({"a": tensor}, into=target)["a"] is held
    assert difference(target, {"a": tensor}) is None
    target = {"a": _noise(dtype, (3, 5), seed=3).t()}
    round_trip({"a": tensor}, into=target)
    assert target["a"].stride() == (1, 5)
    assert _words(target["a"]).tolist() == _words(tensor).tolist()


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_refused_by_path():
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(LeafTypeError, match="quantized") as caught:
        capture({"model": [quantized]}, ADAPTERS)
    assert caught.value.path == ("model", 0)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(3).to_sparse(), "sparse"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.ones(3).as_subclass(Marked), "subclass"),
        (lambda: torch.nn.UninitializedParameter(), "subclass"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
    ids=["sparse", "meta", "subclass", "uninitialized", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_tensors_without_plain_memory_are_refused_by_path(make, why):
    with pytest.raises(LeafTypeError, match=why) as caught:
        capture({"a": make()}, ADAPTERS)
    assert caught.value.path == ("a",)


def test_a_tensor_whose_storage_was_freed_is_refused():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(LeafTypeError, match="freed"):
        capture(tensor, ADAPTERS)


def test_values_of_torch_come_back_with_their_types():
    state = [torch.bfloat16, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 3]), torch.Size([]), (2, 3)]
    assert difference(round_trip(state), state) is None


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda data, requires_grad: data.requires_grad_(requires_grad)])
def test_parameters_keep_requires_grad(kind, wants):
    tensor = kind(torch.ones(3), requires_grad=wants)
    back = round_trip(tensor)
    assert difference(back, tensor) is None
    assert back.is_leaf


def test_tied_parameters_views_and_offsets_come_back_tied():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "b": torch.nn.Linear(3, 4)})
    model["b"].weight = model["a"].weight
    flat = torch.arange(10.0)
    state = {"model": model.state_dict(), "flat": flat, "tail": flat[5:], "same": flat, "odd": flat[1::3]}
    captured = capture(state, ADAPTERS)
    assert captured.nbytes == 4 * (12 + 4 + 4 + 10)
    back = round_trip(state)
    assert difference(back, state) is None
    assert back["model"]["a.weight"].data_ptr() == back["model"]["b.weight"].data_ptr()
    assert back["same"] is back["flat"]
    back["flat"][7] = -1
    assert back["tail"][2] == -1
    assert back["odd"][2] == -1
    assert back["tail"].storage_offset() == 5


def test_views_of_different_dtypes_share_their_bytes_again():
    raw = torch.arange(64, dtype=torch.uint8)
    state = {"byte": raw[3:4], "word": raw[4:12].view(torch.float32), "wide": raw[16:32].view(torch.complex128)}
    back = round_trip(state)
    assert difference(back, state) is None
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 1


def test_torch_and_numpy_views_of_one_memory_share_it_again():
    tensor = torch.arange(6.0)
    state = {"torch": tensor, "numpy": tensor.numpy()[2:], "odd": torch.from_numpy(tensor.numpy()[1:])}
    assert capture(state, ADAPTERS).nbytes == 24
    back = round_trip(state)
    assert difference(back, state) is None
    back["torch"][3] = 9
    assert back["numpy"][1] == 9
    assert back["odd"][2] == 9


@given(st.data())
def test_any_view_comes_back_with_its_strides(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start = data.draw(st.integers(0, tensor.shape[dim]))
        tensor = tensor.narrow(dim, start, data.draw(st.integers(0, tensor.shape[dim] - start)))
    if data.draw(st.booleans()):
        tensor = tensor.expand(2, *tensor.shape)
    assert difference(round_trip([tensor]), [tensor]) is None
    target = torch.zeros(tensor.shape, dtype=torch.int32)
    assert round_trip([tensor], into=[target])[0] is target
    assert torch.equal(target, tensor)


def test_conjugate_and_negative_views_keep_their_values():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": tensor.conj(), "neg": tensor.conj().imag}
    assert state["neg"].is_neg()
    back = round_trip(state)
    assert torch.equal(back["conj"], state["conj"])
    assert torch.equal(back["neg"], state["neg"])
    with pytest.raises(UsageError, match="lazy conjugate"):
        round_trip({"a": tensor}, into={"a": tensor.conj()})


def test_host_tensors_are_not_copied():
    tensor = torch.zeros(100, dtype=torch.bfloat16)
    storage = capture(tensor, ADAPTERS).storages[0]
    view = storage.read(0, 2)
    tensor[0] = 1
    assert bytes(view) == b"\x80\x3f"
    assert (storage.element_width, storage.is_float) == (2, True)


def test_restored_tensors_can_be_trained_on():
    back = round_trip({"w": torch.nn.Parameter(torch.ones(3))})["w"]
    (back * 2).sum().backward()
    assert back.grad.tolist() == [2, 2, 2]


def test_random_states_come_back():
    state = {"torch": torch.get_rng_state()}
    first = torch.rand(3)
    torch.set_rng_state(round_trip(state)["torch"])
    assert torch.equal(torch.rand(3), first)


def test_device_is_checked_and_meta_is_refused():
    assert round_trip(torch.ones(2), device="cpu").device.type == "cpu"
    for device in ("meta", "nonsense", 3.5):
        with pytest.raises(UsageError):
            round_trip(torch.ones(2), device=device)


def test_torch_values_without_adapter_are_unsupported():
    for state in (torch.ones(1), torch.float32):
        kept = CopiedState.of(capture(state, ADAPTERS))
        assert libraries_needed(kept.tree, kept.tensors) == {"torch"}
        with pytest.raises(UnsupportedError, match="torch"):
            kept.place()


def _prepare(nbytes=48, **changes):
    spec = {"library": "torch", "dtype": "float32", "shape": (3, 4), "strides": (4, 1), "storage": 0, "offset": 0}
    storages = [StorageSpec(nbytes, 4, True, ())]
    return prepare_restore(TensorNode(0), [TensorSpec(**{**spec, **changes})], storages, adapters=ADAPTERS)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"nbytes": 47}, MalformedError),
        ({"offset": 1}, MalformedError),
        ({"strides": (5, 1)}, MalformedError),
        ({"strides": (-4, 1)}, MalformedError),
        ({"strides": (1 << 61, 1)}, MalformedError),
        ({"shape": (1 << 62, 1), "strides": (0, 0)}, MalformedError),
        ({"dtype": "float32 "}, UnsupportedError),
        ({"dtype": "qint8"}, UnsupportedError),
        ({"dtype": "ones"}, UnsupportedError),
        ({"dtype": "load"}, UnsupportedError),
        ({"dtype": "int32", "requires_grad": True}, MalformedError),
        ({"dtype": ""}, UnsupportedError),
    ],
    ids=repr,
)
def test_impossible_specs_from_disk_are_refused(changes, error):
    assert _prepare() is not None
    with pytest.raises(error):
        _prepare(**changes)


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.integers(-10, 60),
)
def test_no_spec_from_disk_reaches_outside_its_storage(dtype, shape, strides, offset):
    try:
        placement = _prepare(dtype=dtype, shape=shape, strides=strides, offset=offset)
    except MalformedError:
        return
    placement.destination(0)[:] = bytes(48)
    placement.complete(0)
    made = placement.finish()
    assert (made.shape, made.stride(), str(made.dtype)) == (shape, strides, f"torch.{dtype}")
    assert made.untyped_storage().nbytes() <= 48


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("torch.dtype", "ones"),
        ("torch.dtype", b"float32"),
        ("torch.device", "nonsense:0"),
        ("torch.Size", "1,x"),
        ("torch.Size", "-1"),
        ("torch.Size", "9999999999999999999"),
        ("torch.Size", "²"),
        ("torch.layout", "float32"),
        ("torch.qscheme", ""),
        ("torch.stream", "strided"),
    ],
)
def test_hostile_values_from_disk_are_refused(kind, value):
    with pytest.raises((MalformedError, UnsupportedError)):
        prepare_restore(ValueNode(kind, value), [], [], adapters=ADAPTERS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_tensors_are_read_in_slices():
    flat = torch.arange(100_000, dtype=torch.float32, device="cuda")
    state = {"flat": flat, "tail": flat[7:], "t": flat[:6].view(2, 3).t(), "half": flat[:10].bfloat16()}
    on_host = round_trip(state)
    assert torch.equal(on_host["flat"], flat.cpu())
    assert on_host["flat"].device.type == "cpu"
    back = round_trip(state, device="cuda")
    assert difference(back, state) is None
    assert back["flat"].untyped_storage().data_ptr() == back["tail"].untyped_storage().data_ptr()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target["flat"], target["tail"] = torch.zeros_like(flat), torch.zeros_like(flat[7:])
    held = target["flat"]
    assert round_trip(state, into=target)["flat"] is held
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_shrunk_device_storage_is_not_read():
    storage = torch.arange(100, dtype=torch.uint8).untyped_storage()
    read = DeviceBytes(storage, storage.data_ptr(), torch.device("cpu"))
    storage.resize_(60)
    read.start = storage.data_ptr()
    with pytest.raises(BackendError, match="resized"):
        read(read.start + 40, read.start + 100)
    assert storage.nbytes() == 60


def test_failed_device_read_has_its_own_error(monkeypatch):
    def fail(held):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch_adapter, "copy_to_host", fail)
    storage = torch.arange(100, dtype=torch.uint8).untyped_storage()
    with pytest.raises(BackendError, match="copying from a device failed: CUDA error: an illegal memory access"):
        DeviceBytes(storage, storage.data_ptr(), torch.device("cpu"))(storage.data_ptr(), storage.data_ptr() + 9)


def test_importing_ckstore_does_not_import_torch():
    import subprocess

    script = "import sys, ckstore.state.placement, ckstore.state.capture; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=5), st.sampled_from([1, 2, 4]))
def test_overlapping_views_share_exactly_what_they_shared(ranges, width):
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[width]
    base = torch.arange(40).to(dtype)
    views = [base[start : start + length] for start, length in ranges]
    assume(all(view.numel() for view in views))
    back = round_trip(views)
    assert difference(back, views) is None
    for one, here in zip(views, back, strict=True):
        for other, there in zip(views, back, strict=True):
            if abs(one.data_ptr() - other.data_ptr()) < 40:
                assert one.data_ptr() - other.data_ptr() == here.data_ptr() - there.data_ptr()


@pytest.mark.parametrize(
    ("nbytes", "middle", "head", "tail"),
    [
        (402, 400, torch.float32, torch.uint8),
        (402, 400, torch.float32, torch.int16),
        (404, 400, torch.int64, torch.bfloat16),
        (808, 800, torch.complex128, torch.bool),
    ],
)
def test_views_of_two_widths_in_one_storage_come_back(nbytes, middle, head, tail):
    raw = torch.arange(nbytes, dtype=torch.uint8) % 2
    views = [raw[:middle].view(head), raw[middle:].view(tail)]
    (storage,) = capture(views, ADAPTERS).storages
    assert storage.nbytes % storage.element_width == 0
    back = round_trip(views)
    assert difference(back, views) is None
    assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()
