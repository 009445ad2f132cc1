"""What can be broken by a failing S3 server: pushes, pulls, commits, collections; each is made, acted out and checked.

A scenario is made once through the library. For each further point its files and objects are copied to a new place,
because making it takes longer than what is tested.
"""

from __future__ import annotations

import abc
import shutil

import numpy as np
import obstore

import ckstore
from ckstore._testing import repository_of
from ckstore.format.records import HomeRecord, decode_record, encode_record, with_changes
from ckstore.io.url import backend_for
from ckstore.store.listing import packs_in
from ckstore.store.store_config import change_config
from ckstore.store.tier_checks import place_of
from support.push_states import free_local_packs

STEPS = (1, 2, 3)


def state_of(seed):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(5_000).astype(np.float32), "shared": np.arange(3_000), "step": seed}


def assert_restores(store, *steps):
    for step in steps:
        got, wanted = store.restore(step), state_of(step)
        assert np.array_equal(got["w"], wanted["w"])
        assert np.array_equal(got["shared"], wanted["shared"])


class Scenario(abc.ABC):
    """Something that a store does with a bucket.

    Args:
        template: A store of ``STEPS`` in a folder; what is made once lies next to it.
        folder: Where a store in a folder is made.
        address: An empty prefix of a bucket.
    """

    _objects: dict[str, bytes]

    def __init__(self, template, folder, address):
        self.template, self.folder, self.address = template, folder, address
        made = template.with_name(type(self).__name__)
        if made.exists():
            self._copy(made)
            return
        self.prepare()
        made.mkdir()
        if folder.exists():
            shutil.copytree(folder, made / "store")
        there = backend_for(address)
        type(self)._objects = {name: there.read_bytes(name, nbytes_max=1 << 30) for name, _ in there.list_deep("")}

    def _copy(self, made):
        """Copy what was made, past the library, which would check each object that it puts."""
        there = backend_for(self.address)
        for name, content in self._objects.items():
            obstore.put(there.bucket._store, name, content)
        if not (made / "store").exists():
            return
        shutil.copytree(made / "store", self.folder)
        if (self.folder / "config.json").exists():
            change_config(backend_for(str(self.folder)), self._with_address)
        if (home := self.folder / "home.json").exists():
            # As if it had been made here: a copy may not change the tier, and adopting keeps what was dropped here.
            record = decode_record(home.read_bytes(), HomeRecord, where=str(home))
            moved = with_changes(record, place=place_of(backend_for(str(self.folder))))
            home.write_bytes(encode_record(moved))

    def _with_address(self, record):
        """Let the only tier be the new place."""
        return with_changes(record, tiers=dict.fromkeys(record.tiers, self.address))

    def prepare(self):  # noqa: B027 - by default there is nothing before
        """Make what is there before."""

    @abc.abstractmethod
    def act(self):
        """Do what is tested, through a server that fails."""

    @abc.abstractmethod
    def check(self, proxy, *, has_acted):
        """Assert that nothing was lost, and that all goes on once the server works."""


class Push(Scenario):
    """Two of three checkpoints go to an empty prefix."""

    def prepare(self):
        shutil.copytree(self.template, self.folder)

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


class Pull(Scenario):
    """Three checkpoints that were pushed come back."""

    def prepare(self):
        shutil.copytree(self.template, self.folder)
        with ckstore.open(self.folder) as store:
            store.push(self.address, keep_local=0)
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


class Commit(Scenario):
    """A second checkpoint is committed straight to a bucket."""

    def prepare(self):
        with ckstore.open(self.address) as store:
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


class Init(Scenario):
    """A store is made in a bucket, and gets its first checkpoint."""

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


class Collect(Scenario):
    """One of three checkpoints that were pushed was dropped for good, and is removed from the bucket too."""

    def prepare(self):
        shutil.copytree(self.template, self.folder)
        with ckstore.open(self.folder) as store:
            store.push(self.address, keep_local=0)
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


class Rewrite(Scenario):
    """The pack that two of three checkpoints in the bucket share is rewritten there."""

    report = None

    def prepare(self):
        shutil.copytree(self.template, self.folder)
        with ckstore.open(self.folder) as store:
            store.push(self.address, keep_local=0)
            store.delete(1)
            store.gc(now=True, min_age=0)

    def act(self):
        with ckstore.open(self.folder) as store:
            self.report = store.gc_tier(min_age=0)

    def check(self, proxy, *, has_acted):
        with ckstore.open(self.folder) as store:
            proxy.begin()
            assert_restores(store, 2, 3)
            # A server that shows nothing, again and again, has nothing to be rewritten.
            is_reported = has_acted and not self.report.stop and not self.report.repacked.troubles
            assert not is_reported or self.report.renewed == 2 * len(self.report.rewrites)
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
            packs = {pack_id.hex() for pack_id, _ in packs_in(repository_of(there).backend)}
            # One for each of the two, and one for what they share; what was replaced for one of them only when it broke
            # is written once more for the other.
            assert packs == {pack.pack_id for step in (2, 3) for pack in there.contents(step).packs}
            assert len(packs) <= (3 if has_acted else 4)


class CollectHome(Scenario):
    """A store in a bucket is collected by a rule: one checkpoint is dropped, another one was dropped before."""

    obstacles = ()

    def prepare(self):
        with ckstore.open(self.address) as store:
            for step in STEPS:
                store.commit(state_of(step), step)
            store.delete(1)

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
            # What was left is as if nobody had collected: commits and collections go on from there.
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
