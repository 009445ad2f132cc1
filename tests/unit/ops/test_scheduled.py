"""Protects scheduled work after commits: it does not delay a commit, and its failures are logged."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time

import pytest

from ckstore._testing import repository_of
from ckstore.errors import UsageError
from ckstore.ops.scheduled import AfterCommits
from ckstore.processes import JOB_SIGNALS
from support.gc_histories import commit_all
from support.saver_harness import until

SECONDS_MAX = 240
SLEEP = "import time; time.sleep(600)"


class Counting(AfterCommits):
    """Record each run of the work: in this process for a store in memory, in a child for one on disk."""

    work = "counting"
    option = "count_every"
    reads_output = True

    def __init__(self, store, *, every=1, program="pass"):
        super().__init__(repository_of(store), every)
        self.program, self.done, self.outputs = program, 0, []

    def command(self, root):
        return self.program, (), b""

    def work_in_process(self):
        self.done += 1

    def read_output(self, stdout):
        self.outputs.append(stdout.read().decode())


@pytest.fixture
def make(disk_store):
    """Return a function that schedules a program on the disk store. Leftover children are killed."""
    made = []

    def counting(program, **options):
        made.append(Counting(disk_store, program=program, **options))
        return made[-1]

    yield counting
    for each in made:
        kill(each)


def kill(work):
    """Kill the child, if there is one."""
    if work.child_pid is not None:
        os.kill(work.child_pid, signal.SIGKILL)
        work.wait(SECONDS_MAX)
    work.close()


def test_work_starts_every_n_commits(store):
    work = Counting(store, every=3)
    counts = []
    for seq in range(9):
        commit_all(store, [seq])
        work.after_commit(seq)
        counts.append(work.done)
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_work_on_memory_store_has_no_child(store):
    work = Counting(store)
    work.after_commit(0)
    assert (work.is_running, work.child_pid, work.done) == (False, None, 1)
    work.wait(0)
    work.close()


def test_commit_does_not_wait_for_work(disk_store, make):
    work = make(SLEEP, every=2)
    commit_all(disk_store, [1, 2])
    work.after_commit(1)
    assert work.is_running
    commit_all(disk_store, [3])
    work.after_commit(3)
    # If the commit had waited, the work would have ended.
    assert work.is_running
    assert work.done == 0, "it does not run in this process"


def test_one_child_runs_at_a_time(make):
    work = make(SLEEP, every=2)
    work.after_commit(1)
    first = work.child_pid
    for seq in (3, 5, 7):
        work.after_commit(seq)
        assert work.child_pid == first
    os.kill(first, signal.SIGKILL)
    work.wait(SECONDS_MAX)
    assert work.child_pid is None
    work.after_commit(8)
    assert work.child_pid not in (None, first), "work skipped while a child was busy starts with the next commit"


@pytest.mark.parametrize(("code", "is_logged"), [(0, False), (11, False), (12, True), (2, True)])
def test_failed_child_is_logged_with_its_output(make, caplog, code, is_logged):
    work = make(f"import sys; sys.stderr.write('what was wrong'); sys.exit({code})")
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        work.after_commit(0)
        work.wait(SECONDS_MAX)
    expected = f"the counting after a commit failed with exit code {code}: what was wrong" if is_logged else ""
    assert [record.getMessage() for record in caplog.records] == [expected] * is_logged


def test_child_has_niceness_and_output_is_read(make, monkeypatch):
    monkeypatch.setattr(Counting, "nice", 3)
    work = make("print(os.getpriority(os.PRIO_PROCESS, 0), end='')")
    work.after_commit(0)
    work.wait(SECONDS_MAX)
    assert work.outputs == [str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3))]


def test_failed_child_start_is_logged(make, monkeypatch, caplog):
    def raise_oserror(*args, **options):
        raise OSError("no processes left")

    monkeypatch.setattr("subprocess.Popen", raise_oserror)
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        make(SLEEP).after_commit(0)
    assert "could not be started: OSError: no processes left" in caplog.text


@pytest.mark.parametrize("broken", ["command", "read_output"])
def test_any_failure_is_logged_not_raised(make, monkeypatch, caplog, broken):
    def confused(*args):
        raise AttributeError("no such thing")

    work = make("pass")
    monkeypatch.setattr(work, broken, confused)
    deadline = time.monotonic() + SECONDS_MAX
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        for seq in itertools.count():
            # The next commit reads the child's exit code.
            work.after_commit(seq)
            if caplog.records or time.monotonic() > deadline:
                break
            time.sleep(0.01)
    monkeypatch.undo()
    assert "could not be started: AttributeError: no such thing" in caplog.text


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_sessions_are_counted_together(store, length):
    """No session makes as many commits as the schedule's interval."""
    started = []
    for first in range(0, 24, length):
        work = Counting(store, every=4)
        for seq in range(first, first + length):
            commit_all(store, [seq])
            work.after_commit(seq)
            started += [seq] * work.done
            work.done = 0
        work.close()
    assert {0, 1, 2}.isdisjoint(started)
    assert {3, 7, 11, 15, 19, 23} <= set(started)


def test_work_of_killed_session_is_done_by_the_next(store):
    commit_all(store, range(4))
    work = Counting(store, every=4)
    commit_all(store, [4])
    work.after_commit(4)
    assert work.done == 1


def test_unpublished_seqs_skip_no_work(store):
    commit_all(store, range(3))
    # A writer claimed the seq of the next scheduled work, and died.
    repository_of(store).manifests.claim(3)
    work = Counting(store, every=4)
    work.after_commit(4)
    assert work.done == 1


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_interval_is_checked(store, every):
    with pytest.raises(UsageError, match="count_every"):
        Counting(store, every=every)


def test_detached_child_ends_by_itself(make, tmp_path):
    may_end, has_ended = tmp_path / "may end", tmp_path / "has ended"
    work = make(
        f"import pathlib, time\nwhile not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.01)\n"
        f"pathlib.Path({str(has_ended)!r}).touch()"
    )
    work.after_commit(0)
    child = work.child_pid
    work.close()
    work.close()
    assert work.child_pid is None
    may_end.touch()
    assert os.waitpid(child, 0)[1] == 0
    assert has_ended.exists()


def test_job_signals_do_not_end_a_child(make, tmp_path):
    has_begun, may_end = tmp_path / "has begun", tmp_path / "may end"
    work = make(
        f"import pathlib, time\npathlib.Path({str(has_begun)!r}).touch()\n"
        f"while not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.01)\nprint('done', end='')"
    )
    work.after_commit(0)
    # Both before Python has started in it, and while it works.
    for _ in range(2):
        for number in JOB_SIGNALS:
            os.kill(work.child_pid, number)
        until(has_begun.exists, "a child at work")
    may_end.touch()
    work.wait(SECONDS_MAX)
    assert work.outputs == ["done"]
