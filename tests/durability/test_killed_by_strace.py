"""Protects commits against SIGKILL before every system call that changes a file or enters a ring.

A child runs a scenario under strace, which kills it at the N-th call of one kind in a thread, for each N up to one that
no thread reaches. Afterwards every acknowledged checkpoint restores bit for bit, verify finds no damage, and the next
commit works without repair. The same holds for calls that fail with an errno; then the child may also end with an error
of ckstore.
"""

from __future__ import annotations

import pytest

from support.strace_sweep import disturb_everywhere

pytestmark = [
    pytest.mark.usefixtures("quiet_log"),
    pytest.mark.strace,
    pytest.mark.usefixtures("strace"),
    pytest.mark.filterwarnings("ignore"),
]

ENGINES = [pytest.param("uring", marks=pytest.mark.uring), "pwrite"]
WRITING_CALLS = ("fsync", "fdatasync", "pwritev2", "linkat", "ftruncate", "fallocate", "io_uring_enter")
ERRNOS = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "EAGAIN", "EROFS", "EMFILE", "ENOMEM")


@pytest.mark.deep(parts=5)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scenario", ["commit", "first", "recommit", "maintain", "repack"])
def test_operation_killed_at_any_call_loses_nothing(tmp_path, sample, note, scenario, engine):
    tally, summary = disturb_everywhere(tmp_path, sample, scenario, engine, parts=12)
    note(summary)
    assert tally.disturbed >= (80 if sample.is_whole else 1)


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_init_killed_at_any_call_can_be_repeated(tmp_path, sample, note):
    # Four calls are repeated for each of 256 folders, and no engine has transferred anything yet.
    tally, summary = disturb_everywhere(tmp_path, sample, "init", "pwrite", every=5, parts=40)
    note(summary)
    assert tally.disturbed >= (200 if sample.is_whole else 1)


@pytest.mark.deep(parts=18)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("scenario", "number"), [("commit", "EIO"), *[("recommit", number) for number in ERRNOS]])
@pytest.mark.parametrize("engine", ENGINES)
def test_operation_with_failing_call_works_or_raises(tmp_path, sample, note, engine, scenario, number):
    # With io_uring, write also wakes the ring's thread through an eventfd, which has no such errors.
    calls = WRITING_CALLS if engine == "uring" else ("write", *WRITING_CALLS)
    _, summary = disturb_everywhere(tmp_path, sample, scenario, engine, fault=f"error={number}", calls=calls, parts=2)
    note(summary)
