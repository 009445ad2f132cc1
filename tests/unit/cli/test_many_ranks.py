"""Protects what the command line shows and writes of a checkpoint by many ranks: that of a checkpoint by one."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")
safetensors = pytest.importorskip("safetensors.torch")

import ckstore  # noqa: E402
from ckstore.format.many_ranks import MeshFacts, RankFacts  # noqa: E402
from ckstore.ranks.capture import RankCapture  # noqa: E402
from ckstore.state.markers import PerRank  # noqa: E402
from support.fake_ranks import commit_ranks, mesh_of, placements_of, rank_of, sharded  # noqa: E402

FULL = {"w": torch.randn(6, 10), "b": torch.randn(10)}
RANKS = tuple(RankFacts(f"node{rank // 2}", 100 + rank, 50 + rank) for rank in range(4))
MESHES = (MeshFacts(("dp", "tp"), (2, 2)),)


def state_of(rank, text):
    with rank_of(rank, 4):
        mesh = mesh_of(2, 2)
        model = {
            "w": sharded(FULL["w"], mesh, placements_of(text)),
            "b": sharded(FULL["b"], mesh, placements_of("R S0")),
        }
        return RankCapture().capture({"model": model, "rng": PerRank({"seed": rank}), "step": 3})


@pytest.fixture
def folder(tmp_path):
    """A store with three checkpoints of one model: in tiles, in rows, and by one rank with one element changed."""
    with ckstore.open(tmp_path / "store") as store:
        for step, text in ((1, "S0 S1"), (2, "R S0")):
            commit_ranks(store, {rank: state_of(rank, text) for rank in range(4)}, step, ranks=RANKS, meshes=MESHES)
        changed = {**FULL, "w": FULL["w"].clone()}
        changed["w"][5, 9] += 1
        store.commit({"model": changed, "rng": {"seed": 0}, "step": 3}, 3)
    return tmp_path / "store"


def test_show_names_ranks_meshes_and_global_shapes(call, folder):
    code, out, _ = call("show", folder, 1)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "ranks 4 on 2 hosts" in lines
    assert "meshes dp 2 x tp 2" in lines
    assert "3 node1 103 B 53 B" in lines
    assert any(line.startswith("model.w float32 6x10 240 B") for line in lines), out
    assert not any("state." in line for line in lines)
    shown = json.loads(call("show", folder, 1, "--json")[1])
    assert shown["world"]["size"] == 4
    assert shown["world"]["ranks"][3] == {"host": "node1", "nbytes": 103, "written": 53}
    assert shown["world"]["meshes"] == [{"names": ["dp", "tp"], "shape": [2, 2]}]
    assert {row["path"]: row["shape"] for row in shown["tensors"]} == {"model.w": [6, 10], "model.b": [10]}
    assert "world" not in json.loads(call("show", folder, 3, "--json")[1])


def test_diff_compares_elements_whatever_the_layout(call, folder):
    code, out, _ = call("diff", folder, 1, 2)
    assert code == 0
    assert "The two checkpoints are equal, bit for bit." in out
    found = json.loads(call("diff", folder, 1, 3, "--only", "model.*", "--json")[1])
    assert {row["path"]: (row["status"], row["changed_count"]) for row in found["tensors"]} == {
        "model.w": ("changed", 1),
        "model.b": ("equal", 0),
    }


def test_export_and_restore_write_whole_tensors(call, folder, tmp_path):
    code, out, err = call("export", folder, 1, "-o", tmp_path / "model.safetensors", "--only", "model.*")
    assert code == 0, out + err
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert {key.removeprefix("model."): tensor.tolist() for key, tensor in found.items()} == {
        key: tensor.tolist() for key, tensor in FULL.items()
    }
    assert call("restore", folder, 1, "-o", tmp_path / "state.pt")[0] == 0
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(state["model"]["w"], FULL["w"])
    assert (state["rng"], state["step"]) == ({rank: {"seed": rank} for rank in range(4)}, 3)


def test_every_other_command_reads_it(call, folder):
    for words in (("ls",), ("verify",), ("stats", "--exact"), ("du",), ("show", "1", "--codec")):
        code, out, err = call(words[0], folder, *words[1:])
        assert code == 0, f"{words}: {out}{err}"
    assert "model.w" in call("stats", folder, 1)[1]


def test_a_model_folder_gets_whole_weights(folder, tmp_path):
    with ckstore.open(folder) as store:
        store.export_hf(1, tmp_path / "model")
    found = safetensors.load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(found["w"], FULL["w"])
    assert torch.equal(found["b"], FULL["b"])
