"""Protects pack writing: a commit makes the same pack with any number of threads and any engine."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

import ckstore
from ckstore.config import Limits
from ckstore.errors import BackendError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, decode_frame_header
from ckstore.format.pack import (
    SUPERHEADER_NBYTES,
    TAIL_NBYTES,
    decode_directory,
    decode_superheader,
    decode_tail,
    scan_frames,
)
from ckstore.format.wire import xxh3_64
from ckstore.hashing import NO_BASE, chunk_id_of
from ckstore.io.buffers import BufferPool
from ckstore.io.local import LocalBackend
from ckstore.io.memory import MemoryBackend
from ckstore.store.pack_writer import PackWriter

STORE_ID = bytes(range(16))


def copy(source, target):
    target[:] = source


def header_of(payload, number=0):
    return FrameHeader(
        chunk_id=chunk_id_of(payload),
        base_id=NO_BASE,
        plain_nbytes=len(payload),
        stored_nbytes=len(payload),
        element_width=1,
        steps=(),
        payload_xxh3=0,
    )


def pack_writer_on(backend, pool, **arguments):
    backend.make_folder("packs/00")
    numbers = itertools.count()
    return PackWriter(
        backend,
        pool,
        store_id=STORE_ID,
        nbytes_expected=1 << 20,
        copy=arguments.pop("copy", copy),
        new_id=lambda: bytes(15) + bytes([next(numbers)]),
        **arguments,
    )


def put(packer, payload):
    at = packer.reserve(len(payload))
    packer.fill(at, header_of(payload), [memoryview(payload)], lambda parts, xxh3: None)
    return at


PAYLOADS = [bytes([n % 251]) * n for n in (2, 1, 63, 64, 65, 5000, 12_000, 200_000)]


def test_pack_is_readable_by_directory_and_scan(backend):
    with BufferPool(1 << 16, 6) as pool:
        packer = pack_writer_on(backend, pool)
        places = [put(packer, payload) for payload in PAYLOADS]
        (ref,) = packer.finish()
        assert pool.free_count == pool.count
    content = backend.read_bytes("packs/00/" + "00" * 16 + ".pack", nbytes_max=1 << 24)
    assert len(content) == ref.nbytes
    decode_superheader(content[:SUPERHEADER_NBYTES], store_id=STORE_ID, pack_id=ref.pack_id)
    tail = decode_tail(
        content[-TAIL_NBYTES:], pack_nbytes=ref.nbytes, store_id=STORE_ID, pack_id=ref.pack_id, limits=Limits()
    )
    assert tail.directory_digest == ref.directory_digest
    begin = tail.directory_offset
    directory = decode_directory(content[begin : begin + tail.directory_nbytes], tail, limits=Limits())
    assert [entry.offset for entry in directory.entries] == [place.offset for place in places]
    scanned = list(scan_frames(lambda offset, nbytes: content[offset : offset + nbytes], ref.nbytes))
    assert [offset for offset, _ in scanned] == [place.offset for place in places]
    for payload, entry in zip(PAYLOADS, directory.entries, strict=True):
        frame = content[entry.offset : entry.offset + FRAME_HEADER_NBYTES + entry.stored_nbytes]
        header = decode_frame_header(frame[:FRAME_HEADER_NBYTES])
        assert header.payload_xxh3 == xxh3_64(payload)
        assert frame[FRAME_HEADER_NBYTES:] == payload
        assert entry.offset % 64 == 0


def test_frames_may_be_filled_in_any_order(backend):
    contents = []
    for order in (range(8), reversed(range(8)), (3, 0, 7, 1, 6, 2, 5, 4)):
        backend = MemoryBackend()
        with BufferPool(1 << 19, 6) as pool:
            packer = pack_writer_on(backend, pool)
            places = [packer.reserve(len(payload)) for payload in PAYLOADS]
            for index in order:
                payload = PAYLOADS[index]
                packer.fill(places[index], header_of(payload), [memoryview(payload)], lambda parts, xxh3: None)
            (ref,) = packer.finish()
        contents.append((ref, backend.read_bytes("packs/00/" + "00" * 16 + ".pack", nbytes_max=1 << 24)))
    assert contents[0] == contents[1] == contents[2]


def test_check_reads_the_bytes_in_the_block(backend):
    seen = []
    with BufferPool(1 << 16, 6) as pool:
        packer = pack_writer_on(backend, pool)
        payload = bytes(range(256)) * 600
        at = packer.reserve(len(payload))
        parts = [memoryview(payload)[:1000], memoryview(payload)[1000:]]
        packer.fill(at, header_of(payload), parts, lambda views, xxh3: seen.append(b"".join(map(bytes, views))))
        packer.finish()
    assert seen == [payload]


def test_check_gets_the_checksum_of_the_bytes_in_the_block(backend):
    def faulty(source, destination):
        destination[:] = source
        if len(source) == 5000:
            destination[77] ^= 4

    payload = bytes(range(250)) * 20
    with BufferPool(1 << 16, 6) as pool:
        packer = pack_writer_on(backend, pool, copy=faulty)
        at = packer.reserve(len(payload))
        seen = []
        packer.fill(at, header_of(payload), [memoryview(payload)], lambda parts, xxh3: seen.append((parts, xxh3)))
        ((parts, checksum),) = seen
        assert checksum == xxh3_64(b"".join(parts)) != xxh3_64(payload)
        packer.abandon()


def test_full_pack_is_followed_by_another(backend):
    with BufferPool(1 << 16, 6) as pool:
        packer = pack_writer_on(backend, pool, pack_nbytes_target=1 << 16)
        places = [put(packer, bytes([n]) * 30_000) for n in range(7)]
        refs = packer.finish()
    assert len(refs) == 3
    assert sorted({place.pack.pack_id for place in places}) == [ref.pack_id for ref in refs]
    assert [backend.stat(name).nbytes for name in packer.pack_names] == [ref.nbytes for ref in refs]
    assert all(backend.syncs[name] == 1 for name in packer.pack_names)
    assert backend.syncs["packs/00"] == 1


def test_no_frame_makes_no_pack(backend):
    with BufferPool(1 << 16, 6) as pool:
        assert pack_writer_on(backend, pool).finish() == []
    assert backend.list_names("packs/00") == []


def test_frame_that_fails_its_check_fails_the_pack(backend):
    def refuse(parts, xxh3):
        raise BackendError("no")

    with BufferPool(1 << 16, 6) as pool:
        packer = pack_writer_on(backend, pool)
        at = packer.reserve(100)
        with pytest.raises(BackendError, match="no"):
            packer.fill(at, header_of(bytes(100)), [memoryview(bytes(100))], refuse)
        packer.fail()
        with pytest.raises(BackendError, match="never written"):
            packer.finish()
        packer.abandon()
        assert pool.free_count == pool.count
    assert backend.list_names("packs/00") == []


def state():
    """Return enough for several blocks and chunks: large, shared, equal and small tensors."""
    source = np.random.default_rng(5)
    big = source.standard_normal(2_500_000).astype(np.float32)
    return {
        "big": big,
        "same": big.copy(),
        "noise": source.integers(0, 256, 5_000_000, np.uint8),
        "zeros": np.zeros(3_000_000, np.int32),
        "small": [source.standard_normal(n).astype(np.float32) for n in range(0, 4000, 97)],
        "ints": [np.arange(n) for n in range(50)],
    }


def packs_after_commit(backend, monkeypatch, **policy):
    """Commit the same state with the same random numbers, and return packs by name."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", lambda nbytes: bytes([7]) * nbytes)
        with ckstore.open(backend, policy=ckstore.Policy(**policy)) as store:
            store.commit(state(), 1)
        (name,) = backend.list_names("packs/07")
        with_file = backend.open_read(f"packs/07/{name}")
        content = with_file.read_at(0, with_file.nbytes)
        with_file.close()
    return content


@pytest.mark.parametrize("compression", ["none", "fast"])
def test_any_number_of_threads_makes_the_same_pack(monkeypatch, compression):
    contents = [
        packs_after_commit(MemoryBackend(), monkeypatch, compression=compression, threads=threads)
        for threads in (1, 2, 5)
    ]
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize("name", [pytest.param("uring", marks=pytest.mark.uring), "pwrite"])
def test_every_engine_writes_the_same_pack(monkeypatch, tmp_path, name):
    wanted = packs_after_commit(MemoryBackend(), monkeypatch)
    backend = LocalBackend(tmp_path, engine=name)
    assert packs_after_commit(backend, monkeypatch) == wanted
    assert backend.engine_name == name
