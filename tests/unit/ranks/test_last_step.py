"""Ranks that get a signal at different moments agree on one step, although no step can end without all of them."""

from __future__ import annotations

import random
import threading

import ckstore
from ckstore.ranks.last_step import LastStep
from support.thread_ranks import ThreadJob

WORLD = 4


def train(job: ThreadJob, signals: dict[int, int], steps: int = 40) -> list[int | None]:
    """Run lock-step training; rank r gets a signal during step ``signals[r]``. Return each rank's last step."""
    barrier = threading.Barrier(WORLD)
    agreements = job.each(lambda rank: LastStep(rank.link))

    def loop(rank):
        number = rank.link.rank
        for step in range(1, steps):
            barrier.wait(20)
            if agreements[number].is_reached(step, is_asked=step >= signals.get(number, steps)):
                return step
        return None

    return job.each(loop)


def test_all_ranks_stop_after_the_same_step(tmp_path):
    ckstore.open(tmp_path / "store").close()
    chance = random.Random(5)
    cases = [{2: 5}, {0: 5}, dict.fromkeys(range(WORLD), 5), {1: 5, 3: 6}]
    cases += [{rank: chance.randint(3, 30) for rank in range(WORLD)} for _ in range(6)]
    for signals in cases:
        job = ThreadJob(tmp_path / "store", WORLD)
        found = train(job, signals)
        assert len(set(found)) == 1, (signals, found)
        assert found[0] in (min(signals.values()) + 1, min(signals.values()) + 2), (signals, found)
        job.close()


def test_nobody_stops_without_a_signal(tmp_path):
    ckstore.open(tmp_path / "store").close()
    job = ThreadJob(tmp_path / "store", WORLD)
    assert train(job, {}, steps=5) == [None] * WORLD
    job.close()
