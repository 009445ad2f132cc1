"""Protects deltas and roundings: a checkpoint restores bit for bit, whatever its chunks are stored against."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore import Policy
from ckstore._testing import bases_of, repository_of
from ckstore.delta.base_cache import BaseCache
from ckstore.format.location import DELTA, DERIVED, FULL, IDENTICAL
from ckstore.format.manifest import Manifest
from ckstore.io.memory import MemoryBackend
from ckstore.store.manifests import Manifests
from support.memory_files import flip
from support.states import difference

COUNT = 200_000


def weights(seed=0, count=COUNT, dtype=np.float32):
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(dtype)


def stepped(values, seed=1, size=1e-5):
    """Return weights after a relatively small update."""
    change = np.random.default_rng(seed).standard_normal(values.size) * size
    return (values.astype(np.float64) + change).astype(values.dtype)


def training(step_count=6, dtype=np.float32):
    """Yield the states of a small run: slowly changing weights, quickly changing moments, and a counter."""
    w = weights(dtype=dtype)
    for step in range(step_count):
        yield {"w": w.copy(), "m": weights(100 + step), "small": np.arange(50.0) + step, "step": step}
        w = stepped(w, seed=step)


def manifest_of(store, ref="latest") -> Manifest:
    from ckstore.store.refs import resolve

    return repository_of(store).manifests.load(resolve(repository_of(store), ref))


def modes_of(store, ref="latest"):
    decisions = manifest_of(store, ref).decisions
    return None if decisions is None else [storage.mode for storage in decisions.storages]


@pytest.fixture(params=["none", "memory"])
def policy(request):
    return Policy(base_cache=request.param)


def test_every_checkpoint_of_a_delta_history_restores(store, policy):
    states = list(training())
    receipts = [store.commit(state, step, policy=policy) for step, state in enumerate(states)]
    assert sum(receipt.chunks_delta for receipt in receipts) >= 3
    for step, state in enumerate(states):
        assert difference(store.restore(step), state) is None
    assert store.verify("decode").is_clean


def test_weights_are_deltas_and_moments_are_whole(store, policy):
    for step, state in enumerate(training(3)):
        store.commit(state, step, policy=policy)
    assert modes_of(store, 0)[:2] == [FULL, FULL]
    assert modes_of(store, 2)[:2] == [DELTA, FULL]
    decisions = manifest_of(store, 2).decisions
    assert (decisions.base, decisions.base_seq, decisions.keyframe_seq) == ("previous", 1, 0)
    assert (decisions.storages[0].age, decisions.storages[1].age) == (2, 0)
    assert decisions.storages[0].keyframe_bits < decisions.storages[0].full_bits
    assert "of a keyframe's bytes" in decisions.reason


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u2"])
def test_deltas_of_every_width_restore(store, policy, dtype):
    rng = np.random.default_rng(3)
    first = (rng.standard_normal(COUNT) * 100).astype(dtype)
    second = first.copy()
    second[rng.integers(0, COUNT, COUNT // 100)] += 1
    store.commit({"a": first}, 0, policy=policy)
    receipt = store.commit({"a": second}, 1, policy=policy)
    assert receipt.chunks_delta == receipt.chunks_new
    assert receipt.bytes_written < first.nbytes / 4
    assert difference(store.restore(1), {"a": second}) is None


def test_special_numbers_survive_a_delta(store):
    first = weights()
    first[:8] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38]
    second = stepped(first, size=1e-7)
    second[:8] = np.roll(first[:8], 1)
    store.commit({"a": first}, 0)
    assert store.commit({"a": second}, 1).chunks_delta
    assert store.restore(1)["a"].tobytes() == second.tobytes()


def test_restore_reads_within_the_bound(store):
    w = weights(count=2_000_000)
    for step in range(8):
        store.commit({"w": w}, step, policy=Policy(read_amplification_max=1.9))
        w = stepped(w, seed=step, size=2e-6)
    whole = manifest_of(store, 0).header.bytes_stored
    shares = [manifest_of(store, step).header.bytes_stored / whole for step in range(8)]
    assert max(shares) > 1.2
    assert max(shares) <= 1.9 * 1.02


def test_base_of_other_shape_or_dtype_is_not_used(store):
    store.commit({"a": weights(), "b": weights(1)}, 0)
    receipt = store.commit({"a": weights(count=COUNT + 8), "b": weights(1).view(np.int32)[::-1].copy()}, 1)
    assert receipt.chunks_delta == 0
    assert receipt.warnings == ()
    assert store.verify("decode").is_clean


def test_policy_without_deltas_makes_none(store):
    for step, state in enumerate(training(3)):
        assert store.commit(state, step, policy=Policy(delta=False)).chunks_delta == 0
    for step, state in enumerate(training(3), 3):
        assert store.commit(state, step, policy=Policy(compression="none")).chunks_delta == 0


def test_chunk_ids_do_not_depend_on_the_form():
    ids = []
    for policy in (Policy(), Policy(delta=False)):
        with ckstore.open(MemoryBackend(), policy=policy) as store:
            for step, state in enumerate(training(3)):
                store.commit(state, step)
            ids.append([chunk.chunk_id for chunk in manifest_of(store).chunks])
    assert ids[0] == ids[1]


def test_deleting_a_base_checkpoint_breaks_nothing(store):
    states = list(training(4))
    for step, state in enumerate(states):
        store.commit(state, step)
    for step in range(3):
        store.delete(step)
    assert difference(store.restore(3), states[3]) is None
    assert store.verify("decode").is_clean
    again = stepped(states[3]["w"], size=1e-7)
    assert store.commit({**states[3], "w": again}, 4).chunks_delta
    assert store.restore(4)["w"].tobytes() == again.tobytes()


def test_commit_after_restore_in_new_process_is_a_delta(backend):
    states = list(training(3))
    with ckstore.open(backend) as store:
        for step in (0, 1):
            store.commit(states[step], step)
    for restores in (True, False):
        with ckstore.open(backend) as store:
            if restores:
                store.restore()
            receipt = store.commit({**states[2], "step": restores}, 2)
            assert receipt.chunks_delta, "no sample is in memory, so each chunk is tried"
            assert modes_of(store)[:2] == [DELTA, FULL]
            assert difference(store.restore(), {**states[2], "step": restores}) is None
            store.delete(2)


def test_restored_checkpoint_is_the_next_base(store):
    states = list(training(4))
    for step, state in enumerate(states):
        store.commit(state, step)
    store.restore(1)
    branch = {**states[1], "w": stepped(states[1]["w"], size=1e-8)}
    receipt = store.commit(branch, 2)
    assert receipt.chunks_delta
    assert receipt.bytes_written < states[1]["w"].nbytes / 2
    assert difference(store.restore("latest"), branch) is None


def damage(backend, store, ref):
    """Flip one byte in the payload of the weights' frame."""
    manifest = manifest_of(store, ref)
    chunk_id = manifest.chunks[manifest.storages[0].pieces[0].chunk].chunk_id
    frame = next(frame for frame in manifest.frames if frame.chunk_id == chunk_id)
    from ckstore.format.paths import pack_name

    flip(backend, pack_name(manifest.packs[frame.pack].pack_id), frame.offset + 192 + frame.stored_nbytes // 2)


def test_damaged_base_is_reported_and_not_used(backend):
    states = list(training(3))
    with ckstore.open(backend) as store:
        store.commit(states[0], 0)
        damage(backend, store, 0)
        receipt = store.commit(states[1], 1)
        assert modes_of(store)[:2] == [FULL, FULL]
        assert any("stored without one" in warning for warning in receipt.warnings)
        assert difference(store.restore(1), states[1]) is None
        with pytest.raises(ckstore.CorruptError):
            store.restore(0)


def test_damaged_base_names_its_dependents(backend):
    states = list(training(3))
    with ckstore.open(backend) as store:
        for step, state in enumerate(states):
            store.commit(state, step)
        damage(backend, store, 0)
        with pytest.raises(ckstore.CorruptError) as caught:
            store.restore(2)
        assert "chain" in str(caught.value)
        assert "w" in str(caught.value.facts["tensor"])
        assert len(caught.value.facts["checkpoints"]) == 3
        assert len(store.verify("read").damage) == 1


def test_cached_base_changed_in_memory_is_not_used(store, monkeypatch):
    states = list(training(3))
    policy = Policy(base_cache="memory")
    held, hold = [], BaseCache.hold

    def noting(bases, chunk_id, plain, **options):
        held.append(plain)
        hold(bases, chunk_id, plain, **options)

    with monkeypatch.context() as patched:
        patched.setattr(BaseCache, "hold", noting)
        receipt = store.commit(states[0], 0, policy=policy)
    assert receipt.bytes_bases == sum(map(len, held)) >= states[0]["w"].nbytes
    for plain in held:
        plain[len(plain) // 2] ^= 1
    assert store.commit(states[1], 1, policy=policy).chunks_delta
    assert difference(store.restore(1), states[1]) is None
    assert store.verify("decode").is_clean


def test_unused_cached_bases_are_freed(store):
    policy = Policy(base_cache="memory")
    for step, state in enumerate(training(8)):
        receipt = store.commit(state, step, policy=policy)
        assert 0 < receipt.bytes_bases <= 1.1 * (state["w"].nbytes + state["m"].nbytes)
        assert bases_of(store).samples_nbytes <= 0.2 * (state["w"].nbytes + state["m"].nbytes)


def test_identical_storages_cost_nothing(store):
    """A frozen model with a small adapter: the model is written once."""
    frozen = weights(count=1_000_000)
    written = []
    for step in range(5):
        receipt = store.commit({"frozen": frozen, "adapter": weights(step, 80_000)}, step)
        written.append(receipt.bytes_written)
    assert modes_of(store)[0] == IDENTICAL
    assert written[0] > frozen.nbytes / 2
    assert max(written[1:]) < 80_000 * 4 + 20_000


def test_sparse_changes_cost_fifty_times_less():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    bits = torch.from_numpy(weights(count=4_000_000)).bfloat16().view(torch.int16).numpy().copy()
    with ckstore.open(MemoryBackend()) as store:
        for step in range(4):
            state = {"w": torch.from_numpy(bits.copy()).view(torch.bfloat16)}
            receipt = store.commit(state, step)
            if step:
                assert receipt.bytes_written < bits.nbytes / 50
            assert torch.equal(store.restore(step)["w"].view(torch.int16), torch.from_numpy(bits))
            chosen = rng.integers(0, bits.size, bits.size // 100)
            bits[chosen] += rng.choice([-1, 1], chosen.size).astype(np.int16)
        assert manifest_of(store).decisions.base == "previous"
        assert manifest_of(store).header.depth_max == 3


def test_roundings_of_masters_cost_nothing():
    torch = pytest.importorskip("torch")
    master = torch.from_numpy(weights(count=3_000_000))
    master[:4] = torch.tensor([float("inf"), -0.0, 1e-42, 3.3e38])
    for rounded in (master.bfloat16(), master.half()):
        with ckstore.open(MemoryBackend()) as store:
            alone = store.commit({"master": master}, 0).bytes_written
            both = store.commit({"model": rounded, "master": master.clone()}, 1)
            assert both.chunks_derived == 3
            assert both.bytes_written < 20_000
            changed = master * 1.001
            third = store.commit({"model": changed.to(rounded.dtype), "master": changed}, 2)
            assert third.chunks_derived == 3
            assert third.bytes_written < 1.02 * alone
            assert modes_of(store)[0] == DERIVED
            found = store.restore()
            assert torch.equal(found["model"], changed.to(rounded.dtype))
            assert torch.equal(found["master"], changed)
            assert torch.equal(store.restore(2, only="model")["model"], changed.to(rounded.dtype))
            assert store.verify("decode").is_clean


def test_inexact_rounding_is_stored_whole():
    torch = pytest.importorskip("torch")
    master = torch.from_numpy(weights(count=2_000_000))
    rounded = master.bfloat16()
    rounded[7] = 1.0
    with ckstore.open(MemoryBackend()) as store:
        receipt = store.commit({"model": rounded, "master": master}, 0)
        assert receipt.chunks_derived == 1, "the other chunk is still a rounding"
        assert torch.equal(store.restore()["model"], rounded)


def test_failed_commit_keeps_the_bases(store, monkeypatch):
    states = list(training(3))
    store.commit(states[0], 0)

    def fail(*_):
        raise ckstore.BackendError("the medium failed")

    with monkeypatch.context() as patched:
        patched.setattr(Manifests, "publish", fail)
        with pytest.raises(ckstore.BackendError):
            store.commit(states[1], 1)
    assert store.commit(states[2], 2).chunks_delta
    assert store.steps() == [0, 2]
    assert difference(store.restore(2), states[2]) is None


def test_failed_commit_frees_its_memory(backend, monkeypatch):
    def fail(*_):
        raise ckstore.CapacityError("the disk is full")

    with ckstore.open(backend, policy=Policy(base_cache="memory")) as store:
        states = list(training(5))
        held = store.commit(states[0], 0).bytes_bases
        assert held == bases_of(store).held_nbytes > 0
        with monkeypatch.context() as patched:
            patched.setattr(Manifests, "publish", fail)
            for step in (1, 2, 3):
                with pytest.raises(ckstore.CapacityError):
                    store.commit(states[step], step)
                assert bases_of(store).held_nbytes == held
        assert store.commit(states[4], 4).bytes_bases <= 1.1 * held


def test_rounding_refers_to_the_master_of_its_state():
    """If rounded weights stay equal while masters change, old masters must not be kept alive."""
    torch = pytest.importorskip("torch")
    bits = torch.from_numpy(weights(count=3_000_000)).bfloat16()
    with ckstore.open(MemoryBackend(), policy=Policy(read_amplification_max=1.0)) as store:
        for step in range(3):
            # The low half of a master is noise that the rounding removes.
            low = torch.from_numpy(np.random.default_rng(step).integers(0, 1 << 15, bits.numel(), dtype=np.int32))
            master = ((bits.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
            assert torch.equal(master.bfloat16(), bits)
            store.commit({"model": bits.clone(), "master": master}, step)
            manifest = manifest_of(store)
            assert len(manifest.frames) == len(manifest.chunks), "a frame of an earlier master is still needed"
            assert torch.equal(store.restore(step)["model"], bits)
        assert store.verify("decode").is_clean


def test_tensors_with_equal_start_are_not_masters():
    torch = pytest.importorskip("torch")
    master = torch.zeros(2_000_000)
    master[::7] = 1.0
    master[900_000:1_100_000] = 0
    model = torch.from_numpy(weights(count=2_000_000)).bfloat16()
    model[900_000:1_100_000] = 0
    with ckstore.open(MemoryBackend()) as store:
        store.commit({"model": model, "other": master}, 0)
        moved = model.clone()
        moved[::100] += 0.001
        receipt = store.commit({"model": moved, "other": master}, 1)
        assert receipt.chunks_delta == receipt.chunks_new
        assert receipt.bytes_written < model.numel() * 2 / 8


def test_new_process_per_commit_learns_delta_costs(backend):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    bits = [torch.from_numpy(weights(seed, 1_000_000)).bfloat16().view(torch.int16).numpy() for seed in range(4)]
    shares = []
    for step in range(5):
        with ckstore.open(backend) as store:
            state = {f"w{index}": torch.from_numpy(each.copy()).view(torch.bfloat16) for index, each in enumerate(bits)}
            receipt = store.commit(state, step)
            shares.append(receipt.bytes_written / receipt.bytes_state)
        for each in bits:
            each[rng.integers(0, each.size, each.size // 100)] ^= 1
    assert shares[-1] < 1 / 50, shares
