"""Protects the bound on bases in memory: it is kept, reported in receipts, and costs only reading bases back."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.config import KIB
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import UsageError
from ckstore.hashing import ChunkId
from support.small_chunks import open_small

CHUNK_NBYTES = 256 * KIB
CHUNKS = 4


def state_of(step):
    """Return a state of four chunks, all of which change a little with each step."""
    values = np.random.default_rng(0).normal(size=CHUNKS * CHUNK_NBYTES // 4).astype(np.float32)
    return {"w": values * np.float32(1 + step * 2**-16), "step": step}


def opened(folder, **options):
    """Open a new store that caches bases in memory."""
    return open_small(folder, CHUNK_NBYTES, policy=ckstore.Policy(base_cache="memory", threads=1, **options))


def commits(folder, *, is_async, **options):
    with opened(folder, **options) as store:
        for step in range(3):
            state = state_of(step)
            yield store.commit_async(state, step).result() if is_async else store.commit(state, step)
        assert np.array_equal(store.restore()["w"], state_of(2)["w"])


def test_receipt_reports_cached_bytes(tmp_path):
    receipts = list(commits(tmp_path / "store", is_async=False))
    assert [receipt.bytes_bases for receipt in receipts[:2]] == [CHUNKS * CHUNK_NBYTES] * 2
    assert receipts[0].bytes_bases_peak == CHUNKS * CHUNK_NBYTES
    assert all(CHUNKS * CHUNK_NBYTES <= each.bytes_bases_peak <= 2 * CHUNKS * CHUNK_NBYTES for each in receipts)
    assert not any(each.bytes_bases_staged for each in receipts)


def test_async_receipt_reports_cached_bytes(tmp_path):
    receipts = list(commits(tmp_path / "store", is_async=True))
    assert [receipt.bytes_bases_staged for receipt in receipts[:2]] == [CHUNKS * CHUNK_NBYTES] * 2
    assert not any(each.bytes_bases or each.bytes_bases_peak for each in receipts[:2]), "nothing is copied to the heap"
    # The third commit is coded against the keyframe, whose slot the second commit took over.
    assert receipts[2].bytes_bases == receipts[2].bytes_bases_peak == CHUNKS * CHUNK_NBYTES


@pytest.mark.parametrize("is_async", [False, True], ids=["commit", "commit_async"])
@pytest.mark.parametrize("bound", [0, CHUNK_NBYTES, 2 * CHUNK_NBYTES + 5])
def test_cache_obeys_the_policy_bound(tmp_path, bound, is_async):
    receipts = list(commits(tmp_path / "store", is_async=is_async, base_cache_nbytes_max=bound))
    assert all(receipt.bytes_bases <= receipt.bytes_bases_peak <= bound for receipt in receipts)
    assert receipts[0].bytes_bases == bound // CHUNK_NBYTES * CHUNK_NBYTES
    assert not receipts[0].bytes_bases_staged
    freely = commits(tmp_path / "freely", is_async=False)
    found = [(receipt.chunks_delta, receipt.bytes_written) for receipt in receipts]
    assert found == [(receipt.chunks_delta, receipt.bytes_written) for receipt in freely], "they were read back"
    assert found[1][0] == CHUNKS


def test_base_cache_none_caches_nothing(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        receipt = store.commit(state_of(0), 0)
    assert (receipt.bytes_bases, receipt.bytes_bases_peak) == (0, 0)


def test_lower_bound_frees_cached_bases(tmp_path):
    with opened(tmp_path / "store") as store:
        for step in range(2):
            receipt = store.commit(state_of(step), step)
        assert receipt.bytes_bases == CHUNKS * CHUNK_NBYTES
        lower = ckstore.Policy(base_cache="memory", threads=1, base_cache_nbytes_max=5 * CHUNK_NBYTES // 2)
        # No chunk is new, so everything cached then was cached before.
        receipt = store.commit(state_of(1), 2, policy=lower)
        assert (receipt.bytes_bases, receipt.bytes_bases_peak) == (2 * CHUNK_NBYTES, 2 * CHUNK_NBYTES)
        assert store.commit(state_of(3), 3, policy=lower).bytes_bases_peak <= 5 * CHUNK_NBYTES // 2
        assert np.array_equal(store.restore()["w"], state_of(3)["w"])


def test_each_cached_chunk_counts_once():
    bases = BaseCache()
    bases.begin(290)
    for number in range(4):
        bases.hold(ChunkId(bytes([number]) * 32), memoryview(bytes(100)))
    assert bases.held_nbytes == bases.held_nbytes_peak == 200
    bases.hold(ChunkId(b"x" * 32), memoryview(bytes(91)))
    assert bases.held_nbytes == 200
    for _ in range(2):
        bases.hold(ChunkId(b"y" * 32), memoryview(bytes(40)))
        assert bases.held_nbytes == 240
    held = [ChunkId(name * 32) for name in (b"\0", b"\1", b"y")]
    assert sum(len(bases.held(chunk_id)) for chunk_id in held) == 240
    bases.discard_drafts()
    assert bases.held_nbytes == 0
    assert [bases.held(chunk_id) for chunk_id in held] == [None] * 3


def test_changed_cached_bytes_are_not_used():
    bases, plain = BaseCache(), bytearray(100)
    bases.hold(ChunkId(b"x" * 32), memoryview(plain))
    assert bases.held(ChunkId(b"x" * 32)) == bytes(100)
    plain[50] ^= 1
    assert bases.held(ChunkId(b"x" * 32)) is None


def test_negative_bound_is_refused():
    with pytest.raises(UsageError, match="base_cache_nbytes_max"):
        ckstore.Policy(base_cache_nbytes_max=-1)
