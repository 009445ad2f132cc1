"""Protects the cache of ranges from tiers: it saves requests, is bounded, and its content is always verified."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.errors import CkstoreError, CorruptError
from ckstore.hashing import new_pack_id
from ckstore.io.memory import MemoryBackend
from ckstore.io.url import backend_for
from ckstore.store.tiers import RangeCache


def state_of(seed):
    source = np.random.default_rng(seed)
    return {f"w{index}": source.standard_normal(300_000).astype(np.float32) for index in range(6)}


def assert_right(state):
    assert all(np.array_equal(value, state_of(1)[name]) for name, value in state.items())


@pytest.fixture
def pushed(folder, proxy, address):
    with ckstore.open(folder) as store:
        store.commit(state_of(1), 1)
        store.push(address, keep_local=0)
        for file in folder.glob("packs/*/*.pack"):
            file.unlink()
        yield store


def gets_of(proxy):
    return [seen for seen in proxy.seen if seen.method == "GET" and seen.path.endswith(".pack")]


def test_second_restore_reads_only_the_cache(pushed, proxy, folder):
    proxy.begin()
    assert_right(pushed.restore(1))
    assert gets_of(proxy)
    proxy.begin()
    assert_right(pushed.restore(1))
    assert_right(pushed.restore(1, only="w3"))
    assert gets_of(proxy) == []
    with ckstore.open(folder) as again:
        proxy.begin()
        assert_right(again.restore(1, only="w5"))
        assert gets_of(proxy) == []


def test_damaged_range_is_fetched_again(pushed, proxy, folder):
    assert_right(pushed.restore(1))
    files = list(folder.glob("cache/*/*.range"))
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    proxy.begin()
    assert_right(pushed.restore(1))
    assert len(gets_of(proxy)) == len(files)


def test_cache_can_be_removed(pushed, folder):
    import shutil

    assert_right(pushed.restore(1))
    shutil.rmtree(folder / "cache")
    assert_right(pushed.restore(1))
    assert_right(pushed.restore(1))


def test_wrong_range_is_not_cached(pushed, address):
    pack = pushed.contents(1).packs[0]
    there, name = backend_for(address), f"packs/{pack.pack_id[:2]}/{pack.pack_id}.pack"
    whole = there.read_bytes(name, nbytes_max=1 << 30)
    damaged = bytearray(whole)
    damaged[100_000] ^= 1
    there.bucket.put_over(name, bytes(damaged))
    with pytest.raises(CorruptError):
        pushed.restore(1)
    there.bucket.put_over(name, whole)
    assert_right(pushed.restore(1))


def test_full_cache_removes_oldest_ranges(clock):
    backend = MemoryBackend(clock=clock)
    for folder in ("tmp", "cache"):
        backend.make_folder(folder)
    pack = new_pack_id()
    first = RangeCache(backend, nbytes_max=1000)
    for number in range(5):
        clock.now += 1
        first.put(pack, number * 100, memoryview(bytes([number]) * 100))
    second = RangeCache(backend, nbytes_max=1000)
    for number in range(5, 13):
        second.put(pack, number * 100, memoryview(bytes([number]) * 100))
    kept = [number for number in range(13) if second.get(pack, number * 100, 100) == bytes([number]) * 100]
    assert kept == list(range(3, 13))
    assert second.get(pack, 310, 20) == bytes([3]) * 20, "a part of a range is there with it"
    assert second.get(pack, 390, 20) is None, "two ranges side by side are two"
    second.put(pack, 5000, memoryview(bytes(2000)))
    assert second.get(pack, 5000, 2000) is None, "what is larger than all of it is not kept"


def test_small_disk_is_not_used():
    backend = MemoryBackend(nbytes_max=3000)
    for folder in ("tmp", "cache"):
        backend.make_folder(folder)
    cache, pack = RangeCache(backend), new_pack_id()
    for number in range(20):
        cache.put(pack, number * 100, memoryview(bytes(100)))
    used = 3000 - backend.free_nbytes()
    assert 0 < used <= 3000 * 0.3


def test_failing_disk_costs_only_requests(monkeypatch):
    backend = MemoryBackend()
    backend.make_folder("tmp")
    cache, pack = RangeCache(backend), new_pack_id()

    def fails(*_arguments, **_more):
        raise CkstoreError("the disk failed")

    monkeypatch.setattr(backend, "make_folder", fails)
    cache.put(pack, 0, memoryview(b"x" * 100))
    assert cache.get(pack, 0, 100) is None
