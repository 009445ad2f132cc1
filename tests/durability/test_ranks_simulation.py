"""Protects the protocol between ranks in large jobs: random orders, delays and faults, with the real code."""

from __future__ import annotations

import random

import pytest

from support.ranks_rules import mutant
from support.ranks_simulator import Faults, Simulation

WORLD_MAX = 4096
MANY, FEW = 10_000, 100
LARGE = 24


def faults_of(seed):
    source = random.Random(seed)
    one, few = (0, 0, 0, 1), (0, 0, 0, 0, 1, 2)
    kinds = (
        source.choice(few),
        source.choice(few),
        source.choice(few),
        source.choice(one),
        source.choice((0,) * 7 + (1,)),
    )
    rank_0 = source.random() < 0.5
    return Faults(*kinds, leaves=source.choice((0,) * 5 + (1,)), rank_0=rank_0)


def play(seed, world, **options):
    simulation = Simulation(world, seed, commits=3, faults=faults_of(seed), **options)
    simulation.run()
    return simulation


def play_many(seeds, *, world_max, **options):
    return [len(play(seed, 2 + seed % (world_max - 1), **options).store) for seed in seeds]


def test_random_faults_keep_the_promises(sample_seed):
    published = play_many(range(sample_seed, sample_seed + FEW), world_max=10)
    # Otherwise only failures, or no failures, would be tested.
    assert {0, 3} <= set(published)


@pytest.fixture
def sample_seed(request):
    """Return a seed of the commit that is tested."""
    return random.Random(request.config.getoption("hypothesis_seed", None) or 0).randrange(1 << 30)


@pytest.mark.deep(parts=10)
@pytest.mark.parametrize("part", range(10))
def test_many_random_faults_keep_the_promises(part):
    published = play_many(range(part * MANY // 10, (part + 1) * MANY // 10), world_max=32)
    assert all(published.count(number) >= len(published) // 50 for number in range(4))


@pytest.mark.deep(parts=LARGE)
@pytest.mark.parametrize("seed", range(LARGE))
def test_faults_in_a_job_of_4096_ranks_keep_the_promises(seed):
    play(seed, WORLD_MAX)


def test_many_ranks_send_few_messages():
    simulation = Simulation(512, 1, commits=1)
    simulation.run()
    assert simulation.store == [1]
    # Begin, Write, Staged, AllStaged, Part, Done; a few Content and More.
    assert simulation.messages < 6 * 512 + 100


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("WRITING and not commit.awaited and", "WRITING and"),
        ("if self._needs(commit, rank):", "if False:"),
        ("if share.duty is Duty.SENT:", "if False:"),
        ("return None, self._send([rank], late)", "return None, []"),
        ("if gone is not None:", "if False:"),
        ("self._send(sorted(commit.answered_to), outcome)", "self._send([0], outcome)"),
        (
            "lost = next(iter(self._lost))\n        return self._fail(commit, lost,",
            "return []\n        lost = 0\n        return self._fail(commit, lost,",
        ),
    ],
)
def test_simulation_finds_a_missing_rule(old, new):
    core = mutant(old, new)
    with pytest.raises((AssertionError, LookupError)):
        play_many(range(500), world_max=10, core=core)
