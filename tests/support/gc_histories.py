"""Shared by the tests of collections: histories of small states, and functions that list what is in place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import ckstore
from ckstore._testing import repository_of
from ckstore.api import Store
from ckstore.format import paths
from ckstore.ops.gc.policy import Retention
from support.memory_files import flip
from support.model import difference

LAST_ONE = Retention(keep_last=1)
HOUR = 3600
PLAIN = ckstore.Policy(compression="none", threads=1)


def state_of(number):
    """Return a state: a large part that all share, and one of its own."""
    rng = np.random.default_rng(number)
    return {
        "shared": np.arange(70_000, dtype=np.int32),
        "own": rng.standard_normal((40, 31)).astype(np.float32),
        "number": number,
    }


def commit_all(store, steps, **options):
    """Commit a state of its own number for each step."""
    return [store.commit(state_of(step), step, **options) for step in steps]


def other_handle(store, run=None):
    """Return a second handle on the same store, like that of another process."""
    parts = repository_of(store)
    again = type(parts)(parts.backend, parts.record, run or parts.run, clock=parts.clock)
    return Store(again, ckstore.Policy())


def check_restores(store, steps):
    """Check that these steps, and no other, come back bit for bit."""
    assert store.steps() == sorted(steps)
    for step in steps:
        found = difference(store.restore(step), state_of(step))
        assert found is None, f"step {step}: {found}"


def packs_in_place(backend):
    """Return the names of all packs in place."""
    return {
        f"packs/{folder}/{file}"
        for folder in backend.list_names(paths.PACKS_FOLDER)
        for file in backend.list_names(f"packs/{folder}")
    }


def files_of(backend, folder=""):
    """Return every name in a backend, with the bytes of its file, but for leases."""
    found = {}
    for name in backend.list_names(folder):
        path = f"{folder}/{name}" if folder else name
        if backend.list_names(path):
            found |= files_of(backend, path)
        elif not path.startswith("leases"):
            info = backend.stat(path)
            found[path] = None if info is None else info.nbytes
    return found


def pack_of(store, step):
    """Return the name of the pack that only this step's commit has written."""
    name = next(name for name in repository_of(store).manifests.listing().names if name.step == step)
    header = repository_of(store).manifests.load(name)
    newest = header.packs[-1] if len(header.packs) > 1 else header.packs[0]
    return paths.pack_name(newest.pack_id)


def next_generation(store, step):
    """Return a step's manifest as a replacement of itself."""
    manifests = repository_of(store).manifests
    manifest = manifests.load(next(name for name in manifests.listing().names if name.step == step))
    return replace(manifest, header=replace(manifest.header, generation=manifest.header.generation + 1))


def replace_by_itself(store, step):
    """Put the next generation of a step in the place of what is there; return its name."""
    manifests = repository_of(store).manifests
    published = manifests.publish(next_generation(store, step))
    manifests.move_lower_to_trash(published)
    return published.path


def damage(backend, path, at=200):
    """Flip a bit of a file in memory."""
    flip(backend, path, at)


def parts_state(number, changed):
    """Return a state of four parts, each a chunk of its own; those that are ``changed`` are this number's own."""
    return {
        f"part{index}": np.arange(70_000, dtype=np.int32) + index * 10**6 + (number if index in changed else 0) * 10**7
        for index in range(4)
    }


def commit_half_needed(store, clock):
    """Step 0 writes four parts, of which step 1 needs one, and step 2 none; all of them are old enough to go."""
    store.commit(parts_state(0, {0, 1, 2, 3}), 0)
    store.commit(parts_state(1, {1, 2, 3}), 1)
    store.commit(parts_state(2, {0, 1, 2, 3}), 2)
    clock.now += 2 * HOUR


def once(monkeypatch, owner, name, before=None, after=None):
    """Let something happen right before, or right after, the next call of a method."""
    method = getattr(owner, name)

    def disturbed(self, *args, **options):
        monkeypatch.setattr(owner, name, method)
        if before is not None:
            before()
        result = method(self, *args, **options)
        if after is not None:
            after()
        return result

    monkeypatch.setattr(owner, name, disturbed)
