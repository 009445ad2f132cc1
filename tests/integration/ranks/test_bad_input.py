"""What goes wrong in a job of many ranks: every rank gets an error that names the rank, the place and the remedy."""

from __future__ import annotations

import errno

import pytest
import torch

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import CapacityError, ConflictError, LeafTypeError, NotFoundError, RankError, UsageError
from ckstore.ops import commit
from ckstore.ranks import opening
from ckstore.ranks.work import Root
from support.late_folders import LateFolder
from support.store_ranks import StoreRanks

WORLD = 3
WEIGHTS = torch.arange(1000.0)
HOUR = 3600.0
JOIN_SECONDS = 2.0
"""How long ranks wait for one that the test keeps away."""


@pytest.fixture
def jobs():
    """Return a function that starts a job; jobs are closed at the end."""
    started = []

    def start(world=WORLD, **options):
        started.append(StoreRanks(world, **options))
        return started[-1]

    yield start
    for job in started:
        job.close()


@pytest.fixture
def job(jobs, tmp_path):
    """A job that has opened one store."""
    job = jobs()
    found = job.open(lambda rank: tmp_path / "store")
    assert all(isinstance(each, ckstore.Store) for each in found), found
    return job


def state(rank):
    return {"w": WEIGHTS, "step": 1}


def check_errors(found, kind, *texts):
    """Check that all are errors of a kind, and that each has all texts."""
    for each in found:
        assert isinstance(each, kind), found
        for text in texts:
            assert text in str(each), str(each)


def check_receipts(found):
    """Check that all ranks got the receipt of one checkpoint; return its warnings."""
    assert all(isinstance(each, ckstore.Receipt) for each in found), found
    assert len({each.checkpoint_id for each in found}) == 1
    return found[0].warnings


def test_other_steps(job, tmp_path):
    found = job.commit(state, lambda rank: 7 if rank == 2 else 5)
    check_errors(found, UsageError, "step is 5 on rank", "and 7 on rank 2. Pass the same step on every rank")
    check_receipts(job.commit(state))


def test_other_policies(job):
    policies = [ckstore.Policy(compression="none"), *[ckstore.Policy(compression="fast")] * 2]
    found = job.stores_do(lambda store, rank: store.commit(state(rank), 1, policy=policies[rank]))
    check_errors(found, UsageError, "policy setting compression is 'none' on rank 0 and", "on every rank")
    assert "delta" not in str(found[0]), "only what differs is named"


@pytest.mark.parametrize("what", ["store", "run"])
def test_other_stores_and_runs_are_found_when_they_are_opened(jobs, tmp_path, what):
    for name in ("a", "b"):
        ckstore.open(tmp_path / name).close()
    names = ["a", "b", "a"]
    if what == "store":
        found = jobs().open(lambda rank: tmp_path / names[rank])
        check_errors(found, UsageError, f"{tmp_path}/a on rank 0, {tmp_path}/b on rank 1. Pass the same path")
    else:
        found = jobs().open(lambda rank: tmp_path / "a", run=lambda rank: names[rank])
        check_errors(found, UsageError, "'a' on rank 0, 'b' on rank 1", str(tmp_path), "Pass the same run")


def test_store_that_one_rank_does_not_see(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "VISIBLE_SECONDS", 0.5)
    found = jobs().open(lambda rank: tmp_path / ("store" if rank != 1 else "not-mounted"))
    check_errors(found, NotFoundError, "rank 1 does not see the store that rank 0 has opened", "not-mounted", "mount")


def test_no_store(jobs, tmp_path):
    found = jobs().open(lambda rank: tmp_path / "store", create=False)
    check_errors(found, NotFoundError, "there is no store here", str(tmp_path), "Check the path")


def test_other_trees_are_stored_and_named(job):
    cases = [
        ("a list and a dict", lambda rank: [WEIGHTS] if rank == 2 else {"a": WEIGHTS}),
        ("shapes", lambda rank: WEIGHTS[: 10 if rank == 2 else 20]),
        ("dtypes", lambda rank: WEIGHTS.half() if rank == 2 else WEIGHTS),
        ("values", lambda rank: 0.5 if rank == 2 else 0.1),
        ("bytes", lambda rank: WEIGHTS + (rank == 2)),
        ("lengths", lambda rank: [1] * (2 if rank == 2 else 1)),
    ]
    for step, (name, make) in enumerate(cases):
        key = f"x{step}"
        (warning,) = check_receipts(job.commit(lambda rank, make=make, key=key: {key: make(rank)}))
        assert warning.startswith(f"{key}: "), name
        assert " on rank 2 from " in warning, name
        assert warning.endswith("if that is intended, mark it with ckstore.PerRank"), name
        # It is said once, and never of what is marked.
        assert not check_receipts(job.commit(lambda rank, make=make, key=key: {key: make(rank)})), name
        marked = f"marked{step}"
        marking = job.commit(lambda rank, make=make, marked=marked: {marked: ckstore.PerRank(make(rank))})
        assert not check_receipts(marking), name


def test_many_values_that_differ_have_a_few_warnings(job):
    warnings = check_receipts(job.commit(lambda rank: {f"x{number}": rank for number in range(20)}))
    assert len(warnings) == 9
    assert warnings[0].startswith("x0: differs on ranks 1, 2 from rank 0")
    assert warnings[-1] == "12 further values differ between ranks"


def test_empty_states_on_some_ranks(job):
    assert not check_receipts(job.commit(lambda rank: {} if rank == 1 else state(rank)))
    into = job.each(
        lambda rank: job.stores[rank].restore(into={} if rank == 1 else {"w": torch.zeros(1000), "step": 0})
    )
    assert into[1] == {}
    assert torch.equal(into[0]["w"], WEIGHTS)
    assert torch.equal(into[2]["w"], WEIGHTS)
    assert not check_receipts(job.commit(lambda rank: {}, lambda rank: 2))
    assert job.stores_do(lambda store, rank: store.restore()) == [{}] * WORLD


def test_leaf_that_cannot_be_stored(job):
    found = job.commit(lambda rank: {"w": object() if rank == 1 else WEIGHTS})
    check_errors(found, LeafTypeError, "builtins.object cannot be stored", "w. Leave it out")
    check_errors([found[0], found[2]], LeafTypeError, "rank 1: w")
    check_receipts(job.commit(state))


def test_rank_that_raises_before_the_commit(job):
    def train(rank):
        if rank == 2:
            job.ranks[2].close()
            raise ValueError("the data loader failed")
        return job.stores[rank].commit(state(rank), 1)

    found = job.each(train)
    check_errors(found[:2], RankError, "rank 2 has ended or closed its store: the commit of step 1 failed on all ranks")
    check_errors(found[:2], RankError, "Start the job again; it continues from the newest checkpoint")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda store: store.commit({"w": WEIGHTS}, 5), "begin the commit of step 5"),
        (lambda store: store.restore(), "take part in 'restore'"),
        (lambda store: store.restore(into={"w": torch.zeros(1000)}), "take part in 'restore'"),
        (lambda store: store.latest(), "take part in 'latest'"),
    ],
    ids=["commit", "restore", "restore into", "latest"],
)
def test_rank_that_makes_no_call(jobs, tmp_path, call, said):
    job = jobs(join_seconds=JOIN_SECONDS)
    job.open(lambda rank: tmp_path / "store")
    found = job.each(lambda rank: call(job.stores[rank]), ranks=[0, 2])
    check_errors(found, RankError, f"rank 1 did not {said} within {JOIN_SECONDS:g} s", "on every rank")


def test_rank_that_never_started(jobs, tmp_path):
    job = jobs(join_seconds=JOIN_SECONDS)
    found = job.each(lambda rank: ckstore.open(tmp_path / "store", ranks=job.ranks[rank]), ranks=[0, 1])
    check_errors(found, RankError, "rank 2 did not take part in 'open' within", "rank never connected, rank 2 first")
    job = jobs(join_seconds=JOIN_SECONDS)
    found = job.each(lambda rank: ckstore.open(tmp_path / "store", ranks=job.ranks[rank]), ranks=[1, 2])
    check_errors(found, RankError, "could not reach rank 0 within", "127.0.0.1", "Check that rank 0 runs")


def test_two_jobs_in_one_run(job, jobs, tmp_path):
    check_receipts(job.commit(state))
    other = jobs()
    other.open(lambda rank: tmp_path / "store")
    check_errors(
        other.commit(state, lambda rank: 2), ConflictError, "run 'main' is being written by pid", "leases/main"
    )
    check_receipts(job.commit(state, lambda rank: 3))


def test_world_that_changes_between_commits(jobs, tmp_path):
    def make(rank):
        return {"w": WEIGHTS, "own": ckstore.PerRank(rank)}

    for step, world in enumerate((3, 2, 4), start=1):
        job = jobs(world, per_rank="nearest")
        job.open(lambda rank: tmp_path / "store")
        if step > 1:
            into = job.stores_do(lambda store, rank: store.restore(into=make(-1)))
            before = (3, 2, 4)[step - 2]
            assert [each["own"].value for each in into] == [rank % before for rank in range(world)]
        check_receipts(job.commit(make, lambda rank, step=step: step))
        job.close()
    store = ckstore.open(tmp_path / "store")
    assert [store.info(f"seq:{seq}").parent for seq in range(3)] == [None, 0, 1]


def test_rank_that_was_not_saved(jobs, tmp_path):
    for world in (2, 3):
        job = jobs(world)
        job.open(lambda rank: tmp_path / "store")
        if world == 2:
            check_receipts(job.commit(lambda rank: {"rng": ckstore.PerRank(rank)}))
        else:
            found = job.stores_do(lambda store, rank: store.restore(into={"rng": 0}))
            check_errors(found, UsageError, "no value of rank 2", "saved by 2 ranks", ": rng. ", "per_rank='nearest'")
        job.close()


def test_ranks_that_restore_different_checkpoints(job):
    for step in (1, 2):
        check_receipts(job.commit(state, lambda rank, step=step: step))
    found = job.stores_do(lambda store, rank: store.restore("seq:0" if rank else "latest"))
    check_errors(found, UsageError, "rank 0 latest, rank 1 seq:0", "with the same arguments on all ranks")
    found = job.stores_do(lambda store, rank: store.restore(fallback=rank == 2))
    check_errors(found, UsageError, "rank 0 None, rank 2 None, fallback=True")
    found = job.stores_do(lambda store, rank: store.rewind("seq:1" if rank == 1 else "seq:0"))
    check_errors(found, UsageError, "ranks rewind different checkpoints: rank 0 seq:0, rank 1 seq:1")
    assert {info.seq for info in job.stores_do(lambda store, rank: store.rewind("seq:0"))} == {2}


def test_a_journal_of_many_ranks(job):
    found = job.stores_do(lambda store, rank: store.journal())
    check_errors(found, UsageError, "a journal is written by one process", "without store.journal")


def test_state_that_does_not_fit_on_one_rank(job):
    check_receipts(job.commit(state))
    into = [{"w": torch.zeros(3 if rank == 1 else 1000), "step": 0} for rank in range(WORLD)]
    found = job.stores_do(lambda store, rank: store.restore(into=into[rank]))
    check_errors(found, UsageError, "w is torch float32 (1000,) in the checkpoint, torch float32 (3,) in the state")
    check_errors([found[0], found[2]], UsageError, "rank 1: ")
    assert not any("overwritten" in str(each) for each in found)
    assert not any(each["w"].any() for each in into)


def test_folder_that_shows_files_of_other_hosts_late(jobs, tmp_path):
    job = jobs()
    found = job.open(lambda rank: LateFolder(tmp_path / "store", 0.6) if rank else tmp_path / "store")
    assert all(isinstance(each, ckstore.Store) for each in found), found
    for step in (1, 2):
        check_receipts(job.commit(state, lambda rank, step=step: step))
        assert [info.step for info in job.stores_do(lambda store, rank: store.latest())] == [step] * WORLD
        restored = job.stores_do(lambda store, rank: store.restore(into={"w": torch.zeros(1000), "step": 0}))
        assert all(torch.equal(each["w"], WEIGHTS) for each in restored), restored


def test_folder_that_never_shows_files_of_other_hosts(jobs, tmp_path, monkeypatch):
    late = LateFolder(tmp_path / "store", 0)
    job = jobs()
    job.open(lambda rank: late if rank == 1 else tmp_path / "store")
    check_receipts(job.commit(state))
    monkeypatch.setattr(opening, "VISIBLE_SECONDS", 0.5)
    late.seconds = HOUR
    found = job.stores_do(lambda store, rank: store.restore())
    check_errors(found, NotFoundError, "rank 1 does not see seq 0, which rank 0 sees", str(tmp_path), "same store")


class ShiftedClock:
    """The clock of a host that is off.

    Args:
        seconds: By how much.
    """

    def __init__(self, seconds):
        self._seconds = seconds
        self.monotonic, self.sleep = SYSTEM_CLOCK.monotonic, SYSTEM_CLOCK.sleep

    def now_ns(self):
        return SYSTEM_CLOCK.now_ns() + int(self._seconds * 1e9)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_clock_that_is_an_hour_off(jobs, tmp_path, wrong, seconds):
    for step in (1, 2):
        job = jobs()
        job.open(lambda rank: tmp_path / "store", clock=lambda rank: ShiftedClock(seconds if rank == wrong else 0))
        check_receipts(job.commit(state, lambda rank, step=step: step))
        check_receipts(job.commit(lambda rank, step=step: {"w": WEIGHTS + step}, lambda rank, step=step: step + 10))
        assert [info.step for info in job.stores_do(lambda store, rank: store.latest())] == [step + 10] * WORLD
        job.close()
    # The next job has another rank 0, whose clock is right. Nothing is collected that is needed.
    with ckstore.open(tmp_path / "store") as store:
        store.gc({"keep_last": 1}, trash_for=0)
        assert torch.equal(store.restore()["w"], WEIGHTS + 2)
        assert store.verify("decode").is_clean


def test_room_is_made_for_what_all_ranks_write_and_not_for_each_replica(job, monkeypatch):
    wanted = []

    def room_after(repository, nbytes, error):
        wanted.append(nbytes)
        raise error

    def fail(root, request, watch):
        raise CapacityError("the disk is full", errno=errno.ENOSPC)

    monkeypatch.setattr(commit, "room_after", room_after)
    monkeypatch.setattr(Root, "publish", fail)
    found = job.commit(lambda rank: {"w": WEIGHTS, "own": ckstore.PerRank(torch.full((100,), rank))})
    check_errors(found, CapacityError, "the disk is full")
    assert wanted == [WEIGHTS.nbytes + WORLD * 800]
    # Nothing is planned yet.
    monkeypatch.setattr(Root, "plan", fail_to_plan)
    found = job.commit(state, lambda rank: 2)
    check_errors(found, CapacityError, "no space for a plan")
    assert wanted[1:] == [WORLD * WEIGHTS.nbytes]


def fail_to_plan(root, digests, contents):
    raise CapacityError("no space for a plan", errno=errno.ENOSPC)
