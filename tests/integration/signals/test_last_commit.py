"""Protects the last commit: real processes and signals, at any time; a checkpoint is never torn."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

import ckstore

HASTY = "signals.STAGED_SECONDS = 0.2\n"
"""Code of a trainer that, after its deadline, waits only briefly until its state is staged."""

BY_SAVER = 'store.commit_async(state, step) if step % 5 == 1 else say("step", step)'
IN_PROCESS = 'store.commit(state, step) if step % 5 == 1 else say("step", step)'


@pytest.mark.parametrize("commit", [BY_SAVER, IN_PROCESS, 'say("step", step)'], ids=["saver", "process", "none"])
def test_sigterm_during_step_commits_the_whole_step(trainer, loop, commit):
    run = trainer(loop(commit))
    for _ in range(4):
        step = int(run.hear("step")[0])
    run.send()
    code, log = run.end()
    assert code == 143
    assert run.restored()["step"] >= step
    assert f"step {run.restored()['step']} is durable" in log
    assert "Traceback" not in log


def test_previous_handler_is_called_and_may_end_run(trainer):
    code = """
def before(number, frame):
    say("handled", number)
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
    assert run.hear("handled") == ["15"]
    step, name, committed, is_restored = run.hear("ended")
    assert (name, committed, is_restored) == ("SIGTERM", step, "True")
    assert run.end()[0] == 0
    with ckstore.open(run.folder) as store:
        assert store.info("preempted").step == int(step)
        assert store.info("preempted").metrics == {"loss": 2.5}


def test_caller_may_end_the_run(trainer):
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


def test_second_sigterm_does_not_disturb_last_commit(trainer, loop):
    run = trainer(loop(BY_SAVER))
    run.hear("step")
    for _ in range(20):
        with contextlib.suppress(ProcessLookupError):
            run.send()
        time.sleep(0.003)
    # A signal after everything is done ends the process immediately, by default.
    assert run.end()[0] in (143, -signal.SIGTERM)
    assert run.restored()["step"] > 0


def test_second_ctrl_c_ends_immediately(trainer, loop):
    run = trainer(
        loop('say("step", step)', signals=[int(signal.SIGINT)]).replace("train_one_step()", "train_one_step(30)")
    )
    run.hear("ready")
    run.send(signal.SIGINT)
    # Otherwise both may arrive together and count as one.
    run.wait_for_log("is committed once more")
    assert run.is_running()
    run.send(signal.SIGINT)
    code, log = run.end()
    assert code in (1, -signal.SIGINT, 130)
    assert "KeyboardInterrupt" in log
    with ckstore.open(run.folder) as store:
        assert store.steps() == []


def test_no_step_before_deadline_commits_nothing(trainer, loop):
    code = loop(deadline_seconds=0.3).replace(
        "train_one_step()", "(step == 2 and say('long'), train_one_step(0.02 if step < 2 else 60))"
    )
    run = trainer("store.commit_async(state, 0).result()\n" + code)
    run.hear("long")
    run.send()
    run.wait_for_log("check() was not called within 0.3 s")
    assert run.is_running()
    run.send()
    assert run.end()[0] == -signal.SIGTERM
    assert run.restored()["step"] == 0


def test_late_step_is_still_committed(trainer, loop):
    code = 'is_told = when_told("check() was not called")\n'
    run = trainer(code + loop(deadline_seconds=0.2).replace("train_one_step()", "(train_one_step(), is_told.wait(60))"))
    run.hear("ready")
    run.send()
    code, log = run.end()
    assert (code, run.restored()["step"]) == (143, 1)
    assert "check() was not called" in log


def test_signal_during_commit_does_not_repeat_it(trainer, loop):
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


def test_commit_in_progress_gets_tags_of_last_commit(trainer, loop):
    """Otherwise a job that resumes by the tag would use the state of an earlier preemption."""
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


def test_signaled_saver_loses_nothing(trainer, loop):
    """Schedulers send SIGTERM to every process of a job."""
    run = trainer(loop('(store.commit_async(state, step), say("saver", background_of(store).saver_pid))'))
    saver = int(run.hear("saver")[0])
    os.kill(saver, signal.SIGTERM)
    run.send()
    code, log = run.end()
    assert code == 143, log
    assert run.restored()["step"] > 0
    assert f"step {run.restored()['step']} is durable" in log


def test_earlier_failure_does_not_prevent_last_commit(trainer, loop):
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
    code, log = run.end()
    assert code == 143
    assert "failed and is retried" in log
    assert run.restored()["step"] == 3


def test_staged_last_commit_survives_killed_trainer(trainer, loop):
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


def test_unanswered_commit_is_not_reported_as_staged(trainer, loop):
    code = """
def commit(step):
    if step == 2:
        stop(background_of(store).saver_pid)
        os.kill(os.getpid(), signal.SIGTERM)
store.commit_async(state, 0).result()
# Its slot is free a moment after its receipt.
store.wait()
"""
    log = 'say("saver", background_of(store).saver_pid)\n'
    run = trainer(HASTY + code + log + loop("commit(step)", deadline_seconds=0.5))
    saver = int(run.hear("saver")[0])
    # The saver does not answer, so the trainer cannot know whether the state would be published.
    run.wait_for_log("step 2 is not staged at the deadline")
    # It waits at exit for the saver, which continues only now.
    os.kill(saver, signal.SIGCONT)
    code, log = run.end()
    assert code == 143
    assert run.restored()["step"] == 2


def test_staged_commit_after_deadline_is_left_to_saver(trainer, loop):
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
    log = 'say("saver", background_of(store).saver_pid)\n'
    run = trainer(code + log + loop("commit(step)", deadline_seconds=0.5))
    saver = int(run.hear("saver")[0])
    (step,) = run.hear("caught")
    run.wait_for_log(f"step {step} is staged but not durable at the deadline")
    os.kill(saver, signal.SIGCONT)
    code, log = run.end()
    assert code == 143
    assert run.restored()["step"] == int(step)


def test_sigterm_ends_forked_children_by_default(trainer):
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


def test_loop_on_other_thread_ends_the_process(trainer):
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
def test_signal_after_last_check_is_not_lost(trainer, begin):
    code = """
    train_one_step()
    last.check(1)
    pending = store.commit_async(state, 1)
    os.kill(os.getpid(), signal.SIGTERM)
say("never")
"""
    run = trainer(begin + code)
    code, log = run.end()
    assert (code, run.out) == (143, [])
    assert "after the last check()" in log
    assert run.restored()["step"] == 1


def test_slow_last_commit_is_reported_at_deadline(trainer, loop):
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
    code, log = run.end()
    assert code == 143
    assert "earlier checkpoints are intact" in log
    assert run.restored()["step"] > 0


def test_commit_of_the_same_step_is_not_repeated(trainer):
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
            # Its death is log before the next one is signalled.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            time.sleep(0.01)
"""

# The trainer gets the signal while it waits, or before the others: schedulers signal processes one after the other.
FIRST = "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start(); end(*workers)"
LAST = "end(os.getpid(), *workers)"


@pytest.mark.parametrize("order", [FIRST, LAST], ids=["first", "last"])
def test_signaled_workers_do_not_prevent_last_commit(trainer, order):
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
    code, log = run.end()
    assert code == 143, log
    assert run.restored()["step"] == 2
    assert "Traceback" not in log


def test_other_death_of_worker_ends_the_loop(trainer):
    code = """
signal.signal(signal.SIGCHLD, killed_worker)
with store.commit_on_signal(lambda: state) as last:
    last.check(0)
    worker = forked()
    os.kill(worker, signal.SIGKILL)
    time.sleep(60)
"""
    code, log = trainer(WORKERS + code).end()
    assert code == 1
    assert "RuntimeError: a worker is killed by signal: Killed" in log


def test_sigchld_handler_is_restored(trainer):
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
def test_loop_error_after_signal_is_logged(trainer, begin):
    code = """
    os.kill(os.getpid(), signal.SIGTERM)
    raise ValueError("a peer is gone")
"""
    ranks = 'os.environ.update(RANK="0", WORLD_SIZE="2")\n'
    code, log = trainer(ranks + begin + code).end()
    assert code == 1
    assert "ValueError: a peer is gone" in log
    assert "SIGTERM received, but the loop ended (ValueError) before the step was complete: no last commit" in log
    assert "rank 0 of 2" in log
    assert "call commit_on_signal on every rank" in log
