"""Protects who reads what in a restore of many ranks: one reader for each shared chunk, and level loads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ckstore.ranks import readers as readers_module
from ckstore.ranks.readers import ALONE, readers_of


def manifest_of(nbytes, bases=None):
    """Return what ``readers_of`` needs of a manifest: a frame for each chunk."""
    frames, offset = [], 0
    for index, each in enumerate(nbytes):
        base = -1 if bases is None else bases[index]
        frames.append(SimpleNamespace(chunk_id=index, pack=0, offset=offset, frame_nbytes=each, base=base))
        offset += each
    chunks = [SimpleNamespace(chunk_id=index, nbytes=each) for index, each in enumerate(nbytes)]
    return SimpleNamespace(chunks=chunks, frames=frames)


@pytest.fixture(autouse=True)
def plain_ids(monkeypatch):
    monkeypatch.setattr(readers_module, "ChunkId", lambda each: each)


def test_every_shared_chunk_has_one_reader_that_needs_it_and_loads_are_level():
    rng = np.random.default_rng(3)
    manifest = manifest_of(rng.integers(1 << 16, 1 << 22, 3000).tolist())
    needs = rng.random((8, 3000)) < 0.4
    readers = readers_of(manifest, needs)
    count = needs.sum(axis=0)
    assert (readers[count < 2] == ALONE).all()
    shared = np.flatnonzero(count > 1)
    assert needs[readers[shared], shared].all()
    sizes = np.array([chunk.nbytes for chunk in manifest.chunks])
    alone = needs & (count == 1)
    loads = [sizes[alone[rank]].sum() + sizes[readers == rank].sum() for rank in range(8)]
    assert max(loads) <= 1.02 * np.mean(loads)


def test_ranks_that_share_little_read_alone():
    needs = np.zeros((2, 100), np.bool_)
    needs[0, :51] = needs[1, 50:] = True
    assert readers_of(manifest_of([1000] * 100), needs) is None
    needs[0, :60] = True
    assert readers_of(manifest_of([1000] * 100), needs) is not None


def test_a_chunk_is_read_with_its_base():
    bases = [-1, -1, -1, -1, 0, 1, 2, 3]
    readers = readers_of(manifest_of([1000] * 8, bases), np.ones((2, 8), np.bool_))
    assert (readers[:4] == readers[4:]).all()
    assert sorted(readers.tolist()) == [0] * 4 + [1] * 4
