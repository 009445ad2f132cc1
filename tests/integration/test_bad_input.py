"""Protects users with wrong calls or failing disks: an error that says what to do, and no half-visible checkpoint.

Memory backends replace the disk where the medium does not matter; full and read-only disks are real.
"""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest

import ckstore
from ckstore.cli.main import run as ckstore_command
from ckstore.errors import BackendError, CapacityError, LeafTypeError, UsageError
from ckstore.io.memory import MemoryBackend
from support.memory_files import names_of
from support.model import difference


def state_of(seed, count=64):
    source = np.random.default_rng(seed)
    return {
        "model": {"w": source.standard_normal(count).astype(np.float32), "b": source.integers(0, 255, 7, np.uint8)},
        "optimizer": [{"step": seed, "lr": 1e-3, "m": source.standard_normal((3, 5))}],
        "seed": seed,
    }


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class UnknownLeaf:
    pass


def check_nothing_happened(store, backend_files):
    assert store.steps() == []
    assert backend_files() == []


@pytest.fixture
def claims(backend):
    return lambda: names_of(backend, ("claims/", "packs/", "manifests/"))


@pytest.mark.parametrize(
    ("state", "path", "remedy"),
    [
        ({"a": {"b": [1, UnknownLeaf()]}}, "a.b.1", "register_converter"),
        ({"a": {1, UnknownLeaf()}}, "a", "register_converter"),
        ({"f": lambda: None}, "f", "Leave it out"),
        ([{"x": UnknownLeaf}], "0.x", "Leave it out"),
        ({"o": np.array([object()])}, "o", "Leave it out"),
        ({"d": memoryview(b"x")}, "d", "Leave it out"),
        (UnknownLeaf(), "the state itself", "register_converter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_leaf_type_names_path_and_remedy(store, claims, state, path, remedy):
    with pytest.raises(LeafTypeError) as caught:
        store.commit(state, 1)
    assert path in str(caught.value)
    assert remedy in str(caught.value)
    check_nothing_happened(store, claims)


@pytest.mark.parametrize("key", [UnknownLeaf(), (1, UnknownLeaf()), len], ids=["object", "tuple", "function"])
def test_non_plain_key_is_refused_with_its_path(store, claims, key):
    with pytest.raises(UsageError) as caught:
        store.commit({"model": {key: 1}}, 1)
    assert "model" in str(caught.value)
    check_nothing_happened(store, claims)


def test_keys_with_dots_stay_distinct(store):
    state = {"a": {"b": 1, 1: 2, "1": 3}, "a.b": 4, 7: 5, "7": 6, "": {"": 7}}
    store.commit(state, 1)
    assert difference(store.restore(), state) is None


def test_cyclic_state_is_refused(store, claims):
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(UsageError, match=r"a\.0"):
        store.commit(state, 1)
    check_nothing_happened(store, claims)


@pytest.mark.parametrize("step", [-1, 1.0, "3", None, True, b"1", 10**18, [1]], ids=repr)
def test_step_must_be_a_natural_number(store, claims, step):
    with pytest.raises(UsageError, match="step"):
        store.commit({"a": 1}, step)
    check_nothing_happened(store, claims)


def test_numpy_integer_is_a_step(store):
    assert store.commit({"a": 1}, np.int64(5)).step == 5
    assert store.commit({"a": 1}, 10**18 - 1).step == 10**18 - 1
    assert store.steps() == [5, 10**18 - 1]


@pytest.mark.parametrize(
    "metrics", [{"loss": "low"}, {"loss": None}, {"": 1.0}, {"a:b": 1.0}, {5: 1.0}, {"x" * 129: 1.0}], ids=str
)
def test_invalid_metrics_are_refused(store, claims, metrics):
    with pytest.raises(UsageError, match="metric"):
        store.commit({"a": 1}, 1, metrics=metrics)
    check_nothing_happened(store, claims)


def test_metrics_come_back_as_floats_nan_included(store):
    store.commit({"a": 1}, 1, metrics={"loss": np.float32(1.5), "nan": float("nan"), "inf": float("-inf"), "n": 3})
    metrics = store.info(1).metrics
    assert (metrics["loss"], metrics["inf"], metrics["n"]) == (1.5, float("-inf"), 3.0)
    assert np.isnan(metrics["nan"])
    assert store.verify("decode").is_clean


def test_bad_tag_is_refused_before_anything_is_written(store, claims):
    with pytest.raises(UsageError):
        store.commit({"a": 1}, 1, tags=["good", "../evil"])
    check_nothing_happened(store, claims)


def test_closed_store_reports_that(store):
    store.close()
    store.close()
    for call in (lambda: store.commit({}, 1), store.restore, store.log, store.latest, lambda: store.tag(1, "x")):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_empty_states_round_trip(store):
    for step, state in enumerate([{}, [], (), None, 0, "", np.zeros(0), {"a": np.zeros((0, 3)), "b": np.float32(1)}]):
        store.commit(state, step)
        assert difference(store.restore(step), state) is None
    assert store.verify("decode").is_clean


# Media that fail


@pytest.fixture
def mount(tmp_path):
    """Return a function that mounts a small file system; needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    mounted = []

    def mount_tmpfs(nbytes):
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(place)], capture_output=True
        )
        if done.returncode:
            pytest.skip("this machine does not let us mount")
        mounted.append(place)
        return place

    yield mount_tmpfs
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("compression", ["none", "fast"])
def test_full_disk_keeps_earlier_checkpoints(mount, compression, no_threads_left):
    folder = mount(24 << 20) / "store"
    with ckstore.open(folder, policy=ckstore.Policy(compression=compression)) as store:
        small = state_of(1, 100_000)
        store.commit(small, 1)
        before = files_below(folder / "packs"), files_below(folder / "manifests")
        with pytest.raises(CapacityError) as caught:
            store.commit({"w": np.random.default_rng(1).integers(0, 256, 40 << 20, np.uint8)}, 2)
        assert caught.value.exit_code == 14
        assert (files_below(folder / "packs"), files_below(folder / "manifests")) == before
        assert store.steps() == [1]
        assert difference(store.restore(), small) is None
        store.commit(state_of(2, 100_000), 3)
        assert store.verify("decode").is_clean


def test_any_lack_of_space_is_a_capacity_error():
    roomy = MemoryBackend()
    with ckstore.open(roomy) as store:
        store.commit(state_of(1), 1)
        used = 10**9 - _free(roomy, 10**9)
    with ckstore.open(roomy) as store:
        store.commit(state_of(2), 2)
        needed = 10**9 - _free(roomy, 10**9) - used
    outcomes = set()
    for room in range(0, needed + 8192, 997):
        backend = MemoryBackend()
        with ckstore.open(backend) as store:
            store.commit(state_of(1), 1)
        backend.nbytes_max = used + room
        with ckstore.open(backend) as store:
            try:
                store.commit(state_of(2), 2)
                outcomes.add("committed")
                assert difference(store.restore(2), state_of(2)) is None
            except CapacityError:
                outcomes.add("refused")
                assert store.steps() == [1]
            assert difference(store.restore(1), state_of(1)) is None
            assert store.verify("decode").is_clean
            backend.nbytes_max = None
            store.commit(state_of(3), 3)
            assert difference(store.restore(), state_of(3)) is None
    assert outcomes == {"committed", "refused"}


def _free(backend, nbytes_max):
    backend.nbytes_max = nbytes_max
    free = backend.free_nbytes()
    backend.nbytes_max = None
    return free


@pytest.fixture
def read_only(folder, mount):
    """A store with one checkpoint on a disk that has become read-only."""
    place = mount(24 << 20)
    with ckstore.open(place / "store") as store:
        store.commit(state_of(1), 1)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    return place


@pytest.mark.root
def test_read_only_disk_can_be_read(read_only):
    with ckstore.open(read_only / "store") as store:
        assert difference(store.restore(), state_of(1)) is None
        assert store.verify("decode").is_clean
        assert [entry.step for entry in store.log()] == [1]


@pytest.mark.root
def test_doctor_works_on_read_only_disk(read_only, capsys):
    before = files_below(read_only)
    assert ckstore_command(["doctor", str(read_only / "store")]) == 0
    assert "no: this user can only read" in capsys.readouterr().out
    assert files_below(read_only) == before


@pytest.mark.root
def test_read_only_disk_refuses_writes_with_its_path(read_only):
    before = files_below(read_only)
    with ckstore.open(read_only / "store") as store:
        for call in (
            lambda: store.commit(state_of(2), 2),
            lambda: store.tag(1, "good"),
            lambda: store.rewind(1),
            lambda: store.delete(1),
        ):
            with pytest.raises((BackendError, CapacityError)) as caught:
                call()
            assert str(read_only) in str(caught.value)
    with pytest.raises((BackendError, CapacityError)):
        ckstore.open(read_only / "other")
    assert files_below(read_only) == before


def test_world_writable_folder_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match="other users can write"):
        ckstore.open(shared)
    ckstore.open(shared, allow_shared_folder=True).close()


def test_files_are_private(disk_store, folder):
    disk_store.commit(state_of(1), 1, tags=["good"])
    modes = {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    assert {mode for name, mode in modes.items() if (folder / name).is_dir()} == {0o700}
    assert {mode for name, mode in modes.items() if (folder / name).is_file()} <= {0o600, 0o400}


def test_non_folder_address_is_unsupported():
    with pytest.raises(ckstore.UnsupportedError, match="ftp://"):
        ckstore.open("ftp://host/run")


def test_file_url_is_a_folder(tmp_path):
    with ckstore.open(f"file://{tmp_path}/store") as store:
        store.commit({"a": 1}, 1)
    assert (tmp_path / "store" / "store.json").exists()


@pytest.mark.parametrize("value", ["3", b"3", 10**400, None, [1.0]], ids=["str", "bytes", "huge", "None", "list"])
def test_non_numeric_metric_is_refused(store, value):
    with pytest.raises(UsageError, match="a metric must be a number"):
        store.commit({"a": 1}, 0, metrics={"loss": value})
    assert store.log() == []


@pytest.mark.parametrize("verb", ["commit", "commit_async"])
def test_single_string_is_one_tag(tmp_path, verb):
    with ckstore.open(tmp_path / "store") as store:
        getattr(store, verb)({"a": 1}, 5, tags="best")
        store.wait()
        assert store.tags() == {"best": 0}


@pytest.mark.parametrize("policy", ["fast", {"compression": "fast"}, ckstore.Policy])
def test_invalid_policy_is_refused_first(tmp_path, policy):
    with pytest.raises(UsageError, match=r"policy must be a ckstore\.Policy"):
        ckstore.open(tmp_path / "other", policy=policy)
    with ckstore.open(tmp_path / "store") as store:
        for verb in (store.commit, store.commit_async):
            with pytest.raises(UsageError, match=r"policy must be a ckstore\.Policy"):
                verb({"a": object()}, 1, policy=policy)
