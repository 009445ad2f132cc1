"""Protects the chunk index: it holds the newest manifests with their bases, and forgets packs that are removed."""

from __future__ import annotations

import numpy as np

from ckstore._testing import repository_of
from ckstore.format.manifest import FrameRef, PackRef
from ckstore.store.chunk_index import ChunkIndex


class FakeManifest:
    """The attributes of a manifest that the index reads."""

    def __init__(self, packs, frames):
        self.packs, self.frames = packs, frames


def chunk(number):
    return bytes([number]) * 32


def pack(number, tier="local"):
    return PackRef(bytes([number]) * 16, 8192 + number, chunk(200 + number), tier)


def frame(number, at=0, base=-1, depth=0, offset=4096):
    return FrameRef(chunk(number), pack=at, offset=offset, stored_nbytes=10, base=base, depth=depth)


def test_frame_is_found_with_its_pack():
    known = ChunkIndex()
    known.add(FakeManifest([pack(1), pack(2)], [frame(7, at=1)]))
    found = known.find(chunk(7))
    assert found.pack == pack(2)
    assert found.closure() == [found]
    assert known.find(chunk(8)) is None
    assert len(known) == 1


def test_newest_place_of_a_chunk_is_preferred():
    known = ChunkIndex()
    known.add(FakeManifest([pack(1)], [frame(7)]))
    known.add(FakeManifest([pack(2)], [frame(7)]))
    assert known.find(chunk(7)).pack == pack(2)


def test_oldest_manifest_is_forgotten():
    known = ChunkIndex(manifests_max=2)
    for number in range(3):
        known.add(FakeManifest([pack(number)], [frame(number)]))
    assert known.find(chunk(0)) is None
    assert known.find(chunk(1)) is not None
    assert known.find(chunk(2)) is not None


def test_frames_outside_the_local_tier_are_not_offered():
    known = ChunkIndex()
    known.add(FakeManifest([pack(1, tier="bucket"), pack(2)], [frame(7, at=0), frame(8, at=1), frame(9, at=1, base=0)]))
    assert known.find(chunk(7)) is None
    assert known.find(chunk(8)) is not None
    assert known.find(chunk(9)) is None, "its base is not local"


def test_closure_lists_the_deepest_base_first():
    known = ChunkIndex()
    known.add(FakeManifest([pack(1)], [frame(1), frame(2, base=0, depth=1), frame(3, base=1, depth=2)]))
    assert [link.frame.chunk_id for link in known.find(chunk(3)).closure()] == [chunk(1), chunk(2), chunk(3)]


def test_forgetting_a_pack_forgets_dependent_frames():
    known = ChunkIndex()
    known.add(FakeManifest([pack(1), pack(2)], [frame(1, at=0), frame(2, at=1, base=0, depth=1), frame(3, at=1)]))
    known.forget_packs([pack(1).pack_id])
    assert known.find(chunk(1)) is None
    assert known.find(chunk(2)) is None
    assert known.find(chunk(3)) is not None


def test_forgetting_one_copy_keeps_the_other():
    known = ChunkIndex()
    known.add(FakeManifest([pack(1)], [frame(7)]))
    known.add(FakeManifest([pack(2)], [frame(7)]))
    known.forget_packs([pack(2).pack_id])
    assert known.find(chunk(7)).pack == pack(1)


def test_packs_of_bases_are_listed():
    known = ChunkIndex()
    known.add(FakeManifest([pack(1), pack(2), pack(3)], [frame(1, at=0), frame(2, at=1, base=0, depth=1)]))
    assert known.packs() == {pack(1).pack_id: pack(1).nbytes, pack(2).pack_id: pack(2).nbytes}


def test_index_loads_the_newest_sixteen_manifests(store, backend):
    import ckstore

    for step in range(20):
        store.commit({"w": np.full(100, step)}, step)
    store.close()
    with ckstore.open(backend) as again:
        assert again.commit({"w": np.full(100, 19)}, 20).chunks_new == 0
        # Seqs 5 to 20. The last two are the same chunk.
        assert len(repository_of(again).chunk_index) == 15
        assert again.commit({"w": np.full(100, 0)}, 21).chunks_new == 1
