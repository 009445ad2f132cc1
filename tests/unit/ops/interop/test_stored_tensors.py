"""Protects the export of a checkpoint that does not fit into memory: what is in memory, and what is in the file."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")
safetensors = pytest.importorskip("safetensors.torch")

from ckstore.ops.interop import stored_tensors  # noqa: E402
from ckstore.ops.interop.export import export_safetensors  # noqa: E402
from ckstore.ranks.capture import RankCapture  # noqa: E402
from ckstore.state import placement  # noqa: E402
from ckstore.state.torch_adapter import TorchAdapter  # noqa: E402
from support.fake_ranks import commit_ranks, mesh_of, placements_of, rank_of, sharded  # noqa: E402

COUNT, NBYTES = 12, 64 * 64 * 4
FULL = {f"w{index}": torch.randn(64, 64) for index in range(COUNT)}


class LiveBytes:
    """Counts the bytes of restored storages and of tensors that were put together from tiles."""

    def __init__(self):
        self.now = self.peak = 0

    def note(self, memory):
        self.now += memory.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory, self._free, memory.nbytes)
        return memory

    def _free(self, nbytes):
        self.now -= nbytes


@pytest.fixture
def live(monkeypatch):
    found = LiveBytes()
    allocate, assemble = placement.allocate, TorchAdapter.assemble

    def assembled(self, spec, adopted):
        return torch.from_numpy(found.note(assemble(self, spec, adopted).numpy().copy()))

    monkeypatch.setattr(placement, "allocate", lambda nbytes: found.note(allocate(nbytes)))
    monkeypatch.setattr(TorchAdapter, "assemble", assembled)
    return found


def ranks_state(rank, text):
    with rank_of(rank, 4):
        mesh = mesh_of(2, 2)
        return RankCapture().capture({name: sharded(each, mesh, placements_of(text)) for name, each in FULL.items()})


@pytest.mark.parametrize("layout", ["one rank", "R S0", "S0 S1"])
def test_few_tensors_are_in_memory_at_a_time(store, tmp_path, live, monkeypatch, layout):
    if layout == "one rank":
        store.commit(FULL, 1)
    else:
        commit_ranks(store, {rank: ranks_state(rank, layout) for rank in range(4)})
    monkeypatch.setattr(stored_tensors, "GROUP_NBYTES", 2 * NBYTES)
    store.export_safetensors(1, tmp_path / "x.safetensors")
    found = safetensors.load_file(tmp_path / "x.safetensors")
    assert found.keys() == FULL.keys()
    assert all(torch.equal(found[name], each) for name, each in FULL.items())
    # A group, and one more tensor while it is put together.
    assert 2 * NBYTES <= live.peak <= 3 * NBYTES
    live.peak = live.now
    store.export_hf(1, tmp_path / "folder")
    # The last tensor of a group is still being written when the next group is read.
    assert 2 * NBYTES <= live.peak - live.now <= 4 * NBYTES


@pytest.mark.parametrize("layout", ["R S0", "S0 S1"])
def test_restore_needs_room_for_one_more_tensor(store, live, layout):
    commit_ranks(store, {rank: ranks_state(rank, layout) for rank in range(4)})
    state = store.restore(1)
    assert torch.equal(state["w0"], FULL["w0"])
    assert COUNT * NBYTES <= live.peak <= (COUNT + 1) * NBYTES


@dataclass
class Averages:
    decay: float
    weights: object


def test_the_file_is_that_of_a_state_in_memory(store, tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    store.commit(
        {
            "b": base, "tied": base, "columns": base.t(), "part": base[1:3], "none": torch.zeros(0, 3),
            "list": [torch.ones(3, dtype=torch.bfloat16), (np.arange(5), 7, np.float32(2))],
            "ordered": OrderedDict(z=np.arange(4, dtype=">i4"), a=torch.tensor(1.5)),
            "complex": torch.ones(2, dtype=torch.complex64), "fields": np.zeros(2, [("x", "<f4")]),
            "text": "t", "long": b"x" * 10_000, 5: torch.ones(1), "averages": Averages(0.9, [base, torch.ones(2)]),
        },
        1,
    )  # fmt: skip
    for options in ({}, {"only": ["b", "tied", "list.*"]}, {"only": "averages.*"}):
        exported = store.export_safetensors(1, tmp_path / "x.safetensors", force=True, **options)
        info = store.info(1)
        origin = {"ckstore.checkpoint_id": info.checkpoint_id, "ckstore.run": info.run, "ckstore.step": "1"}
        wanted = export_safetensors(
            store.restore(1, **options), tmp_path / "y.safetensors", force=True, metadata=origin
        )
        assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
        assert (exported.shared, exported.left_out) == (wanted.shared, wanted.left_out)
        assert exported.info.checkpoint_id == info.checkpoint_id
