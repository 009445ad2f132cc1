"""Protects background commits against everything that ends a trainer or its saver, at random points.

Each sequence has one store and many trainers. A trainer restores, trains and commits in the background until it or its
saver is killed, stopped, interrupted or out of memory. Afterwards: acknowledged checkpoints exist, bit for bit; staged
states are published although the trainer died; half-staged states are never visible; the next trainer resumes from the
newest one and needs no repair; no process and no memory is left behind. Seeds are printed. A fault comes at a random
time after a random event of the trainer.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import statistics
from pathlib import Path

import pytest

from support.trainer_sequence import TrainerSequence

pytestmark = pytest.mark.usefixtures("quiet_log")

MIB = 1 << 20
WAITING = {"policy": {"on_busy": "wait"}}


@pytest.fixture
def make_sequence(fast_folder):
    sequences = []

    def make(task, seed):
        folder = fast_folder / f"{task}-{seed}"
        folder.mkdir(mode=0o700)
        sequences.append(TrainerSequence(folder, task, seed))
        return sequences[-1]

    yield make
    for sequence in sequences:
        sequence.close()


# Faults that end one trainer, or two


def reach_some_point(sequence, trainer):
    event = sequence.choice.choice(
        ["started", "restored", "begin", "begin", "submitted", "submitted", "staged", "durable"]
    )
    sequence.wait_for_event(
        trainer, event, sequence.choice.randint(1, 4) if event != "started" and event != "restored" else 1
    )
    sequence.pause()


def trainer_is_killed(sequence):
    trainer = sequence.start_trainer()
    reach_some_point(sequence, trainer)
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)


def trainer_is_terminated(sequence):
    trainer = sequence.start_trainer()
    reach_some_point(sequence, trainer)
    sequence.signal_trainer(trainer, signal.SIGTERM)
    sequence.wait_for_end(trainer)


def savers_are_killed(sequence):
    trainer = sequence.start_trainer()
    for _ in range(sequence.choice.randint(2, 5)):
        sequence.wait_for_event(trainer, "begin", len(trainer.facts("begin")) + 1)
        sequence.pause()
        sequence.kill_saver(trainer)
    # Commits work again with a new saver.
    sequence.wait_for_event(trainer, "durable", len(trainer.facts("durable")) + 1)
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)


def savers_are_terminated(sequence):
    trainer = sequence.start_trainer(**WAITING)
    for _ in range(sequence.choice.randint(1, 3)):
        sequence.wait_for_event(trainer, "submitted", len(trainer.facts("submitted")) + 1)
        sequence.pause()
        sequence.signal_saver(trainer, signal.SIGTERM)
    sequence.wait_for_event(trainer, "durable", len(trainer.facts("durable")) + 2)
    # A saver that gets SIGTERM completes what it has begun; a new saver does the rest.
    assert not trainer.facts("failed")
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)


def both_are_killed(sequence):
    trainer = sequence.start_trainer()
    reach_some_point(sequence, trainer)
    sequence.signal_saver(trainer, signal.SIGKILL)
    if sequence.choice.random() < 0.5:
        sequence.pause()
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)


def saver_is_stopped_for_a_while(sequence):
    trainer = sequence.start_trainer(patience=0.1, **WAITING)
    sequence.wait_for_event(trainer, "submitted", sequence.choice.randint(1, 4))
    sequence.pause()
    pid = sequence.stop_saver(trainer)
    sequence.wait(lambda: any("send it SIGCONT" in " ".join(facts) for facts in trainer.facts("log")), "the word of it")
    before = len(trainer.facts("durable"))
    sequence.pause()
    # A publication before the stop may be reported after the warning.
    assert len(trainer.facts("durable")) <= before + 1
    os.kill(pid, signal.SIGCONT)
    sequence.wait_for_event(trainer, "durable", len(trainer.facts("durable")) + 1)
    assert not trainer.facts("failed")
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)


def stop_before_it_publishes(sequence, trainer):
    """Stop the saver of a trainer when it has not yet published what is staged; return its pid."""
    while True:
        pid = sequence.stop_saver(trainer)
        if set(trainer.steps("staged")) - set(sequence.steps()):
            return pid
        os.kill(pid, signal.SIGCONT)
        sequence.wait_for_event(trainer, "staged", len(trainer.facts("staged")) + 1)


def orphan_is_stopped(sequence):
    trainer = sequence.start_trainer(waits=["staged"], **WAITING)
    sequence.wait_for_event(trainer, "staged", sequence.choice.randint(1, 3))
    sequence.pause()
    pid = stop_before_it_publishes(sequence, trainer)
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)
    assert set(trainer.steps("staged")) - set(trainer.steps("durable"))
    assert sequence.step_min == max(trainer.steps("staged"))
    next_trainer = sequence.start_trainer(patience=0.1, waits=["result"], steps=3, loaders=[])
    sequence.wait(
        lambda: any("waiting for the saver" in " ".join(facts) for facts in next_trainer.facts("log")), "the wait"
    )
    sequence.pause()
    assert not next_trainer.facts("restored"), "nothing is restored while the orphan lives"
    os.kill(pid, signal.SIGCONT)
    sequence.wait_for_end(next_trainer)
    assert next_trainer.facts("closed")


def trainer_is_stopped(sequence):
    trainer = sequence.start_trainer()
    reach_some_point(sequence, trainer)
    sequence.signal_trainer(trainer, signal.SIGSTOP)
    sequence.pause()
    if sequence.choice.random() < 0.5:
        sequence.signal_trainer(trainer, signal.SIGCONT)
        sequence.wait_for_event(trainer, "durable", len(trainer.facts("durable")) + 1)
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)


def trainer_is_interrupted(sequence):
    trainer = sequence.start_trainer(**WAITING)
    sequence.wait_for_event(trainer, "begin")
    for _ in range(sequence.choice.randint(2, 5)):
        sequence.pause()
        sequence.interrupt(trainer)
        sequence.wait_for_event(trainer, "durable", len(trainer.facts("durable")) + 1)
    # Ctrl-C interrupts the trainer's loop, and does not affect the saver.
    assert len({int(pid) for _, pid in trainer.facts("submitted")}) == 1
    assert not [facts for facts in trainer.facts("failed") if "was interrupted" not in facts[-1]]
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)


def saver_has_no_memory(sequence):
    trainer = sequence.start_trainer(**WAITING)
    sequence.wait_for_event(trainer, "begin", sequence.choice.randint(1, 3))
    sequence.pause()
    sequence.wait(lambda: sequence.saver_of(trainer), "a saver")
    pid = sequence.saver_of(trainer)
    trainer.failed_savers.add(pid)
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + sequence.choice.choice([0, 1, 4, 16, 64]) * MIB
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        sequence.kills["saver out of memory"] += 1

    def ends():
        return sum(len(trainer.facts(event)) for event in ("durable", "failed", "refused"))

    before = ends()
    sequence.wait(lambda: ends() >= before + 3, "an end")
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    sequence.counts["refused for want of memory"] += len(trainer.facts("failed")) + len(trainer.facts("refused"))
    sequence.wait_for_event(trainer, "durable", len(trainer.facts("durable")) + 2)
    sequence.signal_trainer(trainer, signal.SIGKILL)
    sequence.wait_for_end(trainer)


def trainer_has_no_memory(sequence):
    # The limit applies after the saver has started, because it would inherit the limit.
    trainer = sequence.start_trainer(limit_at=sequence.choice.randint(1, 4), steps=6, loaders=[], **WAITING)
    sequence.wait_for_end(trainer)
    sequence.kills["trainer out of memory"] += 1
    assert trainer.facts("closed"), (trainer.events[-8:], sequence.trainers.errors()[-2000:])
    sequence.counts["refused for want of memory"] += len(trainer.facts("refused"))
    # All other commits are durable: only the states that did not fit are lost.
    assert len(trainer.steps("durable")) + len(trainer.facts("refused")) == 6


def trainer_leaves(sequence):
    how = sequence.choice.choice(["exit", "raise", "memory", "_exit", "_exit"])
    trainer = sequence.start_trainer(exit_at=sequence.choice.randrange(4), exit_how=how, loaders=[], **WAITING)
    sequence.wait_for_end(trainer)
    sequence.kills[f"trainer left by {how}"] += 1
    if how != "_exit":
        # The interpreter exits normally, so everything that was submitted is durable.
        sequence.wait_alone()
        sequence.step_min = max(sequence.step_min, *trainer.steps("submitted"))


FAULTS = {
    trainer_is_killed: 12,
    trainer_is_terminated: 3,
    savers_are_killed: 4,
    savers_are_terminated: 2,
    both_are_killed: 3,
    saver_is_stopped_for_a_while: 2,
    orphan_is_stopped: 3,
    trainer_is_stopped: 3,
    trainer_is_interrupted: 3,
    saver_has_no_memory: 3,
    trainer_has_no_memory: 2,
    trainer_leaves: 3,
}
"""How often each fault occurs in a sequence."""


def run_sequence(sequence, faults):
    for fault in faults:
        before = sequence.kills.total()
        fault(sequence)
        assert sequence.kills.total() > before or fault is saver_has_no_memory
    sequence.wait_alone()
    sequence.check()
    sequence.check_next()
    sequence.wait_alone()
    return sequence


def faults_of(seed, weights):
    faults = [fault for fault, count in weights.items() for _ in range(count)]
    random.Random(seed).shuffle(faults)
    return faults


TORCH_FAULTS = {fault: (count + 1) // 3 for fault, count in FAULTS.items()}
"""The same for trainers with torch and a guard, which are slower."""

SEQUENCES = [*[("numpy", seed) for seed in range(5)], ("torch", 100)]


@pytest.mark.deep(parts=5)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("task", "seed"), SEQUENCES)
def test_random_kills_lose_nothing(make_sequence, sample, note, task, seed):
    faults = sample.part(faults_of(seed, FAULTS if task == "numpy" else TORCH_FAULTS), parts=12)
    sequence = run_sequence(make_sequence(task, sample.seed(seed)), faults)
    note(str(sequence))
    # Each fault hits a process. Its effect depends on time; a full sequence covers all of them.
    assert sequence.kills.total() >= sum(fault is not saver_has_no_memory for fault in faults) > 0
    assert sequence.counts["acknowledged"] > 0
    if sample.is_whole:
        assert sequence.killed >= (60 if task == "numpy" else 15)
        assert sequence.kills.total() >= 20
        check_noticed(sequence)
    if sample.is_whole and task == "numpy":
        assert sequence.counts["orphaned"] > 0
        assert sequence.counts["half-staged and not visible"] > 0


def check_noticed(sequence):
    """Check that trainers noticed dead savers within a second in most cases, because a busy machine is slow."""
    assert sequence.noticed
    assert statistics.median(seconds for seconds, _ in sequence.noticed) < 1
