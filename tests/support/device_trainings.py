"""Trainings whose tensors lie on a device, or are taken to: with torch on a CPU every line of the device's way runs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

import ckstore
from ckstore import Residual
from ckstore.adapters import torch_state
from ckstore.device_bases import DeviceBases
from ckstore.kernels import on_gpu
from ckstore.testing import trainings
from ckstore.testing.trainings import M, V, W, leaf

ROWS, COLS = SHAPE = (300, 280)
COUNT = ROWS * COLS
LOSSY = (W, M, V)
NEAR, SMALL = Residual.near(), Residual.small()
HOST = {"quantize_on": "host"}


def lossy_policy(fidelity=None, **changes):
    """Return a policy that quantizes on devices, and keeps bases there."""
    return trainings.lossy_policy(fidelity, **{"quantize_on": "device", "device_bases_nbytes_max": None, **changes})


@dataclass
class Traffic:
    """Bytes that came from a device to the host: floats of the state, and what quantizing brings."""

    floats: int = 0
    codes: int = 0
    calls: list[int] = field(default_factory=list)

    def reset(self) -> None:
        self.floats, self.codes = 0, 0
        self.calls.clear()


def pretend(monkeypatch, *, on_host: bool) -> Traffic:
    """Count what is copied from devices; where there is none, take every tensor of torch for one that lies on one."""
    traffic = Traffic()
    if on_host:
        monkeypatch.setattr(torch_state, "device_of", lambda tensor: tensor.device)
    read, bring = torch_state.copy_to_host, on_gpu.to_host

    def counted_read(held):
        traffic.floats += held.nbytes
        traffic.calls.append(held.nbytes)
        # A copy, as a device makes it.
        return memoryview(bytearray(read(held)))

    def counted_bring(tensor):
        traffic.codes += tensor.nbytes
        return bring(tensor).copy()

    monkeypatch.setattr(torch_state, "copy_to_host", counted_read)
    monkeypatch.setattr(on_gpu, "to_host", counted_bring)
    return traffic


class Run:
    """A pretended training with Adam; its gradients are few directions with some noise, or noise alone."""

    def __init__(self, seed=1, *, device="cpu", dtype=torch.float32, noise=0.05, shape=SHAPE) -> None:
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

    def tensor(self, values, dtype=None):
        return torch.from_numpy(np.array(values, np.float32)).to(self.device).to(dtype or self.dtype)

    def state(self):
        entry = {"step": torch.tensor(float(self.steps)), "exp_avg": self.tensor(self.m)}
        entry["exp_avg_sq"] = self.tensor(self.v)
        group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}
        model = {"w": self.tensor(self.w), "bias": self.tensor(self.w[0])}
        return {"model": model, "optimizer": {"state": {0: entry}, "param_groups": [group]}, "epoch": 3}


def entry_of(state):
    """Return the moments of the one weight of a run."""
    return state["optimizer"]["state"][0]


def numbers(tensor):
    """Return the values of a tensor on the host."""
    return tensor.detach().cpu().float().numpy()


def same_bits(one, other):
    """Whether two tensors have the same bytes, wherever they lie."""
    return torch.equal(one.cpu().reshape(-1).view(torch.uint8), other.cpu().reshape(-1).view(torch.uint8))


def commit_both(stores, state, step, fidelity=NEAR, **changes):
    """Commit a state by the device's way and by the host's."""
    policy = lossy_policy(fidelity, **changes)
    return stores[0].commit(state, step, policy=policy), stores[1].commit(state, step, policy=replace(policy, **HOST))


def same_checkpoints(stores, ref="latest"):
    """Whether two stores have the same tensors, bit for bit."""
    one, other = (store.restore(ref) for store in stores)
    return all(same_bits(leaf(one, path), leaf(other, path)) for path in LOSSY)


@pytest.fixture(params=["pretended", "cuda"])
def device(request):
    """A device that is there, or the CPU, where what lies on it is taken to lie on a device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def traffic(device, monkeypatch):
    """Counts what comes to the host; whoever asks for it commits tensors on a device."""
    return pretend(monkeypatch, on_host=device == "cpu")


@pytest.fixture
def kept_there(monkeypatch):
    """Tensors that were kept on a device for the next commit, as weak references, in the order of time."""
    found, keep = [], DeviceBases.keep

    def noting(bases, chunk_id, tensor):
        found.append(weakref.ref(tensor))
        keep(bases, chunk_id, tensor)

    monkeypatch.setattr(DeviceBases, "keep", noting)
    return found


def alive(references):
    """Return what is still alive of what was kept."""
    gc.collect()
    return [tensor for reference in references if (tensor := reference()) is not None]


@pytest.fixture
def stores(tmp_path):
    """Two stores: one for the device's way, one for the host's."""
    with ckstore.open(tmp_path / "one") as one, ckstore.open(tmp_path / "other") as other:
        yield one, other
