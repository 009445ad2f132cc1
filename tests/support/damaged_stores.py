"""Stores for the tests of repair: a history with bases and shared chunks, and ways to damage it."""

from __future__ import annotations

import numpy as np

import ckstore
from ckstore._testing import repository_of
from ckstore.format import paths
from support.model import difference

POLICY = ckstore.Policy(threads=1)
STEPS = (1, 2, 3)


def state_of(step):
    """Return a state whose weights drift, so that later ones are stored as differences; ``still`` never changes."""
    source = np.random.default_rng(3)
    weights = source.standard_normal(120_000).astype(np.float32)
    drift = np.random.default_rng(step).standard_normal(120_000).astype(np.float32)
    return {
        "model": {"weights": weights + drift * np.float32(1e-4), "still": source.standard_normal(80_000)},
        "small": {"own": np.arange(step, step + 50), "note": f"step {step}"},
    }


STATES = {step: state_of(step) for step in STEPS}


def fill(backend):
    """Commit the history into two runs; the second run shares its chunks with the first."""
    with ckstore.open(backend, policy=POLICY) as store:
        for step in STEPS:
            store.commit(STATES[step], step, metrics={"loss": 1 / step})
        assert store.info(2).depth_max == 1
    with ckstore.open(backend, run="other", policy=POLICY) as store:
        store.commit(STATES[3], 20)
        assert store.info(20).bytes_written == 0


def opened(backend, **options):
    return ckstore.open(backend, create=False, policy=POLICY, **options)


def manifest_of(store, step):
    name = next(name for name in repository_of(store).manifests.listing().names if name.step == step)
    return repository_of(store).manifests.load(name)


def pack_of(store, step):
    """Return the name of the pack that the commit of a step wrote."""
    newest = manifest_of(store, step).packs
    older = {pack.pack_id for other in STEPS if other < step for pack in manifest_of(store, other).packs}
    return next(paths.pack_name(pack.pack_id) for pack in newest if pack.pack_id not in older)


def frames_of(store, step, path):
    """Return the frames that hold a leaf in a checkpoint, with the names of their packs."""
    manifest, contents = manifest_of(store, step), store.contents(step)
    index = next(number for number, row in enumerate(contents.tensors) if row.path == path)
    storage = manifest.storages[manifest.tensors[index].storage]
    ids = {manifest.chunks[piece.chunk].chunk_id for piece in storage.pieces}
    return [
        (paths.pack_name(manifest.packs[frame.pack].pack_id), frame)
        for frame in manifest.frames
        if frame.chunk_id in ids
    ]


def is_right(store, step, state):
    """Say whether a checkpoint comes back bit for bit; anything else than that or an error fails."""
    try:
        found = store.restore(step)
    except ckstore.CorruptError:
        return False
    assert difference(found, state) is None, f"step {step} came back wrong"
    return True
