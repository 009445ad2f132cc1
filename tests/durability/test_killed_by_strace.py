"""Protects the promise of commit against SIGKILL: before every system call that changes a file or enters a ring.

A child runs a scenario under strace, which kills it at the entry of the N-th call of one kind in a thread; N rises
until a run passes untouched. Afterwards every acknowledged checkpoint must come back bit for bit, verify must find
no damage, and the next commit must work without repair. The same is asked of calls that fail with an errno: then
the child may also end with an error of ckstore.
"""

from __future__ import annotations

import pytest

from support.strace_sweep import strike_everywhere

pytestmark = [
    pytest.mark.usefixtures("quiet_log"),
    pytest.mark.strace,
    pytest.mark.usefixtures("strace"),
    pytest.mark.filterwarnings("ignore"),
]

WRITING_CALLS = ("fsync", "fdatasync", "pwritev2", "linkat", "ftruncate", "fallocate", "io_uring_enter")


@pytest.mark.parametrize("engine", [pytest.param("uring", marks=pytest.mark.uring), "pwrite"])
def test_commit_killed_at_some_calls_keeps_its_promises(tmp_path, engine):
    tally, _ = strike_everywhere(tmp_path, "commit", engine, stride=7)
    assert tally.struck >= 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", [pytest.param("uring", marks=pytest.mark.uring), "pwrite"])
@pytest.mark.parametrize("scenario", ["first", "recommit", "maintain", "repack"])
def test_every_verb_killed_at_every_call_keeps_its_promises(tmp_path, tell, scenario, engine):
    tally, said = strike_everywhere(tmp_path, scenario, engine)
    tell(said)
    assert tally.struck >= 80


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_making_a_store_killed_at_many_calls_keeps_its_promises(tmp_path, tell):
    # Four calls are repeated for each of 256 folders, and no engine has moved anything yet.
    tally, said = strike_everywhere(tmp_path, "init", "pwrite", stride=5)
    tell(said)
    assert tally.struck >= 200


@pytest.mark.parametrize("engine", [pytest.param("uring", marks=pytest.mark.uring), "pwrite"])
def test_commit_with_a_failing_call_succeeds_or_is_loud(tmp_path, engine):
    strike_everywhere(tmp_path, "commit", engine, fault="error=EIO", stride=2, calls=("fsync", "fdatasync", "linkat"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", ["EIO", "ENOSPC", "EDQUOT", "EINTR", "EAGAIN", "EROFS", "EMFILE", "ENOMEM"])
@pytest.mark.parametrize("engine", [pytest.param("uring", marks=pytest.mark.uring), "pwrite"])
def test_recommit_with_any_failing_call_succeeds_or_is_loud(tmp_path, tell, engine, number):
    # With rings, write also wakes the ring's thread through an eventfd, which has no such errors.
    calls = WRITING_CALLS if engine == "uring" else ("write", *WRITING_CALLS)
    _, said = strike_everywhere(tmp_path, "recommit", engine, fault=f"error={number}", calls=calls)
    tell(said)
