"""Protects checkpoints from servers that fail, lie, do not answer or lose answers.

Every request of a push, a pull, a commit to a bucket, a collection and the creation of a store in a bucket is broken,
once or from then on. Afterwards everything that was committed restores, and the store works again.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace

import pytest

import ckstore
from ckstore.errors import CkstoreError
from ckstore.io.remote import client
from support.fault_proxy import AFTER, FAULTS, REFUSED
from support.fault_scenarios import SCENARIOS, STEPS, state_of

STRIDES = {"collect home": 6, "rewrite": 4}
"""The fault interval of each scenario, 2 by default.

A collection makes up to a hundred requests, and checking its result takes two hundred more.
"""

READ_TIMEOUT_SECONDS = 0.15
SILENCE_SECONDS = 0.3
"""A silent server sends nothing for longer than its client waits."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A template: a store of three checkpoints that share a chunk."""
    folder = tmp_path_factory.mktemp("template") / "store"
    with ckstore.open(folder) as store:
        for step in STEPS:
            store.commit(state_of(step), step)
    return folder


@contextlib.contextmanager
def through(proxy):
    """Use the proxy only while requests are counted or broken, because it is slow."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield


def requests_of(proxy, act):
    """Return how many requests an operation makes without faults."""
    proxy.begin()
    with through(proxy):
        act()
    return len(proxy.seen)


@contextlib.contextmanager
def short_timeouts(proxy, fault):
    """Use short timeouts only for silent servers, because a busy machine is slow too."""
    with pytest.MonkeyPatch.context() as patches:
        if fault.startswith("silence"):
            patches.setattr(proxy, "silence_seconds", SILENCE_SECONDS)
            options = replace(client.DEFAULT_OPTIONS, read_timeout_seconds=READ_TIMEOUT_SECONDS)
            patches.setattr(client, "DEFAULT_OPTIONS", options)
        yield


def run_with_fault(proxy, scenario, number, fault, is_for_ever):
    """Run a scenario with one request broken, or all from one on; return whether the fault was reached."""
    proxy.begin_at(number, fault, is_for_ever=is_for_ever)
    has_acted = True
    try:
        # Any other exception, for example FileNotFoundError, is a failure of this test.
        with through(proxy), short_timeouts(proxy, fault):
            scenario.act()
    except CkstoreError:
        has_acted = False
    was_met = len(proxy.seen) > number
    scenario.check(proxy, has_acted=has_acted)
    return was_met


@pytest.fixture(scope="module")
def counts():
    """Number of requests of each scenario without faults, by name."""
    return {}


def points_of(count, fault, stride):
    """Return (request, whether all later ones fail too) for one fault: each request gets every ``stride``-th fault."""
    # A server that never answers costs seconds each time.
    every = 9 if fault.startswith("silence") else 2
    points = [(number, False) for number in range(count)] + [(number, True) for number in range(1, count, every)]
    return points[FAULTS.index(fault) % stride :: stride]


# With this order and number of parts, each run has nearly all scenarios, with another fault for each of them.
@pytest.mark.deep(parts=21)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_failing_request_loses_nothing(
    name, fault, filled, tmp_path, proxy, past_proxy, few_retries, server, counts, sample, note, quiet_log
):
    def make(folder):
        return SCENARIOS[name](filled, tmp_path / folder, server.new_address())

    if name not in counts:
        counts[name] = requests_of(proxy, make("count").act)
    points = sample.part(points_of(counts[name], fault, STRIDES.get(name, 2)), parts=3)
    met = 0
    for number, is_for_ever in points:
        proxy.begin()
        folder = f"{number}-{is_for_ever}"
        met += run_with_fault(proxy, make(folder), number, fault, is_for_ever)
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    assert met >= (0.8 if sample.is_whole else 0.5) * len(points) > 0, "most faults are met"
    note(f"faults of an S3 server: {name}, {fault}, {len(points)} points, {met} met")


def test_faults_are_of_both_kinds():
    assert set(REFUSED).isdisjoint(AFTER)
    assert len(FAULTS) == 10
