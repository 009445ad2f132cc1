"""Protects checkpoints from servers that fail, lie, fall silent or lose answers: nothing is lost, or let go of early.

Every request of a push, a pull, a commit to a bucket and the making of a store there is broken, once and for ever.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from typing import ClassVar

import numpy as np
import obstore
import pytest

import ckstore
from ckstore.errors import CkstoreError
from ckstore.format import layout
from ckstore.io import remote
from ckstore.io.address import backend_for
from ckstore.testing.fault_proxy import AFTER, FAULTS, REFUSED

STEPS = (1, 2, 3)


def state_of(seed):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(5_000).astype(np.float32), "shared": np.arange(3_000), "step": seed}


def assert_restores(store, *steps):
    for step in steps:
        got, wanted = store.restore(step), state_of(step)
        assert np.array_equal(got["w"], wanted["w"])
        assert np.array_equal(got["shared"], wanted["shared"])


def free_local_packs(store):
    """Remove what a collection would."""
    parts = store._parts
    named = set()
    for name in parts.manifests.listing().names:
        named |= {pack.pack_id for pack in parts.manifests.load(name).packs if pack.tier == "local"}
    for folder in layout.pack_folders():
        for file in parts.backend.list_names(folder):
            if layout.parse_pack_file(file) not in named:
                parts.backend.unlink(f"{folder}/{file}")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store of three checkpoints that share a chunk, to be copied."""
    folder = tmp_path_factory.mktemp("template") / "store"
    with ckstore.open(folder) as store:
        for step in STEPS:
            store.commit(state_of(step), step)
    return folder


@contextlib.contextmanager
def through(proxy):
    """Let clients go through the proxy: only where requests are counted or broken, for it costs as much as a server."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield


def requests_of(proxy, act):
    """Return how many requests something makes when nothing fails."""
    proxy.begin()
    with through(proxy):
        act()
    return len(proxy.seen)


class Push:
    """Two of three checkpoints go to an empty prefix."""

    def __init__(self, template, folder, address):
        shutil.copytree(template, folder)
        self.folder, self.address = folder, address

    def act(self):
        with ckstore.open(self.folder) as store:
            store.push(self.address, keep_local=1)

    def check(self, proxy, *, has_acted):
        with ckstore.open(self.folder) as store:
            proxy.begin()
            tiers = {step: {pack.tier for pack in store.contents(step).packs} for step in STEPS}
            assert not has_acted or tiers == {1: {"remote"}, 2: {"remote"}, 3: {"local"}}
            # Whatever a collection frees now must not be needed.
            free_local_packs(store)
            assert_restores(store, *STEPS)
            store.push(self.address, keep_local=1)
            free_local_packs(store)
            assert_restores(store, *STEPS)


class Pull:
    """Three checkpoints that were pushed come back."""

    def __init__(self, template, folder, address):
        shutil.copytree(template, folder)
        self.folder = folder
        with ckstore.open(self.folder) as store:
            store.push(address, keep_local=0)
            free_local_packs(store)

    def act(self):
        with ckstore.open(self.folder) as store:
            store.pull()

    def check(self, proxy, *, has_acted):
        with ckstore.open(self.folder) as store:
            proxy.begin()
            assert_restores(store, *STEPS)
            if not has_acted:
                store.pull()
            (self.folder / "config.json").unlink()
        with ckstore.open(self.folder) as store:
            assert_restores(store, *STEPS)
            assert store.verify("decode").is_clean


class Commit:
    """A second checkpoint is committed straight to a bucket."""

    def __init__(self, template, folder, address):
        self.address = address
        with ckstore.open(address) as store:
            store.commit(state_of(1), 1)

    def act(self):
        with ckstore.open(self.address) as store:
            store.commit(state_of(2), 2)

    def check(self, proxy, *, has_acted):
        proxy.begin()
        with ckstore.open(self.address, create=False) as store:
            assert_restores(store, 1)
            newest = store.restore()
            assert newest["step"] in ((2,) if has_acted else (1, 2))
            assert np.array_equal(newest["w"], state_of(newest["step"])["w"])
            if not has_acted:
                store.commit(state_of(3), 3)
                assert store.restore()["step"] == 3
            assert store.verify("decode").is_clean


class Init:
    """A store is made in a bucket, and gets its first checkpoint."""

    def __init__(self, template, folder, address):
        self.address = address

    def act(self):
        with ckstore.open(self.address) as store:
            store.commit(state_of(1), 1)

    def check(self, proxy, *, has_acted):
        proxy.begin()
        with ckstore.open(self.address) as store:
            if has_acted:
                assert_restores(store, 1)
            else:
                with_or_without = [info.step for info in store.log()]
                assert with_or_without in ([], [1])
                store.commit(state_of(1), 1)
                assert_restores(store, 1)


class Collect:
    """One of three checkpoints that were pushed was dropped for good, and goes in the bucket, too."""

    def __init__(self, template, folder, address):
        shutil.copytree(template, folder)
        self.folder = folder
        with ckstore.open(self.folder) as store:
            store.push(address, keep_local=0)
            store.delete(2)
            store.gc(now=True, min_age=0)

    def act(self):
        with ckstore.open(self.folder) as store:
            store.gc_tier(min_age=0)

    def check(self, proxy, *, has_acted):
        with ckstore.open(self.folder) as store:
            proxy.begin()
            assert_restores(store, 1, 3)
            # What a server said to be removed and was not, goes now.
            store.gc_tier(min_age=0)
            assert store.gc_tier(min_age=0, dry_run=True).packs == {}
            assert_restores(store, 1, 3)
            assert store.verify("decode", remote=True).is_clean


class Rewrite:
    """Of what two of three checkpoints in the bucket share the pack is rewritten there."""

    def __init__(self, template, folder, address):
        shutil.copytree(template, folder)
        self.folder, self.address = folder, address
        with ckstore.open(self.folder) as store:
            store.push(address, keep_local=0)
            store.delete(1)
            store.gc(now=True, min_age=0)
        self.report = None

    def act(self):
        with ckstore.open(self.folder) as store:
            self.report = store.gc_tier(min_age=0)

    def check(self, proxy, *, has_acted):
        with ckstore.open(self.folder) as store:
            proxy.begin()
            assert_restores(store, 2, 3)
            # A server that shows nothing, again and again, has nothing to be rewritten.
            is_told = has_acted and not self.report.stop and not self.report.repacked.troubles
            assert not is_told or self.report.renewed == 2 * len(self.report.rewrites)
            for _ in range(2):
                # What is half done is finished, and what was replaced goes for good.
                store.gc_tier(min_age=0)
                store.gc(now=True, min_age=0)
            last = store.gc_tier(min_age=0)
            assert (last.rewrites, last.renewed) == ([], 0)
            assert store.gc_tier(min_age=0, dry_run=True).packs == {}
            assert_restores(store, 2, 3)
            assert store.verify("decode", remote=True).is_clean
        with ckstore.open(self.address, create=False) as there:
            assert_restores(there, 2, 3)
            packs = {name[-37:-5] for name, _ in there._parts.backend.list_deep("packs") if name.endswith(".pack")}
            # One for each of the two, and one for what they share; what was replaced for one of them only when it broke
            # is written once more for the other.
            assert packs == {pack.pack_id for step in (2, 3) for pack in there.contents(step).packs}
            assert len(packs) <= (3 if has_acted else 4)


class CollectHome:
    """A store that lies in a bucket is collected, by a rule: one checkpoint goes, one was dropped before."""

    made: ClassVar[dict[str, bytes]] = {}
    """Objects of such a store; made once."""

    def __init__(self, template, folder, address):
        self.address = address
        self.obstacles = ()
        there = backend_for(address)
        # Past the library, which looks at what it has put: what is copied is no part of what is tried here.
        for name, content in self.made.items():
            obstore.put(there.bucket._store, name, content)
        if self.made:
            return
        with ckstore.open(address) as store:
            for step in (1, 2, 3):
                store.commit(state_of(step), step)
            store.delete(1)
        self.made.update({name: there.read_bytes(name, nbytes_max=1 << 30) for name, _ in there.list_deep("")})

    def act(self):
        with ckstore.open(self.address) as store:
            self.obstacles = store.gc(ckstore.Retention(keep_last=1), now=True, min_age=0).obstacles

    def check(self, proxy, *, has_acted):
        proxy.begin()
        with ckstore.open(self.address) as store:
            assert_restores(store, 3)
            # A manifest or a tag that cannot be read keeps what it may name, and the report says so.
            if has_acted and not self.obstacles:
                assert store.steps() == [3]
            # What was left lies as if nobody had collected: commits and collections go on from there.
            store.commit(state_of(4), 4)
            self.act()
            assert not self.obstacles
            assert store.gc(now=True, min_age=0, dry_run=True).plan.moves == ()
            assert store.steps() == [4]
            assert_restores(store, 4)
            assert store.verify("decode").is_clean


SCENARIOS = {
    "push": Push,
    "pull": Pull,
    "commit": Commit,
    "init": Init,
    "collect": Collect,
    "rewrite": Rewrite,
    "collect home": CollectHome,
}


STRIDES = {"collect home": 6, "rewrite": 4}
"""Of how many kinds of faults a request meets one, where it is not 2: a collection there makes up to a hundred
requests, and whether it did harm is known after two hundred more."""


@contextlib.contextmanager
def impatient():
    """Let clients wait for no answer longer than a server is silent: only here, for a busy one is silent, too."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(remote, "DEFAULT_OPTIONS", replace(remote.DEFAULT_OPTIONS, read_timeout_seconds=0.6))
        yield


def strike(proxy, scenario, number, fault, is_for_ever):
    """Run a scenario with one request, or all from one on, broken; return whether the fault was met."""
    proxy.begin_at(number, fault, is_for_ever=is_for_ever)
    has_acted = True
    try:
        # Whatever else it raises, FileNotFoundError for one, is not meant for people.
        with through(proxy), impatient() if fault.startswith("silence") else contextlib.nullcontext():
            scenario.act()
    except CkstoreError:
        has_acted = False
    was_met = len(proxy.seen) > number
    scenario.check(proxy, has_acted=has_acted)
    return was_met


@pytest.fixture
def past_proxy(proxy, server, monkeypatch):
    """What is made before and looked at after goes straight to the server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)


def run_points(name, template, tmp_path, proxy, server, tell, points):
    """Run a scenario for each of (request, fault, does it last), and say how many of them it met."""
    make = SCENARIOS[name]
    met = 0
    for number, fault, is_for_ever in points:
        proxy.begin()
        folder = tmp_path / f"{number}-{fault}-{is_for_ever}"
        met += strike(proxy, make(template, folder, server.new_address()), number, fault, is_for_ever)
        shutil.rmtree(folder, ignore_errors=True)
    assert met > 0.8 * len(points), "most faults are met"
    tell(f"faults of an S3 server: {name}, {len(points)} points, {met} met")


def count_of(name, template, tmp_path, proxy, server):
    return requests_of(proxy, SCENARIOS[name](template, tmp_path / "count", server.new_address()).act)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_lost_at_some_failing_requests(
    name, filled, tmp_path, proxy, past_proxy, hasty, server, tell, quiet_log
):
    count = count_of(name, filled, tmp_path, proxy, server)
    points = [(number, fault, number % 2 == 1) for number in range(count) for fault in FAULTS if "silence" not in fault]
    run_points(name, filled, tmp_path, proxy, server, tell, points[3::43])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_lost_at_any_failing_request(
    name, fault, filled, tmp_path, proxy, past_proxy, hasty, server, tell, quiet_log
):
    count = count_of(name, filled, tmp_path, proxy, server)
    # A server that never answers costs seconds each time.
    every = 9 if fault.startswith("silence") else 2
    points = [(number, fault, False) for number in range(count)]
    points += [(number, fault, True) for number in range(1, count, every)]
    # Every request meets every second kind of fault, once and for ever: over 600 points, in a few minutes.
    stride = STRIDES.get(name, 2)
    run_points(name, filled, tmp_path, proxy, server, tell, points[FAULTS.index(fault) % stride :: stride])


def test_faults_come_in_both_kinds():
    assert set(REFUSED).isdisjoint(AFTER)
    assert len(FAULTS) == 10
