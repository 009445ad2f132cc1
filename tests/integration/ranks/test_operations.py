"""Protects everything that works on checkpoints without knowing that many ranks made them.

The checkpoints have tensors that are cut by rows, tensors in tiles, values that are equal on all ranks, and values of
each rank.
"""

from __future__ import annotations

import math
import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

import torch.distributed.checkpoint as torch_dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import ckstore  # noqa: E402
from ckstore.cli.main import run as ckstore_command  # noqa: E402
from ckstore.errors import MissingChunkError  # noqa: E402
from ckstore.ops.interop.export import export_safetensors  # noqa: E402
from support.damaged_stores import frames_of, manifest_of  # noqa: E402
from support.fake_ranks import mesh_of, placements_of, rank_of, sharded  # noqa: E402
from support.memory_folders import temporary_folder  # noqa: E402
from support.rank_jobs import PlayedJob  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("quiet_log"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

WORLD = 4
STEPS = range(4)
MESHES = {4: (2, 2), 2: (2,)}
CUTS = {4: ("S0 S0", "S0 S1"), 2: ("S0", "S1")}


def whole(step):
    """Return the tensors of a step. ``frozen`` never changes."""
    source = torch.Generator().manual_seed(7)
    found = {name: torch.randn(1024, 384, generator=source) for name in ("rows", "tiles", "frozen")}
    source.manual_seed(step)
    for name in ("rows", "tiles"):
        found[name] += 1e-4 * step * torch.randn(1024, 384, generator=source)
    return found


def states_of(step, world=WORLD):
    """Return the state of each rank."""
    made = []
    for rank in range(world):
        with rank_of(rank, world):
            mesh = mesh_of(*MESHES[world])
            rows, tiles = map(placements_of, CUTS[world])
            tensors = whole(step)
            model = {name: sharded(each, mesh, tiles if name == "tiles" else rows) for name, each in tensors.items()}
            own = {"rng": torch.full((3000,), 100.0 * step + rank), "position": rank} if world == WORLD else {}
            made.append({"model": model, "same": torch.arange(100.0) + step, "step": step, **own})
    return made


def commit(path, steps, world=WORLD, **options):
    ckstore.open(path).close()
    job = PlayedJob(path, world)
    try:
        for step in steps:
            job.commit(states_of(step, world), step, ckstore.Policy(**options))
    finally:
        job.close()


@pytest.fixture(scope="module")
def pristine():
    with temporary_folder() as folder:
        commit(folder / "store", STEPS)
        yield folder / "store"


@pytest.fixture
def path(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def store(path):
    with ckstore.open(path) as store:
        yield store


def check(store, step, ref=None, *, exact=("rows", "tiles", "frozen")):
    """Check that a checkpoint comes back as whole tensors."""
    found = store.restore(step if ref is None else ref)
    for name, want in whole(step).items():
        if name in exact:
            assert torch.equal(found["model"][name], want), name
        else:
            assert 0 < (found["model"][name] - want).abs().max() < 2e-3, name
    assert torch.equal(found["same"], torch.arange(100.0) + step)
    assert found["step"] == step
    assert found["position"] == {rank: rank for rank in range(WORLD)}
    for rank in range(WORLD):
        assert torch.equal(found["rng"][rank], torch.full((3000,), 100.0 * step + rank))


def check_all(store, steps=STEPS):
    for step in steps:
        check(store, step)
    assert store.verify("decode").is_clean


def flip(path, pack, offset):
    with (path / pack).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def spoil(path, store, step, leaf):
    """Flip a byte in a frame of a tensor. Return the name of the pack."""
    pack, frame = frames_of(store, step, leaf)[-1]
    flip(path, pack, frame.offset + frame.stored_nbytes // 2 + 100)
    return pack


@pytest.mark.parametrize("level", ["quick", "read", "decode"])
def test_verify_accepts_them(store, level):
    assert store.verify(level).is_clean


@pytest.mark.parametrize("leaf", ["model.rows", "model.tiles"])
def test_verify_names_a_damaged_tensor(path, store, leaf):
    spoil(path, store, 3, leaf)
    report = store.verify("decode")
    assert leaf in str(report.damage)
    assert store.verify("quick").is_clean


def test_gc_drops_and_frees(path, store):
    before = sum(file.stat().st_size for file in path.glob("packs/**/*.pack"))
    store.gc({"keep_last": 2}, now=True, min_age=0)
    assert store.steps() == [2, 3]
    check_all(store, (2, 3))
    assert sum(file.stat().st_size for file in path.glob("packs/**/*.pack")) <= before
    store.gc({"keep_last": 1}, now=True, min_age=0)
    check_all(store, (3,))


def test_gc_rewrites_packs_that_are_half_empty(tmp_path):
    path = tmp_path / "store"
    commit(path, (0, 3), delta=False)
    with ckstore.open(path) as store:
        old = {pack.pack_id for pack in manifest_of(store, 0).packs}
        assert old & {pack.pack_id for pack in manifest_of(store, 3).packs}
        before = sum(file.stat().st_size for file in path.glob("packs/**/*.pack"))
        store.gc({"keep_last": 1}, now=True, min_age=0, waste_max=0.1)
        assert not old & {pack.pack_id for pack in manifest_of(store, 3).packs}
        assert sum(file.stat().st_size for file in path.glob("packs/**/*.pack")) < 0.7 * before
        check_all(store, (3,))


def test_a_deleted_one_comes_back(store):
    store.delete(1)
    assert store.steps() == [0, 2, 3]
    store.undelete("seq:1")
    check_all(store)


def test_repair_takes_a_damaged_frame_from_a_copy(path, store, tmp_path):
    store.mirror(str(tmp_path / "copy"))
    with ckstore.open(tmp_path / "copy") as copy:
        check_all(copy)
    spoil(path, store, 3, "model.tiles")
    assert not store.verify("decode").is_clean
    store.repair(dry_run=False, sources=[tmp_path / "copy"])
    check_all(store)


def test_without_the_pack_of_one_rank_a_checkpoint_is_partial(path, store):
    lost, _ = frames_of(store, 3, "model.tiles")[0]
    (path / lost).unlink()
    report = store.repair(dry_run=False)
    assert {(entry.step, entry.action) for entry in report.entries} >= {(3, "partial")}
    with pytest.raises(MissingChunkError):
        store.restore(3)
    (partial,) = report.partial
    assert "model.tiles" in partial.tensors
    # A value of each rank is one value.
    rest = {"model.rows", "model.frozen", "same"} - set(partial.tensors)
    assert rest
    for path in rest:
        found = store.restore(3, only=path)
        if path != "same":
            assert torch.equal(found["model"][path.removeprefix("model.")], whole(3)[path.removeprefix("model.")])
    check(store, 0)


def test_they_move_to_a_tier_and_back(path, store, tmp_path):
    tier = tmp_path / "tier"
    report = store.push(str(tier), keep_local=1)
    assert report.packs_copied > 0
    store.gc({"keep_last": len(STEPS)}, now=True, min_age=0)
    check_all(store)
    store.pull()
    shutil.move(tier, tmp_path / "away")
    check_all(store)


def test_demotion_makes_rows_lossy_and_leaves_the_rest_exact(store):
    report = store.demote(policy={"keep_newest": 1, "keep_every": 0, "fidelity": "near"})
    # As for one rank, there is nothing before the first that a rounded difference could be taken from.
    assert [entry.step for entry in report.entries if entry.is_done] == [2, 1]
    for step in (1, 2):
        assert store.info(step).fidelity == "near"
        check(store, step, exact=("tiles", "frozen"))
    for step in (0, 3):
        check(store, step)
    assert store.verify("decode").is_clean
    assert store.contents(1).world.size == WORLD


def test_demotion_across_a_change_of_world(tmp_path):
    path = tmp_path / "store"
    for world, steps in ((4, (0, 1)), (2, (2, 3))):
        commit(path, steps, world)
    with ckstore.open(path) as store:
        store.commit({"model": whole(4)}, 4)
        report = store.demote(policy={"keep_newest": 1, "keep_every": 0, "fidelity": "near"})
        assert {entry.step for entry in report.entries if entry.is_done} >= {1, 2, 3}
        for step in range(5):
            model = store.restore(step)["model"]
            for name, want in whole(step).items():
                assert (model[name] - want).abs().max() < 2e-3, (step, name)
            assert torch.equal(model["tiles"], whole(step)["tiles"])
        assert store.verify("decode").is_clean


def test_repacking_stores_differences_and_changes_no_content(tmp_path):
    path = tmp_path / "store"
    commit(path, STEPS, delta=False)
    with ckstore.open(path) as store:
        assert store.info(3).depth_max == 0
        report = store.repack()
        assert report.packs_after < 0.9 * report.packs_before
        assert store.info(3).depth_max + store.info(2).depth_max > 0
        check_all(store)


def test_repacking_and_collecting_changes_no_content(store):
    store.repack()
    check_all(store)
    store.gc({"keep_last": len(STEPS)}, now=True, min_age=0)
    check_all(store)


def test_rewinding_publishes_one_again(store):
    info = store.rewind(1)
    assert (info.step, info.seq, store.contents("latest").world.size) == (1, len(STEPS), WORLD)
    check(store, 1, "latest")


@pytest.mark.parametrize("exact", [False, True])
def test_stats_count_all_bytes(store, exact):
    stats = store.stats(3, exact=exact)
    assert stats.total.nbytes == store.info(3).bytes_state


def test_one_state_by_other_ranks_does_not_differ(tmp_path):
    path = tmp_path / "store"
    for world in (4, 2):
        states = [{key: state[key] for key in ("model", "same", "step")} for state in states_of(1, world)]
        ckstore.open(path).close()
        job = PlayedJob(path, world)
        job.commit(states, 8 - world)
        job.close()
    with ckstore.open(path) as store:
        store.commit({"model": whole(1), "same": torch.arange(100.0) + 1, "step": 1}, 9)
        diff = store.diff(4, 6)
        assert diff.is_equal, diff
        assert math.prod(next(row.shape for row in diff.tensors if row.path == "model.tiles")) == 1024 * 384
        assert store.diff(4, 9).is_equal


def test_whole_tensors_are_exported(store, tmp_path):
    export_safetensors(store.restore(3), tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    for name, want in whole(3).items():
        assert torch.equal(found[f"model.{name}"], want)
    assert torch.equal(found["rng.2"], torch.full((3000,), 302.0))


def test_a_folder_of_torch_is_imported_next_to_them(store, tmp_path):
    torch_dcp.save({"model": whole(9)}, checkpoint_id=str(tmp_path / "checkpoint-9"))
    store.import_from(tmp_path / "checkpoint-9", step=9)
    found = store.restore("latest")
    assert all(torch.equal(found["model"][name], want) for name, want in whole(9).items())
    check_all(store)


def test_whole_tensors_are_exported_for_transformers(store, tmp_path):
    # One buffer at a time: the tensors need not fit into memory together.
    store.export_hf(3, tmp_path / "folder")
    found = load_file(tmp_path / "folder" / "model.safetensors")
    assert found.keys() == whole(3).keys()
    for name, want in whole(3).items():
        assert torch.equal(found[name], want), name


def test_the_command_line_restores_whole_tensors(path, tmp_path):
    assert ckstore_command(["restore", str(path), "3", "-o", str(tmp_path / "state.pt"), "--only", "model.*"]) == 0
    found = torch.load(tmp_path / "state.pt")
    for name, want in whole(3).items():
        assert torch.equal(found["model"][name], want)
