"""Protects shared reading: exact bytes in every layout, each stored byte read once per host, and no rank that waits."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

import ckstore  # noqa: E402
from ckstore.config import Policy  # noqa: E402
from ckstore.errors import CorruptError, MissingChunkError, RankError, UsageError  # noqa: E402
from ckstore.ranks import host_memory, shared_reading  # noqa: E402
from ckstore.ranks.host_memory import HostMemory, SlotWriter  # noqa: E402
from ckstore.ranks.job import Job  # noqa: E402
from ckstore.ranks.link import Link  # noqa: E402
from ckstore.ranks.world import Ranks  # noqa: E402
from ckstore.restore import restore as restore_module  # noqa: E402
from ckstore.restore.plan import chain_of  # noqa: E402
from ckstore.restore.restore import RestoreRequest  # noqa: E402
from support.fake_ranks import local_of, mesh_of, placements_of, rank_of, sharded  # noqa: E402
from support.forked import fork  # noqa: E402
from support.rank_jobs import PlayedJob, open_repository  # noqa: E402
from support.small_chunks import open_small  # noqa: E402
from support.thread_ranks import free_port  # noqa: E402

CHUNK_NBYTES = 64 << 10
SHAPES = {"w1": (1536, 512), "w2": (512, 1536), "norm": (512,), "e": (1000, 256)}
TOKEN = "a secret of one job, 32 bytes..."
RESTORE_SECONDS = 60.0


def full_state(seed=0):
    torch.manual_seed(seed)
    return {key: torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32) for key, shape in SHAPES.items()}


def placed(full, mesh, text, *, fill):
    """Return shards of all tensors. In ``TP``, w1 is cut by columns and w2 by rows, and the rest is replicated."""
    made = {}
    for key, tensor in full.items():
        words = text
        if "TP" in text:
            words = text.replace("TP", {"w1": "S1", "w2": "S0"}.get(key, "R"))
        words = " ".join(word if word == "R" or int(word[1]) < tensor.ndim else "R" for word in words.split())
        made[key] = sharded(tensor, mesh, placements_of(words), fill=fill)
    return made


def states_of(full, lengths, text, *, fill):
    """Return the shards of every rank of a job."""
    states, world = [], math.prod(lengths)
    for rank in range(world):
        with rank_of(rank, world):
            states.append({"model": placed(full, mesh_of(*lengths), text, fill=fill)})
    return states


def commit(path, states, step=1):
    job = PlayedJob(path, len(states))
    try:
        job.commit(states, step)
    finally:
        job.close()


class Restores:
    """A job whose ranks are threads and restore together. Counts the stored bytes that they read and need."""

    def __init__(self, path, world, monkeypatch):
        self._threads = ThreadPoolExecutor(world)
        address = f"127.0.0.1:{free_port()}"
        self.read = self.decoded = self.needed = 0
        self.shared = []
        self._watch(monkeypatch)

        def join(rank):
            return Job(open_repository(path), Ranks(rank, world, address, TOKEN, per_rank="nearest", join_seconds=10.0))

        self.jobs = list(self._threads.map(join, range(world)))

    def _watch(self, monkeypatch):
        plan = restore_module.plan_restore

        def watched(manifest, storages, *, chunks=None, **how):
            made = plan(manifest, storages, chunks=chunks, **how)
            chains = [chain_of(manifest, each.frame) for each in made.buffered_reads]
            buffered = sum(ref.frame_nbytes for chain in chains for _, ref in chain)
            self.read += sum(group.nbytes for group in made.groups) + buffered
            self.decoded += sum(read.ref.frame_nbytes for read in made.reads) + buffered
            self.shared.append(chunks is not None)
            self.needed = sum(frame.frame_nbytes for frame in manifest.frames)
            return made

        monkeypatch.setattr(restore_module, "plan_restore", watched)

    def restore(self, states):
        """Restore into the states. Return the error of each rank, or None."""

        def run(rank):
            job = self.jobs[rank]
            request = RestoreRequest(states[rank], None, None, False, None, job.place)
            try:
                job.restore(Policy(threads=1), None, request, fallback=False)
            except Exception as error:
                return error
            return None

        return list(self._threads.map(run, range(len(states)), timeout=RESTORE_SECONDS))

    def close(self):
        for job in self.jobs:
            job._link.close()
            job.close()
            job._repository.close()
        self._threads.shutdown()


@pytest.fixture
def path(tmp_path):
    open_small(tmp_path / "store", CHUNK_NBYTES).close()
    return tmp_path / "store"


@pytest.fixture
def restores(path, monkeypatch):
    made = []

    def make(world):
        made.append(Restores(path, world, monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check(states, full):
    for state in states:
        for key, shard in state["model"].items():
            assert torch.equal(shard._local_tensor, local_of(full[key], shard.device_mesh, shard.placements)), key


LAYOUTS = {
    "FSDP8 to 6": (((8,), "S0"), ((6,), "S0")),
    "FSDP8 to 16": (((8,), "S0"), ((16,), "S0")),
    "FSDP8 to TP8": (((8,), "S0"), ((8,), "TP")),
    "TP8 to FSDP8": (((8,), "TP"), ((8,), "S0")),
    "FSDP4 x TP2 to TP8": (((4, 2), "S0 TP"), ((8,), "TP")),
    "FSDP8 to columns": (((8,), "S0"), ((8,), "S1")),
    "replicas": (((4,), "S0"), ((4,), "R")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_of_a_host_read_each_stored_byte_once(path, restores, name):
    saved, wanted = LAYOUTS[name]
    full = full_state()
    commit(path, states_of(full, *saved, fill=True))
    states = states_of(full, *wanted, fill=False)
    job = restores(len(states))
    assert job.restore(states) == [None] * len(states)
    check(states, full)
    assert job.read <= 1.05 * job.needed
    # All ranks took part, and none had to read again what it did not get.
    assert job.shared == [True] * len(states)


def test_what_no_rank_needs_twice_is_read_as_without_sharing(path, restores):
    # Shards of whole chunks: only the small tensors share a chunk.
    full = {"w": full_state()["w1"][:1024]}
    commit(path, states_of(full, (4,), "S0", fill=True))
    states = states_of(full, (4,), "S0", fill=False)
    job = restores(4)
    assert job.restore(states) == [None] * 4
    check(states, full)
    assert job.shared == [False] * 4


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 2, 3)], ids=["two of two", "four of one"])
def test_ranks_of_different_hosts_share_nothing(path, restores, monkeypatch, hosts):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    states = states_of(full, (4,), "R", fill=False)
    job = restores(4)
    key_of = shared_reading._key_of
    numbers = iter(hosts)
    monkeypatch.setattr(shared_reading, "_key_of", lambda manifest: key_of(manifest)[:8] + bytes([next(numbers)]))
    assert job.restore(states) == [None] * 4
    check(states, full)
    assert job.read == len(set(hosts)) * job.needed


def fail_to_open(monkeypatch, rank, error):
    """Have one rank of a host fail to open the shared memory."""
    opened = shared_reading.HostMemory

    def memory(fd, count, own, *args):
        if own == rank:
            raise error
        return opened(fd, count, own, *args)

    monkeypatch.setattr(shared_reading, "HostMemory", memory)


def test_a_rank_without_memory_of_its_own_reads_alone(path, restores, monkeypatch):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    states = states_of(full, (4,), "R", fill=False)
    fail_to_open(monkeypatch, 1, MemoryError())
    assert restores(4).restore(states) == [None] * 4
    check(states, full)


@pytest.mark.parametrize("where", ["rows", "slots", "one slot"])
def test_without_memory_each_rank_reads_alone(path, restores, monkeypatch, where):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    states = states_of(full, (4,), "R", fill=False)
    job = restores(4)
    allocate, calls = os.posix_fallocate, []

    def refuse(fd, begin, nbytes):
        calls.append(begin)
        if where == "rows" or (where == "slots" and begin) or (where == "one slot" and len(calls) == 12):
            raise OSError(28, "No space left on device")
        allocate(fd, begin, nbytes)

    monkeypatch.setattr(host_memory.os, "posix_fallocate", refuse)
    assert job.restore(states) == [None] * 4
    check(states, full)
    assert (1.05 * job.needed < job.read < 4 * job.needed) if where == "one slot" else job.read == 4 * job.needed


def test_a_changed_slot_is_noticed_and_the_chunk_read_again(path, restores, monkeypatch):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    states = states_of(full, (4,), "R", fill=False)
    job = restores(4)
    slot, counts = HostMemory.slot, []

    def changed(self, member, number, nbytes):
        view = slot(self, member, number, nbytes)
        if member != self.own:
            counts.append(nbytes)
            if len(counts) % 5 == 0:
                view[nbytes // 2] ^= 1
        return view

    monkeypatch.setattr(HostMemory, "slot", changed)
    assert job.restore(states) == [None] * 4
    check(states, full)
    assert 1.05 * job.needed < job.read < 3 * job.needed


def test_a_damaged_chunk_is_the_same_error_on_all_ranks(path, restores):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    pack = max(path.glob("packs/*/*.pack"), key=lambda each: each.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    job = restores(4)
    errors = job.restore(states_of(full, (4,), "R", fill=False))
    assert all(isinstance(error, CorruptError) and pack.stem in str(error) for error in errors), errors


@pytest.mark.parametrize("hosts", ["one host", "four hosts", "no shared memory"])
def test_if_one_rank_cannot_restore_no_rank_changes_a_byte(path, restores, monkeypatch, hosts):
    if hosts == "four hosts":
        monkeypatch.setattr(shared_reading, "_key_of", lambda manifest: os.urandom(9))
    if hosts == "no shared memory":
        monkeypatch.setattr(shared_reading, "_memory_file", lambda: contextlib.nullcontext(None))
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    states = states_of(full, (4,), "R", fill=False)
    states[2]["model"].pop("w1")
    states[2]["model"]["other"] = states[0]["model"]["w1"]
    job = restores(4)
    errors = job.restore(states)
    assert all(isinstance(error, UsageError) for error in errors), errors
    assert all("rank 2" in str(errors[rank]) for rank in (0, 1, 3))
    assert not job.read
    assert not any(shard._local_tensor.any() for shard in states[0]["model"].values())


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_before_it_shares_fails_the_restore_of_all(path, restores, monkeypatch, failing):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    fail_to_open(monkeypatch, failing, ValueError("a fault of the program"))
    job = restores(4)
    states = states_of(full, (4,), "R", fill=False)
    errors = job.restore(states)
    assert isinstance(errors[failing], ValueError)
    assert all(f"rank {failing}: a fault" in str(error) for rank, error in enumerate(errors) if rank != failing), errors
    assert not any(shard._local_tensor.any() for state in states for shard in state["model"].values())


@pytest.mark.parametrize(
    ("rank", "question"), [(0, "restore (reading)"), (1, "restore (reading)"), (1, "restore (memory)")]
)
def test_a_rank_that_is_interrupted_while_it_waits_fails_the_restore_of_all(
    path, restores, monkeypatch, rank, question
):
    full = {"norm": full_state()["norm"]}
    commit(path, states_of(full, (3,), "S0", fill=True))
    job = restores(3)
    wait, asked = Link.wait, []

    def interrupted(self, until, seconds):
        if self.rank == rank and until == (question, 1) and not asked:
            # As a handler of a signal does.
            asked.append(until)
            raise TimeoutError("the time of this job is over")
        return wait(self, until, seconds)

    monkeypatch.setattr(Link, "wait", interrupted)
    states = states_of(full, (3,), "R", fill=False)
    errors = job.restore(states)
    assert isinstance(errors[rank], TimeoutError)
    assert all("the time of this job is over" in str(error) for error in errors), errors
    # The next one is not disturbed.
    assert job.restore(states) == [None] * 3
    check(states, full)


def test_another_file_under_the_number_of_the_memory_is_not_touched(tmp_path):
    place = tmp_path / "file of the user"
    place.write_bytes(b"content")
    with place.open("r+b") as file:
        sharing = shared_reading.SharedReading(SimpleNamespace(rank=0, is_broken=False))
        group = shared_reading._Group(os.getpid(), file.fileno(), (0, 1))
        manifest = SimpleNamespace(chunks=[None] * 100, storages=[])
        assert sharing._opened(group, manifest, []) is None
    assert place.read_bytes() == b"content"


def test_packs_that_vanish_are_read_again_from_where_they_are_now(path, restores, monkeypatch):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    states = states_of(full, (4,), "R", fill=False)
    job = restores(4)
    decode_all, failed = restore_module.decode_all, []

    def failing(repository, *args, **how):
        if repository is job.jobs[1]._repository and not failed:
            failed.append(1)
            raise MissingChunkError("a pack was replaced")
        return decode_all(repository, *args, **how)

    monkeypatch.setattr(restore_module, "decode_all", failing)
    monkeypatch.setattr(restore_module, "_choose", lambda repository, ref: (next(manifests), []))
    found = open_repository(path)
    manifest = restore_module.load_whole(found, restore_module.resolve(found, "latest"), takes_lower=True)
    # Of the rank that repeats, the second is another generation.
    other = replace(manifest, header=replace(manifest.header, generation=1))
    manifests = iter([manifest] * 4 + [other])
    assert job.restore(states) == [None] * 4
    found.close()
    check(states, full)


@pytest.mark.parametrize("step", range(3))
def test_deltas_and_roundings_are_shared(path, restores, step):
    def state(step, *, fill):
        rng = np.random.default_rng(7)
        weights = rng.standard_normal(300_000).astype(np.float32)
        for _ in range(step):
            weights = weights + rng.standard_normal(weights.size).astype(np.float32) * np.float32(1e-5)
        made = {"master": weights, "model": weights.astype(np.float16)}
        return made if fill else {key: np.zeros_like(each) for key, each in made.items()}

    with ckstore.open(path) as store:
        for each in range(step + 1):
            store.commit(state(each, fill=True), each)
    states = [state(step, fill=False) for _ in range(4)]
    job = restores(4)
    assert job.restore(states) == [None] * 4
    for each in states:
        assert all(np.array_equal(each[key], want) for key, want in state(step, fill=True).items())
    # Chunks are so short here that a read goes over those of other ranks.
    assert job.decoded <= 1.05 * job.needed
    assert job.shared == [True] * 4


# Ranks that end


def test_a_rank_that_fails_while_reading_fails_the_restore_of_all(path, restores, monkeypatch):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    job = restores(4)
    write, counts = SlotWriter.write, []

    def failing(self, chunk, plain):
        if self._memory.own == 2:
            counts.append(chunk)
            if len(counts) == 5:
                raise ValueError("a bug")
        write(self, chunk, plain)

    monkeypatch.setattr(SlotWriter, "write", failing)
    errors = job.restore(states_of(full, (4,), "R", fill=False))
    assert isinstance(errors[2], ValueError)
    assert all("rank 2: a bug" in str(errors[rank]) for rank in (0, 1, 3)), errors


def test_a_rank_that_is_killed_while_reading_fails_the_restore_of_all(path, monkeypatch):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    states, address = states_of(full, (4,), "R", fill=False), f"127.0.0.1:{free_port()}"

    def be_rank(rank):
        job = Job(open_repository(path), Ranks(rank, 4, address, TOKEN))
        if rank == 2:
            monkeypatch.setattr(SlotWriter, "write", lambda self, chunk, plain: os.kill(os.getpid(), signal.SIGKILL))
        request = RestoreRequest(states[rank], None, None, False, None, job.place)
        with pytest.raises(RankError, match=r"rank 2 .*closed"):
            job.restore(Policy(threads=1), None, request, fallback=False)

    ends = [fork(partial(be_rank, rank), seconds_max=60) for rank in range(4)]
    for end in (ends[0], ends[1], ends[3]):
        end()
    with pytest.raises(AssertionError):
        ends[2]()


def test_nothing_remains_when_a_restore_has_ended(path, restores):
    full = full_state()
    commit(path, states_of(full, (4,), "S0", fill=True))
    job = restores(4)
    gc.collect()
    gc.disable()
    try:
        before = memory_files()
        assert job.restore(states_of(full, (4,), "R", fill=False)) == [None] * 4
        assert memory_files() == before
    finally:
        gc.enable()


def memory_files():
    """Return how many descriptors and mappings of shared memory this process has."""
    fds = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            fds += "ckstore-reading" in str(link.readlink())
    return fds, Path("/proc/self/maps").read_text().count("ckstore-reading")
