"""Protects work that follows commits: it runs elsewhere, costs a commit nothing, and its failures are logged."""

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
    """Work that notes that it was done: in this process for a store in memory, in a child for one on disk."""

    work = "counting"
    option = "count_every"
    reads_output = True

    def __init__(self, store, *, every=1, program="pass"):
        super().__init__(repository_of(store), every)
        self.program, self.done, self.told = program, 0, []

    def command(self, root):
        return self.program, (), b""

    def work_in_process(self):
        self.done += 1

    def read_output(self, stdout):
        self.told.append(stdout.read().decode())


@pytest.fixture
def make(disk_store):
    """Return what makes work of a program on the store on disk; children that are left over are killed."""
    made = []

    def counting(program, **options):
        made.append(Counting(disk_store, program=program, **options))
        return made[-1]

    yield counting
    for each in made:
        kill(each)


def kill(work):
    """End the child, if there is one."""
    if work.child_pid is not None:
        os.kill(work.child_pid, signal.SIGKILL)
        work.wait(SECONDS_MAX)
    work.close()


def test_work_begins_after_every_so_many_commits(store):
    work = Counting(store, every=3)
    counts = []
    for seq in range(9):
        commit_all(store, [seq])
        work.after_commit(seq)
        counts.append(work.done)
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_work_on_a_store_in_memory_has_no_child(store):
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
    # Had anybody waited for it, it would not be at work any more.
    assert work.is_running
    assert work.done == 0, "it is not done here"


def test_one_child_works_at_a_time_and_the_next_commit_after_it_starts_another(make):
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
    assert work.child_pid not in (None, first), "what was not begun while one was busy begins with the next commit"


@pytest.mark.parametrize(("code", "is_told"), [(0, False), (11, False), (12, True), (2, True)])
def test_child_that_fails_is_told_with_its_last_words(make, caplog, code, is_told):
    work = make(f"import sys; sys.stderr.write('what was wrong'); sys.exit({code})")
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        work.after_commit(0)
        work.wait(SECONDS_MAX)
    expected = f"the counting after a commit failed with exit code {code}: what was wrong" if is_told else ""
    assert [record.getMessage() for record in caplog.records] == [expected] * is_told


def test_child_is_as_nice_as_its_kind_says_and_what_it_writes_is_noted(make, monkeypatch):
    monkeypatch.setattr(Counting, "nice", 3)
    work = make("print(os.getpriority(os.PRIO_PROCESS, 0), end='')")
    work.after_commit(0)
    work.wait(SECONDS_MAX)
    assert work.told == [str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3))]


def test_child_that_cannot_begin_is_told_and_raises_nothing(make, monkeypatch, caplog):
    def refused(*args, **options):
        raise OSError("no more processes")

    monkeypatch.setattr("subprocess.Popen", refused)
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        make(SLEEP).after_commit(0)
    assert "could not be started: OSError: no more processes" in caplog.text


@pytest.mark.parametrize("broken", ["command", "read_output"])
def test_whatever_goes_wrong_is_told_and_raises_nothing(make, monkeypatch, caplog, broken):
    def confused(*args):
        raise AttributeError("no such thing")

    work = make("pass")
    monkeypatch.setattr(work, broken, confused)
    deadline = time.monotonic() + SECONDS_MAX
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        for seq in itertools.count():
            # The next commit takes note of the child's end.
            work.after_commit(seq)
            if caplog.records or time.monotonic() > deadline:
                break
            time.sleep(0.01)
    monkeypatch.undo()
    assert "could not be started: AttributeError: no such thing" in caplog.text


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sessions_that_end_early_are_counted_together(store, length):
    """No session makes as many commits as there are from one time to the next."""
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


def test_work_that_a_killed_session_owed_is_begun_by_the_next_one(store):
    commit_all(store, range(4))
    work = Counting(store, every=4)
    commit_all(store, [4])
    work.after_commit(4)
    assert work.done == 1


def test_seqs_that_were_never_published_hide_no_work(store):
    commit_all(store, range(3))
    # A writer took the seq after which there is work, and died.
    repository_of(store).manifests.claim(3)
    work = Counting(store, every=4)
    work.after_commit(4)
    assert work.done == 1


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_number_of_commits_is_checked(store, every):
    with pytest.raises(UsageError, match="count_every"):
        Counting(store, every=every)


def test_child_that_is_let_go_of_ends_by_itself(make, tmp_path):
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


def test_signals_to_all_processes_of_a_job_do_not_end_a_child(make, tmp_path):
    has_begun, may_end = tmp_path / "has begun", tmp_path / "may end"
    work = make(
        f"import pathlib, time\npathlib.Path({str(has_begun)!r}).touch()\n"
        f"while not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.01)\nprint('done', end='')"
    )
    work.after_commit(0)
    # Before Python has started in it, and when it is at work.
    for _ in range(2):
        for number in JOB_SIGNALS:
            os.kill(work.child_pid, number)
        until(has_begun.exists, "a child at work")
    may_end.touch()
    work.wait(SECONDS_MAX)
    assert work.told == ["done"]
