"""Protects lossy commits of device tensors: they store the same bits as commits of host tensors.

Without a GPU, host tensors play the device tensors.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore import Residual
from ckstore.config import KIB
from ckstore.delta.chain_reader import ChainReader
from ckstore.errors import BackendError, BoundError, CorruptError
from ckstore.quant.writer import LossyChunkWriter
from support.small_chunks import open_small
from support.synthetic_training import M, V, W, leaf, losses, lossy_policy

torch = pytest.importorskip("torch")

from ckstore.state import torch_adapter  # noqa: E402 - it imports torch

SHAPE = (300, 280)
COUNT = math.prod(SHAPE)
LOSSY = (W, M, V)
NEAR, SMALL = Residual.near(), Residual.small()


class Traffic:
    """Count the bytes that are copied from a device to the host."""

    def __init__(self, device):
        self.device, self.nbytes = device, 0

    @contextmanager
    def counted(self, monkeypatch):
        """Count copied bytes. On the CPU, treat every torch tensor as a device tensor."""
        copy = torch_adapter.copy_to_host

        def counting(held):
            self.nbytes += held.nbytes
            # A copy, as from a device.
            return memoryview(bytearray(copy(held)))

        with monkeypatch.context() as patched:
            patched.setattr(torch_adapter, "copy_to_host", counting)
            if self.device == "cpu":
                patched.setattr(torch_adapter, "device_of", lambda tensor: tensor.device)
            yield


class Training:
    """A simulated training with Adam. Gradients are a few directions with some noise, or only noise."""

    def __init__(self, device, seed=1, *, dtype=torch.float32, noise=0.05, shape=SHAPE):
        self.rng = np.random.default_rng(seed)
        self.device, self.dtype, self.noise, self.shape, self.steps = device, dtype, noise, shape, 0
        self.w = self.rng.standard_normal(shape) * 0.02
        self.m, self.v = np.zeros(shape), np.zeros(shape)
        self.sizes = np.exp(0.5 * (self.rng.standard_normal((shape[0], 1)) + self.rng.standard_normal((1, shape[1]))))

    def train(self, count=5):
        for _ in range(count):
            few = self.rng.standard_normal((self.shape[0], 4)) @ self.rng.standard_normal((4, self.shape[1])) / 2
            gradient = ((1 - self.noise) * few + self.noise * self.rng.standard_normal(self.shape)) * self.sizes * 1e-4
            self.m = 0.9 * self.m + 0.1 * gradient
            self.v = 0.95 * self.v + 0.05 * gradient**2
            self.w = self.w - self.m
            self.steps += 1
        return self

    def tensor(self, values):
        return torch.from_numpy(np.array(values, np.float32)).to(self.device).to(self.dtype)

    def state(self):
        entry = {"step": torch.tensor(float(self.steps)), "exp_avg": self.tensor(self.m)}
        entry["exp_avg_sq"] = self.tensor(self.v)
        group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}
        model = {"w": self.tensor(self.w), "bias": self.tensor(self.w[0])}
        return {"model": model, "optimizer": {"state": {0: entry}, "param_groups": [group]}, "epoch": 3}


def entry_of(state):
    """Return the moments of the one weight of a training."""
    return state["optimizer"]["state"][0]


def on_host(state):
    """Return the state in host memory, with the same strides as on the device."""
    moved = {}

    def move(part):
        if isinstance(part, torch.Tensor):
            return moved.setdefault(id(part), part.cpu())
        return {key: move(each) for key, each in part.items()} if isinstance(part, dict) else part

    return move(state)


def same_bits(one, other):
    """Whether two tensors have the same bytes, on any device."""
    return torch.equal(one.cpu().reshape(-1).view(torch.uint8), other.cpu().reshape(-1).view(torch.uint8))


@pytest.fixture(params=["pretended", "cuda"])
def device(request):
    """A real device, or the CPU, whose tensors then count as device tensors."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def traffic(device):
    return Traffic(device)


@pytest.fixture
def stores(tmp_path):
    """Two stores: one for device tensors, one for host tensors."""
    with ckstore.open(tmp_path / "one") as one, ckstore.open(tmp_path / "other") as other:
        yield one, other


@pytest.fixture
def commit_both(stores, traffic, monkeypatch):
    """Commit a state on a device and the same state on the host, and compare what they store."""

    def commit(state, step, fidelity=NEAR, **changes):
        policy = lossy_policy(fidelity, **changes)
        with traffic.counted(monkeypatch):
            receipt = stores[0].commit(state, step, policy=policy)
        beside = stores[1].commit(on_host(state), step, policy=policy)
        assert losses(stores[0]) == losses(stores[1])
        found, other = (store.restore(step) for store in stores)
        assert all(same_bits(leaf(found, path), leaf(other, path)) for path in LOSSY)
        for name in ("bytes_state", "bytes_written", "chunks_lossy", "chunks_derived", "worst_spike", "warnings"):
            assert getattr(receipt, name) == getattr(beside, name), name
        return receipt

    return commit


@pytest.mark.parametrize("noise", [0.05, 1.0], ids=["directions", "noise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fidelity", [NEAR, SMALL], ids=["near", "small"])
def test_device_history_is_stored_as_on_the_host(stores, commit_both, traffic, device, fidelity, dtype, noise):
    training = Training(device, dtype=dtype, noise=noise)
    for step in range(4):
        traffic.nbytes = 0
        assert commit_both(training.train().state(), step, fidelity).warnings == ()
        assert traffic.nbytes >= 3 * COUNT * dtype.itemsize, "all floats are copied to the host"
        assert set(losses(stores[0])) == (set(LOSSY) if step else set())
    assert stores[0].verify("decode").damage == []


@pytest.mark.parametrize(
    "changes",
    [
        {"verify_encoded": False},
        {"base_cache": "memory"},
        {"compression": "best", "threads": 1},
        {"delta": False},
    ],
    ids=str,
)
def test_every_policy_stores_as_on_the_host(stores, commit_both, device, changes):
    training = Training(device, noise=1.0)
    for step in range(3):
        commit_both(training.train().state(), step, **changes)
    assert stores[0].verify("decode").damage == []


def test_keyframes_are_exact(stores, commit_both, device):
    training = Training(device)
    for step in range(4):
        state = training.train().state()
        commit_both(state, step, replace(NEAR, keyframe_every=3), read_amplification_max=3)
        if step % 3 == 0:
            found = stores[0].restore(step, exact=True)
            assert all(same_bits(leaf(found, path), leaf(state, path)) for path in LOSSY)


WRONG = {
    "nan": (W, lambda state: state["model"]["w"].view(-1)[7:8].fill_(math.nan)),
    "inf": (M, lambda state: entry_of(state)["exp_avg"].view(-1)[7:8].fill_(-math.inf)),
    "inf squared": (V, lambda state: entry_of(state)["exp_avg_sq"].view(-1)[7:8].fill_(math.inf)),
    "negative": (V, lambda state: entry_of(state)["exp_avg_sq"].view(-1)[7:8].fill_(-1e-9)),
    "denormal": (V, lambda state: entry_of(state)["exp_avg_sq"].mul_(0).add_(1e-40)),
    "next to zeros": (M, lambda state: entry_of(state)["exp_avg_sq"][::2].zero_()),
    "stays": (M, lambda state: entry_of(state)["exp_avg_sq"][:, :140].zero_()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_unquantizable_tensor_is_exact_with_warning(stores, commit_both, device, wrong):
    training, (path, spoil) = Training(device), WRONG[wrong]
    for step in range(2):
        state = training.train().state()
        if step:
            spoil(state)
        receipt = commit_both(state, step)
    assert any(path in warning for warning in receipt.warnings) or wrong == "stays"
    found = stores[0].restore()
    for each in set(LOSSY) - set(losses(stores[0])):
        assert same_bits(leaf(found, each), leaf(state, each))
    assert stores[0].verify("decode").damage == []


@pytest.mark.parametrize("scale", [1e-12, 1.0], ids=["all", "some"])
def test_tiny_second_moments_do_not_warn(commit_both, device, scale):
    training = Training(device, noise=1.0)
    for step in range(2):
        state = training.train().state()
        entry_of(state)["exp_avg"].mul_(scale)
        entry_of(state)["exp_avg_sq"].mul_(scale**2)
        if step and scale == 1.0:
            entry_of(state)["exp_avg"][0, :20] = 0
            entry_of(state)["exp_avg_sq"][0, :20] = 1e-40
        receipt = commit_both(state, step)
    assert receipt.warnings == ()
    assert receipt.chunks_lossy == 3


def test_values_with_overflowing_products_are_quantized(commit_both, device):
    training = Training(device)
    for step in range(2):
        state = training.train().state()
        wild = torch.from_numpy(np.random.default_rng(1).standard_normal((64, 64)) * (1 + 0.5 * step) * 1e14)
        state["model"]["wild"] = wild.float().to(device)
        receipt = commit_both(state, step)
    assert receipt.warnings == ()
    assert receipt.chunks_lossy >= 3


def test_nan_in_exact_tensors_is_warned_of(commit_both, device):
    training = Training(device)
    for step in range(3):
        state = training.train().state()
        if step != 1:
            state["model"]["bias"][3] = math.nan
            state["totals"] = torch.tensor([1.0, -math.inf], dtype=torch.float64, device=device)
        receipt = commit_both(state, step)
        expected = ("model.bias, totals hold NaN or infinity: the run may have diverged",)
        assert receipt.warnings == (() if step == 1 else expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_roundings_follow_the_quantized_masters(stores, commit_both, device, dtype):
    training = Training(device)
    for step in range(3):
        state = training.train().state()
        masters = {0: state["model"]["w"]}
        state["model"] = {"w": masters[0].to(dtype)}
        state["optimizer"]["master"] = masters
        assert commit_both(state, step).chunks_derived == 1
    found = stores[0].restore()
    assert losses(stores[0])["model.w"].role == "rounded"
    assert torch.equal(found["model"]["w"], found["optimizer"]["master"][0].to(dtype))


def test_inexact_rounding_is_stored_separately(stores, commit_both, device):
    training = Training(device)
    for step in range(2):
        state = training.train().state()
        rounded = state["model"]["w"].to(torch.bfloat16)
        rounded[1, 1] += 1
        state["optimizer"]["master"] = {0: state["model"]["w"]}
        state["model"] = {"w": rounded}
        assert commit_both(state, step).chunks_derived == 0
    assert same_bits(stores[0].restore()["model"]["w"], rounded)


@pytest.mark.parametrize(
    "parts", [{"first": "exact"}, {"second": "exact"}, {"weights": "exact"}, {"first": "exact", "second": "exact"}]
)
def test_exact_parts_stay_exact(stores, commit_both, device, parts):
    training = Training(device)
    for step in range(2):
        state = training.train().state()
        commit_both(state, step, replace(NEAR, tensors=replace(NEAR.tensors, **parts)))
    assert set(losses(stores[0])) < set(LOSSY)
    for path in set(LOSSY) - set(losses(stores[0])):
        assert same_bits(leaf(stores[0].restore(), path), leaf(state, path))


def test_transposed_and_tied_weight_is_stored_once(stores, commit_both, device):
    training = Training(device)
    for step in range(2):
        state = training.train().state()
        state["model"]["tied"] = state["model"]["w"] = state["model"]["w"].t().contiguous().t()
        assert commit_both(state, step).chunks_lossy == (3 if step else 0)
    found = stores[0].restore()["model"]
    assert found["w"].stride() == (1, 300)
    assert found["tied"].data_ptr() == found["w"].data_ptr()


@pytest.mark.parametrize("mode", ["as it is", "inference", "autocast"])
def test_commit_works_in_any_torch_mode(stores, traffic, device, monkeypatch, mode):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(300, 280), torch.nn.Tanh(), torch.nn.Linear(280, 300)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        x = torch.randn(16, 300, device=device)
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
        modes = {"inference": torch.inference_mode(), "autocast": torch.autocast(device, dtype=torch.bfloat16)}
        state = ckstore.TrainState(model, optimizer)
        with modes.get(mode, torch.enable_grad()), traffic.counted(monkeypatch):
            receipt = stores[0].commit(state, step, policy=lossy_policy(threads=1))
        assert receipt.warnings == ()
    assert receipt.chunks_lossy == 6
    assert stores[0].verify("decode").damage == []


def test_large_matrix_with_a_numpy_array(tmp_path, traffic, device, monkeypatch):
    training, other = Training(device, noise=1.0, shape=(401, 501)), Training(device, 3)
    with open_small(tmp_path / "one", 256 * KIB) as one, open_small(tmp_path / "other", 256 * KIB) as two:
        for step in range(2):
            state = training.train(2).state()
            state["ema"] = {"weight": np.array(other.train(2).w, np.float32)}
            with traffic.counted(monkeypatch):
                receipt = one.commit(state, step, policy=lossy_policy())
            two.commit(on_host(state), step, policy=lossy_policy())
        assert receipt.chunks_lossy == 14
        assert losses(one) == losses(two)
        assert one.verify("decode").damage == []


def test_unreadable_base_makes_the_weight_exact(stores, commit_both, device, monkeypatch):
    training = Training(device)
    for step in range(2):
        commit_both(training.train().state(), step)

    def fail(*given, **settings):
        raise CorruptError("it is damaged")

    state = training.train().state()
    with monkeypatch.context() as patched:
        patched.setattr(ChainReader, "read", fail)
        receipt = stores[0].commit(state, 2, policy=lossy_policy())
    assert f"{W} was stored exactly: its base could not be read" in receipt.warnings
    assert same_bits(stores[0].restore()["model"]["w"], state["model"]["w"])
    assert stores[0].verify("decode").damage == []


def test_retried_commit_quantizes_again(commit_both, stores, device, monkeypatch):
    training = Training(device)
    commit_both(training.train().state(), 0)
    flush, failures = LossyChunkWriter.flush, [BackendError("the disk has failed")]

    def fails_once(writer):
        if failures:
            raise failures.pop()
        return flush(writer)

    monkeypatch.setattr(LossyChunkWriter, "flush", fails_once)
    assert commit_both(training.train().state(), 1).chunks_lossy == 3
    assert failures == []
    assert stores[0].verify("decode").damage == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
def test_commit_waits_for_the_trainers_stream(stores):
    state = Training("cuda").train().state()
    stores[0].commit(state, 0, policy=lossy_policy())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        state["model"]["w"].add_(1)
        receipt = stores[0].commit(state, 1, policy=lossy_policy())
    assert receipt.chunks_lossy == 3
    off = stores[0].restore()["model"]["w"] - state["model"]["w"].cpu()
    assert float(off.abs().max()) < 0.6


# Roundings above the largest fp16 value


def with_rounding(training, change):
    """Return a state of a weight and its fp16 rounding, with a change in the weight."""
    state = training.train().state()
    del state["optimizer"]
    change(state["model"]["w"])
    return {**state, "half": {"model": {"w": state["model"]["w"].to(torch.float16)}}}


@pytest.mark.parametrize("row", [3, -1])
def test_infinite_rounding_has_its_loss_recorded(traffic, device, tmp_path, monkeypatch, row):
    training = Training(device, shape=(256, 500))

    def change(weight):
        weight[row, 5] = 70_000.0

    with open_small(tmp_path / "store", 256 * KIB) as store, traffic.counted(monkeypatch):
        for step in range(2):
            state = with_rounding(training, change)
            receipt = store.commit(state, step, policy=lossy_policy())
        assert (receipt.chunks_lossy, receipt.chunks_derived) == (2, 2), "either chunk has its rounding"
        found, made = losses(store)["half.model.w"], store.restore()["half"]["model"]["w"].cpu()
        own = state["half"]["model"]["w"].cpu()
        finite = torch.isfinite(own)
        assert found.max_abs == (made.double() - own.double())[finite].abs().max() > 0
        assert torch.equal(torch.isfinite(made), finite)
        assert any("half.model.w holds NaN or infinity" in warning for warning in receipt.warnings)
        bounded = lossy_policy(replace(NEAR, max_abs=1e-9, on_bound="raise"))
        with pytest.raises(BoundError):
            store.commit(with_rounding(training, change), 2, policy=bounded)


def test_weight_with_overflowing_rounding_is_exact(traffic, device, tmp_path, monkeypatch):
    training = Training(device, noise=1.0)
    numbers = torch.Generator().manual_seed(0)

    def change(weight):
        # The smallest value that rounds to infinity is 65520.
        weight[3] = (65_520 + 5 * torch.randn(SHAPE[1], generator=numbers)).to(weight.device)

    with ckstore.open(tmp_path / "store") as store, traffic.counted(monkeypatch):
        for step in range(2):
            state = with_rounding(training, change)
            receipt = store.commit(state, step, policy=lossy_policy(threads=1))
        made = store.restore()
        for part in ("model", "half"):
            own, got = (each["w"] if part == "model" else each["model"]["w"] for each in (state[part], made[part]))
            assert same_bits(own, got)
        assert any("would have elements that become infinite" in warning for warning in receipt.warnings)
        assert store.verify("decode").is_clean
