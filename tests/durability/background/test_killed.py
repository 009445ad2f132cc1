"""Protects background commits from everything that ends a trainer or its saver, at random points.

Each lane is one store and many lives of trainers: a life restores, trains and commits in the background until it or
its saver is killed, stopped, interrupted or left without memory. Then: what was acknowledged is there, bit for bit;
what was staged is published although the trainer died; nothing half-staged is ever visible; the next trainer resumes
the newest of it and needs no repair; and no process and no memory is left behind. Seeds are printed; a stroke comes at
a random time after a random word of the trainer.
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

from support.trainer_sequence import Lane

pytestmark = pytest.mark.usefixtures("quiet_log")

MIB = 1 << 20
WAITING = {"policy": {"on_busy": "wait"}}


@pytest.fixture
def make_lane(fast_folder):
    lanes = []

    def make(task, seed):
        folder = fast_folder / f"{task}-{seed}"
        folder.mkdir(mode=0o700)
        lanes.append(Lane(folder, task, seed))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.close()


# Strokes: what ends one life, or two


def reach_some_point(lane, life):
    word = lane.choice.choice(["born", "restored", "begin", "begin", "handed", "handed", "staged", "durable"])
    lane.wait_said(life, word, lane.choice.randint(1, 4) if word != "born" and word != "restored" else 1)
    lane.pause()


def trainer_is_killed(lane):
    life = lane.live()
    reach_some_point(lane, life)
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)


def trainer_is_terminated(lane):
    life = lane.live()
    reach_some_point(lane, life)
    lane.strike(life, signal.SIGTERM)
    lane.bury(life)


def savers_are_killed(lane):
    life = lane.live()
    for _ in range(lane.choice.randint(2, 5)):
        lane.wait_said(life, "begin", len(life.facts("begin")) + 1)
        lane.pause()
        lane.kill_saver(life)
    # And then it works again.
    lane.wait_said(life, "durable", len(life.facts("durable")) + 1)
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)


def savers_are_terminated(lane):
    life = lane.live(**WAITING)
    for _ in range(lane.choice.randint(1, 3)):
        lane.wait_said(life, "handed", len(life.facts("handed")) + 1)
        lane.pause()
        lane.strike_saver(life, signal.SIGTERM)
    lane.wait_said(life, "durable", len(life.facts("durable")) + 2)
    # A saver that is asked to end carries through what has begun, and what comes next is another one's.
    assert not life.facts("failed")
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)


def both_are_killed(lane):
    life = lane.live()
    reach_some_point(lane, life)
    lane.strike_saver(life, signal.SIGKILL)
    if lane.choice.random() < 0.5:
        lane.pause()
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)


def saver_is_stopped_for_a_while(lane):
    life = lane.live(patience=0.1, **WAITING)
    lane.wait_said(life, "handed", lane.choice.randint(1, 4))
    lane.pause()
    pid = lane.stop_saver(life)
    lane.wait(lambda: any("send it SIGCONT" in " ".join(facts) for facts in life.facts("log")), "the word of it")
    before = len(life.facts("durable"))
    lane.pause()
    # What was published before the stop may be heard of after the word.
    assert len(life.facts("durable")) <= before + 1
    os.kill(pid, signal.SIGCONT)
    lane.wait_said(life, "durable", len(life.facts("durable")) + 1)
    assert not life.facts("failed")
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)


def stop_before_it_publishes(lane, life):
    """Stop the saver of a trainer at a time when it has not yet published what is staged; return its pid."""
    while True:
        pid = lane.stop_saver(life)
        if set(life.steps("staged")) - set(lane.steps()):
            return pid
        os.kill(pid, signal.SIGCONT)
        lane.wait_said(life, "staged", len(life.facts("staged")) + 1)


def orphan_is_stopped(lane):
    life = lane.live(waits=["staged"], **WAITING)
    lane.wait_said(life, "staged", lane.choice.randint(1, 3))
    lane.pause()
    pid = stop_before_it_publishes(lane, life)
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)
    assert set(life.steps("staged")) - set(life.steps("durable"))
    assert lane.floor == max(life.steps("staged"))
    heir = lane.live(patience=0.1, waits=["result"], steps=3, loaders=[])
    lane.wait(lambda: any("waiting for the saver" in " ".join(facts) for facts in heir.facts("log")), "the wait")
    lane.pause()
    assert not heir.facts("restored"), "nothing is restored while the orphan lives"
    os.kill(pid, signal.SIGCONT)
    lane.bury(heir)
    assert heir.facts("closed")


def trainer_is_stopped(lane):
    life = lane.live()
    reach_some_point(lane, life)
    lane.strike(life, signal.SIGSTOP)
    lane.pause()
    if lane.choice.random() < 0.5:
        lane.strike(life, signal.SIGCONT)
        lane.wait_said(life, "durable", len(life.facts("durable")) + 1)
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)


def trainer_is_interrupted(lane):
    life = lane.live(**WAITING)
    lane.wait_said(life, "begin")
    for _ in range(lane.choice.randint(2, 5)):
        lane.pause()
        lane.interrupt(life)
        lane.wait_said(life, "durable", len(life.facts("durable")) + 1)
    # What was interrupted is the trainer's loop; the saver knows nothing of it.
    assert len({int(pid) for _, pid in life.facts("handed")}) == 1
    assert not [facts for facts in life.facts("failed") if "was interrupted" not in facts[-1]]
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)


def saver_has_no_memory(lane):
    life = lane.live(**WAITING)
    lane.wait_said(life, "begin", lane.choice.randint(1, 3))
    lane.pause()
    lane.wait(lambda: lane.saver_of(life), "a saver")
    pid = lane.saver_of(life)
    life.struck.add(pid)
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + lane.choice.choice([0, 1, 4, 16, 64]) * MIB
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        lane.kills["saver out of memory"] += 1

    def ends():
        return sum(len(life.facts(word)) for word in ("durable", "failed", "refused"))

    before = ends()
    lane.wait(lambda: ends() >= before + 3, "an end")
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    lane.counts["refused for want of memory"] += len(life.facts("failed")) + len(life.facts("refused"))
    lane.wait_said(life, "durable", len(life.facts("durable")) + 2)
    lane.strike(life, signal.SIGKILL)
    lane.bury(life)


def trainer_has_no_memory(lane):
    # The saver is there already, else it would be born into the same want.
    life = lane.live(limit_at=lane.choice.randint(1, 4), steps=6, loaders=[], **WAITING)
    lane.bury(life)
    lane.kills["trainer out of memory"] += 1
    assert life.facts("closed"), (life.said[-8:], lane.trainers.errors()[-2000:])
    lane.counts["refused for want of memory"] += len(life.facts("refused"))
    # All others are durable: the lack of memory costs what did not fit, and nothing else.
    assert len(life.steps("durable")) + len(life.facts("refused")) == 6


def trainer_leaves(lane):
    how = lane.choice.choice(["exit", "raise", "memory", "_exit", "_exit"])
    life = lane.live(exit_at=lane.choice.randrange(4), exit_how=how, loaders=[], **WAITING)
    lane.bury(life)
    lane.kills[f"trainer left by {how}"] += 1
    if how != "_exit":
        # The interpreter ends in order: all that was given to the saver is durable.
        lane.wait_alone()
        lane.floor = max(lane.floor, *life.steps("handed"))


STROKES = {
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
"""How often each comes in a lane."""


def run_lane(lane, strokes):
    for stroke in strokes:
        before = lane.kills.total()
        stroke(lane)
        assert lane.kills.total() > before or stroke is saver_has_no_memory
    lane.wait_alone()
    lane.check()
    lane.check_next()
    lane.wait_alone()
    return lane


def strokes_of(seed, weights):
    strokes = [stroke for stroke, count in weights.items() for _ in range(count)]
    random.Random(seed).shuffle(strokes)
    return strokes


TORCH_STROKES = {stroke: (count + 1) // 3 for stroke, count in STROKES.items()}
"""The same in a lane whose trainers are guarded ones of torch, which take longer."""

LANES = [*[("numpy", seed) for seed in range(5)], ("torch", 100)]


@pytest.mark.deep(parts=5)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("task", "seed"), LANES)
def test_killed_trainers_and_savers_lose_nothing_that_was_promised(make_lane, sample, note, task, seed):
    strokes = sample.part(strokes_of(seed, STROKES if task == "numpy" else TORCH_STROKES), parts=12)
    lane = run_lane(make_lane(task, sample.seed(seed)), strokes)
    note(str(lane))
    # Each stroke hits somebody. What it leads to depends on time; in a whole lane all of it happens.
    assert lane.kills.total() >= sum(stroke is not saver_has_no_memory for stroke in strokes) > 0
    assert lane.counts["acknowledged"] > 0
    if sample.is_whole:
        assert lane.killed >= (60 if task == "numpy" else 15)
        assert lane.kills.total() >= 20
        check_noticed(lane)
    if sample.is_whole and task == "numpy":
        assert lane.counts["orphaned"] > 0
        assert lane.counts["half-staged and not visible"] > 0


def check_noticed(lane):
    """Check that trainers noticed the deaths of savers within a second, in most cases: a busy machine is slow."""
    assert lane.noticed
    assert statistics.median(seconds for seconds, _ in lane.noticed) < 1
