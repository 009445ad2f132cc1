"""What a commit promises: durable when it returns, nothing visible when it raises, and every bad call refused.

Memory backends stand for the disk where the medium does not matter; full and read-only disks are real ones.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.errors import (
    BackendError,
    CapacityError,
    ChecksumError,
    ConflictError,
    CorruptError,
    LeafTypeError,
    UsageError,
)
from ckstore.io.memory import MemoryBackend
from ckstore.testing.model import difference

SRC = str(Path(ckstore.__file__).parent.parent)


def state_of(seed, count=64):
    source = np.random.default_rng(seed)
    return {
        "model": {"w": source.standard_normal(count).astype(np.float32), "b": source.integers(0, 255, 7, np.uint8)},
        "optimizer": [{"step": seed, "lr": 1e-3, "m": source.standard_normal((3, 5))}],
        "seed": seed,
    }


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# The receipt


def test_receipt_tells_what_was_done(store):
    receipt = store.commit(state_of(1, 300_000), 7, metrics={"loss": 1.5})
    assert (receipt.step, receipt.seq) == (7, 0)
    assert receipt.bytes_state == 300_000 * 4 + 7 + 15 * 8
    assert receipt.bytes_written > 1_000_000
    assert (receipt.chunks_new, receipt.chunks_reused) == (3, 0)
    assert (receipt.chunks_delta, receipt.chunks_derived) == (0, 0)
    assert re.fullmatch("[0-9a-f]{64}", receipt.checkpoint_id)
    assert {"stage", "plan", "write", "flush", "publish", "verify", "total"} <= set(receipt.seconds)
    stages = sum(seconds for stage, seconds in receipt.seconds.items() if stage != "total")
    assert 0 <= stages <= receipt.seconds["total"]
    assert receipt.warnings == ()


def test_receipt_names_the_engine_that_wrote(folder):
    with ckstore.open(folder, engine="pwrite") as store:
        assert store.commit(state_of(1), 1).engine == "pwrite"


def test_bytes_written_are_the_bytes_of_new_packs(disk_store, folder):
    for step in range(2):
        before = sum(path.stat().st_size for path in folder.rglob("*.pack"))
        receipt = disk_store.commit(state_of(step, 50_000), step)
        after = sum(path.stat().st_size for path in folder.rglob("*.pack"))
        assert receipt.bytes_written == after - before


# Stored once


def test_unchanged_state_writes_no_pack(disk_store, folder):
    disk_store.commit(state_of(1, 100_000), 1)
    before = files_below(folder / "packs")
    receipt = disk_store.commit(state_of(1, 100_000), 2)
    assert (receipt.bytes_written, receipt.chunks_new, receipt.chunks_reused) == (0, 0, 3)
    assert files_below(folder / "packs") == before
    assert disk_store.verify("decode").is_clean


def test_equal_tensors_within_a_state_are_stored_once(store):
    big = np.arange(200_000.0)
    receipt = store.commit({"a": big, "b": big.copy(), "c": {"d": big.copy()}}, 1)
    assert (receipt.chunks_new, receipt.chunks_reused) == (1, 2)
    assert receipt.bytes_state == 3 * big.nbytes
    back = store.restore()
    assert back["a"] is not back["b"]
    assert difference(back, {"a": big, "b": big, "c": {"d": big}}) is None


def test_only_what_changed_is_written(store):
    state = {"a": np.zeros(200_000), "b": np.ones(200_000)}
    store.commit(state, 1)
    state["b"] = np.full(200_000, 2.0)
    receipt = store.commit(state, 2)
    assert (receipt.chunks_new, receipt.chunks_reused) == (1, 1)


def test_chunks_are_shared_between_runs(backend):
    state = state_of(3, 200_000)
    with ckstore.open(backend, run="first") as one:
        one.commit(state, 1)
    with ckstore.open(backend, run="second") as other:
        receipt = other.commit(state, 1)
        assert receipt.chunks_new == 0
        assert difference(other.restore(), state) is None
        assert other.runs() == ["first", "second"]


def test_chunks_are_known_again_after_reopening(backend):
    state = state_of(3, 200_000)
    with ckstore.open(backend) as store:
        store.commit(state, 1)
    with ckstore.open(backend) as store:
        assert store.commit(state, 2).chunks_new == 0


def test_two_versions_of_a_shared_value_are_both_kept(store):
    for step in range(4):
        store.commit({"n": np.full(10, step % 2)}, step)
    assert [int(store.restore(step)["n"][0]) for step in range(4)] == [0, 1, 0, 1]
    assert store.log()[0].chunks_new == 0


# Policies


@pytest.mark.parametrize("compression", ["none", "fast", "best"])
@pytest.mark.parametrize("verify_encoded", [True, False])
def test_every_policy_brings_the_same_state_back(store, compression, verify_encoded):
    state = state_of(2, 300_000)
    policy = ckstore.Policy(compression=compression, verify_encoded=verify_encoded, threads=3)
    store.commit(state, 1, policy=policy)
    assert difference(store.restore(), state) is None
    assert store.verify("decode").is_clean


def test_compressing_policies_write_less(backend):
    state = {"w": (np.random.default_rng(1).standard_normal(500_000) / 50).astype(np.float32)}
    written = {}
    for compression in ("none", "fast", "best"):
        with ckstore.open(MemoryBackend(), policy=ckstore.Policy(compression=compression)) as store:
            written[compression] = store.commit(state, 1).bytes_written
    assert written["fast"] < 0.9 * written["none"]
    assert written["best"] <= written["fast"] * 1.01


@pytest.mark.parametrize(
    "fields",
    [
        {"compression": "zip"},
        {"fidelity": "lossy"},
        {"verify_restored": "md5"},
        {"threads": 0},
        {"threads": 1000},
        {"memory_nbytes_max": 1000},
    ],
    ids=str,
)
def test_policy_with_impossible_fields_is_refused(fields):
    with pytest.raises(UsageError):
        ckstore.Policy(**fields)


# Bad calls: refused, and nothing of them is visible


class Stranger:
    pass


def check_nothing_happened(store, backend_files):
    assert store.steps() == []
    assert backend_files() == []


@pytest.fixture
def claims(backend):
    return lambda: [name for name in backend._files if name.startswith(("claims/", "packs/", "manifests/"))]


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {"b": [1, Stranger()]}}, "a.b.1"),
        ({"a": {1, 2}}, "a"),
        ({"f": lambda: None}, "f"),
        ([{"x": Stranger}], "0.x"),
        ({"o": np.array([object()])}, "o"),
        ({"d": range(3)}, "d"),
        ({"d": bytearray(b"x")}, "d"),
        (Stranger(), "the state itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_leaf_of_unknown_type_names_its_path_and_the_way_out(store, claims, state, path):
    with pytest.raises(LeafTypeError) as caught:
        store.commit(state, 1)
    assert path in str(caught.value)
    assert "register_converter" in str(caught.value)
    check_nothing_happened(store, claims)


@pytest.mark.parametrize("key", [1.5, None, True, (1, 2), b"x", np.int64(3), 2**63], ids=repr)
def test_key_that_is_neither_text_nor_int_is_refused_with_its_place(store, claims, key):
    with pytest.raises(UsageError) as caught:
        store.commit({"model": {key: 1}}, 1)
    assert "model" in str(caught.value)
    check_nothing_happened(store, claims)


def test_keys_that_look_alike_in_dots_stay_apart(store):
    state = {"a": {"b": 1, 1: 2, "1": 3}, "a.b": 4, 7: 5, "7": 6, "": {"": 7}}
    store.commit(state, 1)
    assert difference(store.restore(), state) is None


def test_state_that_holds_itself_is_refused(store, claims):
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(UsageError, match=r"a\.0"):
        store.commit(state, 1)
    check_nothing_happened(store, claims)


@pytest.mark.parametrize("step", [-1, 1.0, "3", None, True, b"1", 10**18, [1]], ids=repr)
def test_step_that_is_no_natural_number_is_refused(store, claims, step):
    with pytest.raises(UsageError, match="step"):
        store.commit({"a": 1}, step)
    check_nothing_happened(store, claims)


def test_integers_of_numpy_are_steps(store):
    assert store.commit({"a": 1}, np.int64(5)).step == 5
    assert store.commit({"a": 1}, 10**18 - 1).step == 10**18 - 1
    assert store.steps() == [5, 10**18 - 1]


@pytest.mark.parametrize(
    "metrics", [{"loss": "low"}, {"loss": None}, {"": 1.0}, {"a:b": 1.0}, {5: 1.0}, {"x" * 129: 1.0}], ids=str
)
def test_metrics_that_are_no_numbers_or_names_are_refused(store, claims, metrics):
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


def test_closed_store_says_so(store):
    store.close()
    store.close()
    for call in (lambda: store.commit({}, 1), store.restore, store.log, store.latest, lambda: store.tag(1, "x")):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_empty_states_are_states(store):
    for step, state in enumerate([{}, [], (), None, 0, "", np.zeros(0), {"a": np.zeros((0, 3)), "b": np.float32(1)}]):
        store.commit(state, step)
        assert difference(store.restore(step), state) is None
    assert store.verify("decode").is_clean


# Media that fail


@pytest.fixture
def mount(tmp_path):
    """Return a function that mounts a small file system of its own; needs root."""
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
def test_full_disk_is_a_capacity_error_and_leaves_earlier_checkpoints_intact(mount, compression, no_threads_left):
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


def test_every_amount_of_missing_room_is_a_capacity_error_and_nothing_half_visible():
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
        backend._nbytes_max = used + room
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
            backend._nbytes_max = None
            store.commit(state_of(3), 3)
            assert difference(store.restore(), state_of(3)) is None
    assert outcomes == {"committed", "refused"}


def _free(backend, nbytes_max):
    backend._nbytes_max = nbytes_max
    free = backend.free_nbytes()
    backend._nbytes_max = None
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
def test_read_only_disk_refuses_commits_and_new_stores_with_its_place(read_only):
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


def test_folder_that_others_may_write_is_refused_unless_allowed(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match="others may write"):
        ckstore.open(shared)
    ckstore.open(shared, allow_shared_folder=True).close()


def test_files_are_for_their_owner_only(disk_store, folder):
    disk_store.commit(state_of(1), 1, tags=["good"])
    modes = {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    assert {mode for name, mode in modes.items() if (folder / name).is_dir()} == {0o700}
    assert {mode for name, mode in modes.items() if (folder / name).is_file()} <= {0o600, 0o400}


def test_address_that_is_no_folder_is_unsupported():
    with pytest.raises(ckstore.UnsupportedError, match="s3://"):
        ckstore.open("s3://bucket/run")


def test_file_url_is_a_folder(tmp_path):
    with ckstore.open(f"file://{tmp_path}/store") as store:
        store.commit({"a": 1}, 1)
    assert (tmp_path / "store" / "store.json").exists()


# A state that changes while it is committed


@pytest.mark.parametrize("compression", ["none", "fast"])
@pytest.mark.parametrize("verify_encoded", [True, False])
def test_state_changed_during_a_commit_never_makes_a_wrong_checkpoint(store, compression, verify_encoded):
    array = np.random.default_rng(1).standard_normal(1_500_000).astype(np.float32)
    words = array.view(np.uint32)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            words[::1000] += 1

    policy = ckstore.Policy(compression=compression, verify_encoded=verify_encoded, threads=2)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for step in range(8):
            before = set(store.steps())
            try:
                store.commit({"w": array}, step, policy=policy)
            except CorruptError as error:
                assert "changed while it was being committed" in str(error)
                assert set(store.steps()) == before
    finally:
        stop.set()
        thread.join()
    for step in store.steps():
        if verify_encoded:
            assert store.restore(step)["w"].shape == array.shape
        else:
            try:
                store.restore(step)
            except ChecksumError:
                pass
    if verify_encoded:
        assert store.verify("decode").is_clean


def test_change_between_hashing_and_copying_is_caught(store, monkeypatch):
    array = np.arange(300_000.0)
    from ckstore.pipeline import ChunkWorker

    original = ChunkWorker.encode

    def change_then_encode(self, plain, chunk, compression):
        array[7] += 1
        return original(self, plain, chunk, compression)

    monkeypatch.setattr(ChunkWorker, "encode", change_then_encode)
    with pytest.raises(CorruptError, match="Do not modify the state"):
        store.commit({"w": array}, 1)
    assert store.steps() == []
    monkeypatch.undo()
    store.commit({"w": array}, 1)
    assert difference(store.restore(), {"w": array}) is None


# Two writers


def test_second_writer_of_a_run_is_refused_and_may_still_read(backend):
    with ckstore.open(backend) as one, ckstore.open(backend) as other:
        one.commit(state_of(1), 1)
        with pytest.raises(ConflictError, match=f"pid {os.getpid()}"):
            other.commit(state_of(2), 2)
        assert difference(other.restore(), state_of(1)) is None
        one.commit(state_of(3), 3)
        one.close()
        assert other.commit(state_of(2), 2).seq == 2


def test_writers_of_two_runs_do_not_meet(backend):
    with ckstore.open(backend, run="a") as one, ckstore.open(backend, run="b") as other:
        one.commit(state_of(1), 1)
        other.commit(state_of(2), 1)
        assert difference(one.restore(), state_of(1)) is None
        assert difference(other.restore(), state_of(2)) is None


def test_two_writers_without_any_lease_lose_nothing(backend, monkeypatch):
    # The lease is for people; claims carry safety.
    from ckstore.store.lease import Lease

    monkeypatch.setattr(Lease, "take", lambda self: None)
    monkeypatch.setattr(Lease, "check", lambda self: None)
    stores = [ckstore.open(backend) for _ in range(3)]
    receipts = []

    def write(number):
        for step in range(8):
            seed = number * 100 + step
            receipts.append((stores[number].commit(state_of(seed), step).seq, seed))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seq for seq, _ in receipts) == list(range(24))
    for seq, seed in receipts:
        assert difference(stores[0].restore(f"seq:{seq}"), state_of(seed)) is None
    assert stores[0].verify("decode").is_clean
    for store in stores:
        store.close()


def test_commits_of_many_threads_on_one_handle_all_count(store):
    receipts = []
    threads = [
        threading.Thread(target=lambda number=number: receipts.append(store.commit(state_of(number), number)))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(receipt.seq for receipt in receipts) == list(range(8))
    for receipt in receipts:
        assert difference(store.restore(f"seq:{receipt.seq}"), state_of(receipt.step)) is None


# SIGKILL, Ctrl-C, fork

TRAINER = f"""
import sys
sys.path.insert(0, {SRC!r})
import numpy as np, ckstore
store = ckstore.open(sys.argv[1])
for step in range(int(sys.argv[2]), 10_000):
    store.commit({{"w": np.full(400_000, step), "step": step}}, step)
    print(step, flush=True)
"""


def test_killed_trainer_loses_nothing_that_was_acknowledged(folder):
    acknowledged = -1
    for delay in (0.0, 0.01, 0.03, 0.07):
        command = [sys.executable, "-c", TRAINER, str(folder), str(acknowledged + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(3)]
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        acknowledged = max(int(line) for line in lines if line.endswith("\n"))
        with ckstore.open(folder) as store:
            newest = store.restore()
            assert newest["step"] in (acknowledged, acknowledged + 1)
            assert (newest["w"] == newest["step"]).all()
            assert set(range(acknowledged + 1)) <= set(store.steps())
            acknowledged = newest["step"]
    with ckstore.open(folder) as store:
        assert store.verify("decode").is_clean


def interrupted(delay, call):
    """Call, with a Ctrl-C some seconds later; return whether the call ended before it."""

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Timer(delay, interrupt)
    is_done = False
    try:
        timer.start()
        call()
        is_done = True
        timer.join()
        time.sleep(0.2)
    except KeyboardInterrupt:
        return is_done
    raise AssertionError("the interrupt was swallowed")


def test_interrupted_commit_leaves_a_working_store_and_no_threads(folder, no_threads_left):
    array = np.random.default_rng(1).integers(0, 256, 16 << 20, np.uint8)
    outcomes = []
    with ckstore.open(folder, policy=ckstore.Policy(threads=2)) as store:
        store.commit({"n": 0}, 0)
        for number, delay in enumerate([0.0, 0.001, 0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08], 1):
            array[0::1000] += 1
            outcomes.append(interrupted(delay, lambda n=number: store.commit({"w": array, "n": n}, n)))
            assert store.restore()["n"] in (number - 1, number)
            store.commit({"w": array, "n": number}, number)
            assert store.restore()["n"] == number
        assert not all(outcomes)
        assert store.verify("read").is_clean
        used = {pack for name in store._parts.manifests.listing().names
                for pack in (ref.pack_id.hex() for ref in store._parts.manifests.load(name).packs)}  # fmt: skip
        left = {path.stem for path in folder.rglob("*.pack")}
        assert left == used, "an interrupted commit removes its packs"


def test_interrupted_restore_leaves_a_working_store_and_no_threads(folder, no_threads_left):
    state = {"w": [np.random.default_rng(n).standard_normal(700_000) for n in range(4)]}
    with ckstore.open(folder, policy=ckstore.Policy(threads=2)) as store:
        store.commit(state, 1)
        outcomes = [interrupted(delay, store.restore) for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)]
        assert not all(outcomes)
        assert difference(store.restore(), state) is None


FORKING = f"""
import os, sys
sys.path.insert(0, {SRC!r})
import numpy as np, ckstore
state = {{"w": np.arange(300_000.0)}}
store = ckstore.open(sys.argv[1])
store.commit(state, 1)
store.restore()
print("parent", os.getpid(), flush=True)
child = os.fork()
if child == 0:
    for name, handle in (("old", store), ("new", ckstore.open(sys.argv[1]))):
        back = handle.restore()
        print(name, "reads", bool((back["w"] == state["w"]).all()), handle.verify("decode").is_clean, flush=True)
        try:
            handle.commit(state, 2)
            print(name, "committed", flush=True)
        except ckstore.ConflictError as error:
            print(name, "conflict", error.pid, flush=True)
        handle.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store.commit(state, 3)
print("steps", store.steps(), flush=True)
store.close()
child = os.fork()
if child == 0:
    with ckstore.open(sys.argv[1]) as mine:
        mine.commit(state, 4)
        print("steps", mine.steps(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("engine", ["auto", "pwrite"])
def test_forked_child_may_read_and_is_refused_as_second_writer(folder, engine):
    code = FORKING.replace("sys.argv[1])", f"sys.argv[1], engine={engine!r})")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    parent, *lines = done.stdout.splitlines()
    pid = parent.split()[1]
    assert lines == [
        "old reads True True",
        f"old conflict {pid}",
        "new reads True True",
        f"new conflict {pid}",
        "steps [1, 3]",
        "steps [1, 3, 4]",
    ]
