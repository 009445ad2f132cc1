"""Protects the last commit: real processes, real signals, at any time; what is committed is never torn."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

import ckstore

HASTY = "signals.STAGED_SECONDS = 0.2\n"
"""Code of a trainer that, after its deadline, waits for moments only until its state is staged."""

BY_SAVER = 'store.commit_async(state, step) if step % 5 == 1 else say("step", step)'
IN_PROCESS = 'store.commit(state, step) if step % 5 == 1 else say("step", step)'


@pytest.mark.parametrize("commit", [BY_SAVER, IN_PROCESS, 'say("step", step)'], ids=["saver", "process", "none"])
def test_sigterm_in_the_middle_of_a_step_commits_the_whole_step(trainer, loop, commit):
    run = trainer(loop(commit))
    for _ in range(4):
        step = int(run.hear("step")[0])
    run.send()
    code, told = run.end()
    assert code == 143
    assert run.restored()["step"] >= step
    assert f"step {run.restored()['step']} is durable" in told
    assert "Traceback" not in told


def test_what_listened_before_is_called_and_may_let_the_run_end(trainer):
    code = """
def before(number, frame):
    say("told", number)
signal.signal(signal.SIGTERM, before)
last = store.commit_on_signal(lambda: state, metrics=lambda: {"loss": 2.5}, tags=["preempted"])
say("ready")
for step in range(1, 100_000):
    train_one_step()
    if last.check(step):
        break
say("ended", step, last.signal.name, last.receipt.step, signal.getsignal(signal.SIGTERM) is before)
"""
    run = trainer(code)
    run.hear("ready")
    run.send()
    assert run.hear("told") == ["15"]
    step, name, committed, is_restored = run.hear("ended")
    assert (name, committed, is_restored) == ("SIGTERM", step, "True")
    assert run.end()[0] == 0
    with ckstore.open(run.folder) as store:
        assert store.info("preempted").step == int(step)
        assert store.info("preempted").metrics == {"loss": 2.5}


def test_the_caller_may_end_the_run_itself(trainer):
    code = """
with store.commit_on_signal(lambda: state, then="return", signals=[signal.SIGUSR1, signal.SIGTERM]) as last:
    say("ready")
    step = 0
    while not last.check(step):
        step += 1
        train_one_step()
    assert last.check(step), "it stays so"
say("ended", step, last.signal.name)
"""
    run = trainer(code)
    run.hear("ready")
    run.send(signal.SIGUSR1)
    step, name = run.hear("ended")
    assert (run.end()[0], name, run.restored()["step"]) == (0, "SIGUSR1", int(step))


def test_a_second_sigterm_does_not_disturb_the_last_commit(trainer, loop):
    run = trainer(loop(BY_SAVER))
    run.hear("step")
    for _ in range(20):
        with contextlib.suppress(ProcessLookupError):
            run.send()
        time.sleep(0.003)
    # One that comes when all is over ends the process at once, as it would any.
    assert run.end()[0] in (143, -signal.SIGTERM)
    assert run.restored()["step"] > 0


def test_ctrl_c_twice_ends_at_once(trainer, loop):
    run = trainer(
        loop('say("step", step)', signals=[int(signal.SIGINT)]).replace("train_one_step()", "train_one_step(30)")
    )
    run.hear("ready")
    run.send(signal.SIGINT)
    # Else both may come at once, and count as one.
    run.hear_told("is committed once more")
    assert run.is_running()
    run.send(signal.SIGINT)
    code, told = run.end()
    assert code in (1, -signal.SIGINT, 130)
    assert "KeyboardInterrupt" in told
    with ckstore.open(run.folder) as store:
        assert store.steps() == []


def test_no_step_in_time_commits_nothing_torn_and_a_later_signal_ends(trainer, loop):
    code = loop(deadline_seconds=0.3).replace(
        "train_one_step()", "(step == 2 and say('long'), train_one_step(0.02 if step < 2 else 60))"
    )
    run = trainer("store.commit_async(state, 0).result()\n" + code)
    run.hear("long")
    run.send()
    run.hear_told("check() was not called within 0.3 s")
    assert run.is_running()
    run.send()
    assert run.end()[0] == -signal.SIGTERM
    assert run.restored()["step"] == 0


def test_a_step_that_ends_too_late_is_committed_all_the_same(trainer, loop):
    code = 'is_told = when_told("check() was not called")\n'
    run = trainer(code + loop(deadline_seconds=0.2).replace("train_one_step()", "(train_one_step(), is_told.wait(60))"))
    run.hear("ready")
    run.send()
    code, told = run.end()
    assert (code, run.restored()["step"]) == (143, 1)
    assert "check() was not called" in told


def test_a_signal_during_a_commit_waits_for_it_and_does_not_repeat_it(trainer, loop):
    code = """
import ckstore.api
original = ckstore.api.Store.commit_async
def interrupted(self, *arguments, **options):
    pending = original(self, *arguments, **options)
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return pending
ckstore.api.Store.commit_async = interrupted
"""
    run = trainer(code + loop("store.commit_async(state, step) if step % 3 == 0 else None"))
    assert run.end()[0] == 143
    with ckstore.open(run.folder) as store:
        assert [entry.step for entry in store.log()] == [3]


def test_a_commit_that_turns_out_to_be_the_last_one_gets_its_tags(trainer, loop):
    """Else a job that resumes by the tag finds the state of an earlier preemption."""
    code = """
store.commit(state, 0, tags=["preempted"])
def commit(step):
    store.commit_async(state, step)
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
"""
    run = trainer(code + loop("commit(step)", tags=["preempted"]))
    assert run.end()[0] == 143
    with ckstore.open(run.folder) as store:
        assert [entry.step for entry in store.log()][:2] == [3, 2]
        assert store.info("preempted").step == 3


def test_a_saver_that_the_same_signal_ends_costs_nothing(trainer, loop):
    """Schedulers send SIGTERM to every process of a job."""
    run = trainer(loop('(store.commit_async(state, step), say("saver", background_of(store).saver_pid))'))
    saver = int(run.hear("saver")[0])
    os.kill(saver, signal.SIGTERM)
    run.send()
    code, told = run.end()
    assert code == 143, told
    assert run.restored()["step"] > 0
    assert f"step {run.restored()['step']} is durable" in told


def test_an_earlier_commit_that_failed_does_not_cost_the_last_one(trainer, loop):
    code = """
def commit(step):
    global pending
    if step == 3:
        os.kill(background_of(store).saver_pid, signal.SIGKILL)
        while not pending.is_done:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    elif step < 3:
        if step == 2:
            # Its slot is free a moment after its receipt.
            store.wait()
            stop(background_of(store).saver_pid)
        pending = store.commit_async(state, step)
"""
    run = trainer(code + loop("commit(step)"))
    code, told = run.end()
    assert code == 143
    assert "failed and is retried" in told
    assert run.restored()["step"] == 3


def test_what_is_staged_when_the_trainer_is_killed_is_published(trainer, loop):
    code = """
from ckstore.background.pending import Pending
state["more"] = np.random.default_rng(0).integers(0, 1 << 32, 8 << 20, np.uint32)
store.commit_async(state, 0).result()
state["more"] += 1
def result(self, timeout=None):
    assert self.wait_staged(60)
    os.kill(os.getpid(), signal.SIGKILL)
Pending.result = result
"""
    run = trainer(code + loop())
    run.hear("ready")
    run.send()
    assert run.end()[0] == -signal.SIGKILL
    assert run.restored()["step"] > 0


def test_a_commit_that_no_saver_has_taken_in_time_is_not_said_to_be_staged(trainer, loop):
    code = """
def commit(step):
    if step == 2:
        stop(background_of(store).saver_pid)
        os.kill(os.getpid(), signal.SIGTERM)
store.commit_async(state, 0).result()
# Its slot is free a moment after its receipt.
store.wait()
"""
    told = 'say("saver", background_of(store).saver_pid)\n'
    run = trainer(HASTY + code + told + loop("commit(step)", deadline_seconds=0.5))
    saver = int(run.hear("saver")[0])
    # It does not answer: nobody can say that the state is published if the process dies now.
    run.hear_told("step 2 is not staged at the deadline")
    # It waits for the saver at exit, which only now goes on.
    os.kill(saver, signal.SIGCONT)
    code, told = run.end()
    assert code == 143
    assert run.restored()["step"] == 2


def test_a_commit_that_is_staged_and_not_durable_in_time_is_left_to_the_saver(trainer, loop):
    code = """
state["more"] = np.random.default_rng(0).integers(0, 1 << 32, 8 << 20, np.uint32)
def commit(step):
    state["more"] += 1
    assert store.commit_async(state, step).wait_staged()
    stop(background_of(store).saver_pid)
    if step in [name.step for name in repository_of(store).manifests.listing().names]:
        # It was faster: once more.
        os.kill(background_of(store).saver_pid, signal.SIGCONT)
    else:
        say("caught", step)
        os.kill(os.getpid(), signal.SIGTERM)
store.commit_async(state, 0).result()
"""
    told = 'say("saver", background_of(store).saver_pid)\n'
    run = trainer(code + told + loop("commit(step)", deadline_seconds=0.5))
    saver = int(run.hear("saver")[0])
    (step,) = run.hear("caught")
    run.hear_told(f"step {step} is staged but not durable at the deadline")
    os.kill(saver, signal.SIGCONT)
    code, told = run.end()
    assert code == 143
    assert run.restored()["step"] == int(step)


def test_forked_children_end_by_sigterm_as_if_nobody_had_listened(trainer):
    code = """
import multiprocessing
begun, begin = os.pipe()
def work():
    os.write(begin, b"x")
    time.sleep(600)
with store.commit_on_signal(lambda: state) as last:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    os.read(begun, 1)
    child.terminate()
    child.join(60)
    time.sleep(0.2)
    say("child", child.exitcode, last.is_asked)
"""
    assert trainer(code).hear("child") == ["-15", "False"]


def test_a_loop_on_another_thread_ends_the_process_too(trainer):
    code = """
last = store.commit_on_signal(lambda: state)
def work():
    step = 0
    while not last.check(step):
        step += 1
        train_one_step()
        say("step", step)
thread = threading.Thread(target=work)
thread.start()
say("ready")
try:
    while True:
        time.sleep(0.05)
finally:
    thread.join()
    say("cleaned")
"""
    run = trainer(code)
    run.hear("step")
    run.send()
    run.hear("cleaned")
    assert run.end()[0] == 143
    assert run.restored()["step"] > 0


WITH = "with store, store.commit_on_signal(lambda: state) as last:"
WITHOUT = "with store:\n    last = store.commit_on_signal(lambda: state)"


@pytest.mark.parametrize("begin", [WITH, WITHOUT], ids=["with", "without"])
def test_a_signal_after_the_last_check_is_not_swallowed(trainer, begin):
    code = """
    train_one_step()
    last.check(1)
    pending = store.commit_async(state, 1)
    os.kill(os.getpid(), signal.SIGTERM)
say("never")
"""
    run = trainer(begin + code)
    code, told = run.end()
    assert (code, run.out) == (143, [])
    assert "after the last check()" in told
    assert run.restored()["step"] == 1


def test_a_last_commit_that_takes_too_long_is_told_of_when_the_time_is_up(trainer, loop):
    code = """
original = store.commit
is_told = when_told("the last commit is not durable after 0.2 s")
def slow(*arguments, **options):
    assert is_told.wait(60)
    return original(*arguments, **options)
store.commit = slow
"""
    run = trainer(HASTY + code + loop(deadline_seconds=0.2))
    run.hear("ready")
    run.send()
    code, told = run.end()
    assert code == 143
    assert "earlier checkpoints are intact" in told
    assert run.restored()["step"] > 0


def test_a_commit_in_the_process_of_the_very_step_is_not_made_twice(trainer):
    code = """
last = store.commit_on_signal(lambda: state, tags=["preempted"], then="return")
os.kill(os.getpid(), signal.SIGTERM)
step = 3
train_one_step()
receipt = store.commit(state, step)
assert last.check(step)
say("ended", receipt.seq, last.receipt.seq, *[info.step for info in store.log()], store.tags()["preempted"])
"""
    run = trainer(code)
    seq, last_seq, *steps, tagged = run.hear("ended")
    assert (seq, last_seq, steps, tagged) == ("0", "0", ["3"], "0")
    assert run.end()[0] == 0


# Children that the same signal ends: data-loader workers

WORKERS = """
def killed_worker(number, frame):
    # As torch's handler does, wherever the main thread is.
    info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is not None and info.si_status:
        raise RuntimeError(f"a worker is killed by signal: {signal.strsignal(info.si_status)}")

def forked():
    ready, say_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Nobody who reads what the trainer says waits for it.
        os.closerange(1, 3)
        os.write(say_ready, b"1")
        time.sleep(600)
        os._exit(0)
    # Python drops a signal that comes to a child before it has left os.fork.
    os.read(ready, 1)
    os.close(ready)
    os.close(say_ready)
    return pid

def end(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        if pid != os.getpid():
            # Its death is told before the next one is signalled.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            time.sleep(0.01)
"""

# The trainer gets it while it waits, as where a scheduler signals one process after the other; or before the others.
FIRST = "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start(); end(*workers)"
LAST = "end(os.getpid(), *workers)"


@pytest.mark.parametrize("order", [FIRST, LAST], ids=["first", "last"])
def test_workers_that_the_same_signal_ends_do_not_cost_the_last_commit(trainer, order):
    begin = """
last = store.commit_on_signal(lambda: state)
train_one_step()
signal.signal(signal.SIGCHLD, killed_worker)
workers = [forked(), forked()]
last.check(1)
ORDER
train_one_step()
last.check(2)
"""
    run = trainer(WORKERS + begin.replace("ORDER", order))
    code, told = run.end()
    assert code == 143, told
    assert run.restored()["step"] == 2
    assert "Traceback" not in told


def test_worker_that_dies_of_something_else_ends_the_loop_as_ever(trainer):
    code = """
signal.signal(signal.SIGCHLD, killed_worker)
with store.commit_on_signal(lambda: state) as last:
    last.check(0)
    worker = forked()
    os.kill(worker, signal.SIGKILL)
    time.sleep(60)
"""
    code, told = trainer(WORKERS + code).end()
    assert code == 1
    assert "RuntimeError: a worker is killed by signal: Killed" in told


def test_handler_of_dead_children_is_as_it_was_when_listening_ends(trainer):
    code = """
signal.signal(signal.SIGCHLD, killed_worker)
with store.commit_on_signal(lambda: state, then="return") as last:
    last.check(0)
    say("held", signal.getsignal(signal.SIGCHLD) is not killed_worker)
say("after", signal.getsignal(signal.SIGCHLD) is killed_worker)
"""
    run = trainer(WORKERS + code)
    assert run.hear("held") == ["True"]
    assert run.hear("after") == ["True"]
    assert run.end()[0] == 0


@pytest.mark.parametrize("begin", [WITH, WITHOUT, "if last := store.commit_on_signal(lambda: state):"])
def test_loop_that_ends_by_an_error_after_the_signal_says_that_nothing_was_committed(trainer, begin):
    code = """
    os.kill(os.getpid(), signal.SIGTERM)
    raise ValueError("a peer is gone")
"""
    ranks = 'os.environ.update(RANK="0", WORLD_SIZE="2")\n'
    code, told = trainer(ranks + begin + code).end()
    assert code == 1
    assert "ValueError: a peer is gone" in told
    assert "SIGTERM received, but the loop ended (ValueError) before the step was complete: no last commit" in told
    assert "rank 0 of 2" in told
    assert "call commit_on_signal on every rank" in told
