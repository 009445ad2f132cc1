"""Protects chains: a chunk read with its bases is the committed one, or the error names the damaged frame."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.codec import chunk_codec
from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.config import KIB, Limits
from ckstore.delta import chain_reader
from ckstore.delta.chain_reader import ChainReader
from ckstore.errors import BackendError, ChecksumError, CorruptError, MissingChunkError
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.paths import pack_name, trash_packs_folder
from ckstore.hashing import new_token
from ckstore.io.buffers import BufferPool
from ckstore.io.memory import MemoryBackend
from ckstore.restore.plan import chain_of
from ckstore.store.memory_budget import DECODE, DECODE_CHAIN, read_buffer_nbytes
from ckstore.store.store_config import create_store
from support import memory_files
from support.chains import ChainWriter

CHUNK_NBYTES = 64 * KIB
COUNT = CHUNK_NBYTES // 4
DEPTH = 3


class FailingReads(MemoryBackend):
    """Make the next reads of packs fail."""

    count = 0

    def open_read(self, name):
        file = super().open_read(name)
        read_at = file.read_at

        def maybe_fail(offset, nbytes):
            if self.count and name.startswith("packs/"):
                self.count -= 1
                raise BackendError("reading failed (EIO)", where=name)
            return read_at(offset, nbytes)

        file.read_at = maybe_fail
        return file


def plain_at(step):
    source = np.random.default_rng(3)
    plain = source.standard_normal(COUNT).astype(np.float32)
    for _ in range(step):
        plain = plain + source.standard_normal(COUNT).astype(np.float32) * np.float32(1e-4)
    return plain


@pytest.fixture
def backend():
    """A backend whose reads can be made to fail, with a store of small chunks."""
    backend = FailingReads()
    create_store(backend, SYSTEM_CLOCK, Limits(chunk_nbytes_max=CHUNK_NBYTES))
    return backend


@pytest.fixture
def store(backend):
    """A store with a chain of one chunk, and a chunk that is a rounding of a rounding."""
    with ckstore.open(backend) as opened:
        writer = ChainWriter(opened)
        for step in range(DEPTH + 1):
            writer.commit({"w": plain_at(step)}, step, base=None if step == 0 else -1)
        yield opened


@pytest.fixture
def reader(store):
    """A reader with a decoder of its own."""
    with ChainReader(repository_of(store), FrameDecoder(CHUNK_NBYTES)) as reader:
        yield reader


def manifest_at(store, step):
    names = repository_of(store).manifests.listing().names
    return repository_of(store).manifests.load(next(name for name in names if name.step == step))


def chain_at(store, step):
    manifest = manifest_at(store, step)
    return chain_of(manifest, len(manifest.frames) - 1)


def read(reader, chain, nbytes=CHUNK_NBYTES):
    destination = memoryview(bytearray(nbytes))
    reader.read(chain, nbytes, destination)
    return bytes(destination)


def flip(backend, pack, frame, at=FRAME_HEADER_NBYTES + 50):
    memory_files.flip(backend, pack_name(pack.pack_id), frame.offset + at, mask=2)


def test_chain_of_any_depth_is_read(store, reader):
    for step in range(DEPTH + 1):
        chain = chain_at(store, step)
        assert [frame.depth for _, frame in chain] == list(range(step + 1))
        assert read(reader, chain) == plain_at(step).tobytes()


def test_reader_can_be_reused_after_error_and_close(store, backend, reader):
    chain = chain_at(store, DEPTH)
    flip(backend, *chain[1])
    with pytest.raises(CorruptError):
        read(reader, chain)
    flip(backend, *chain[1])
    reader.close()
    assert read(reader, chain) == plain_at(DEPTH).tobytes()


def test_caller_may_pass_buffers_and_packs(store):
    chain = chain_at(store, DEPTH)
    files = {pack.pack_id: repository_of(store).backend.open_read(pack_name(pack.pack_id)) for pack, _ in chain[:2]}
    with (
        BufferPool(read_buffer_nbytes(repository_of(store).limits), 1) as pool,
        ChainReader(repository_of(store), FrameDecoder(CHUNK_NBYTES), pool=pool, files=files) as reader,
    ):
        assert read(reader, chain) == plain_at(DEPTH).tobytes()
        assert pool.free_count == 1
    assert files[chain[0][0].pack_id].read_at(0, 8)


@pytest.mark.parametrize("depth", range(DEPTH + 1))
@pytest.mark.parametrize("at", [0, 20, 190, FRAME_HEADER_NBYTES, FRAME_HEADER_NBYTES + 999])
def test_damaged_frame_is_named_with_its_chain(store, backend, reader, depth, at):
    chain = chain_at(store, DEPTH)
    pack, frame = chain[depth]
    flip(backend, pack, frame, at)
    with pytest.raises(CorruptError) as caught:
        read(reader, chain)
    error = caught.value
    assert (error.pack_id, error.offset, error.chunk_id) == (pack.pack_id.hex(), frame.offset, frame.chunk_id.hex())
    assert error.chain == tuple(link.chunk_id.hex() for _, link in reversed(chain))
    assert error.checkpoints == tuple(f"main/{seq} (step {seq})" for seq in range(DEPTH, depth - 1, -1))


def test_frame_with_wrong_content_is_named(store, reader, monkeypatch):
    """The encoder was wrong when the base was written. No stored byte has changed since."""
    original = chunk_codec.subtract_base

    def wrong(plain, base, planes_out, **named):
        original(plain, base, planes_out, **named)
        planes_out[1] ^= 1

    writer = ChainWriter(store)
    writer.commit({"w": plain_at(0) * 2}, 10)
    with monkeypatch.context() as patched:
        patched.setattr(chunk_codec, "subtract_base", wrong)
        writer.commit({"w": plain_at(1) * 2}, 11, base=-1)
    writer.commit({"w": plain_at(2) * 2}, 12, base=-1)
    chain = chain_at(store, 12)
    with pytest.raises(ChecksumError, match="other bytes than were committed") as caught:
        read(reader, chain)
    assert caught.value.chunk_id == chain[1][1].chunk_id.hex()


def test_inconsistent_chain_is_refused(store, reader):
    chain = chain_at(store, DEPTH)
    (_, frame), (other_pack, other) = chain[1], chain[2]
    with pytest.raises(ChecksumError, match="another frame") as caught:
        read(reader, [chain[0], (other_pack, replace(other, chunk_id=frame.chunk_id)), *chain[2:]])
    assert caught.value.offset == other.offset
    with pytest.raises(CorruptError):
        read(reader, chain[1:])
    with pytest.raises(CorruptError):
        read(reader, [chain[0], chain[2]])
    assert read(reader, chain) == plain_at(DEPTH).tobytes()


@pytest.mark.parametrize("nbytes", [4, CHUNK_NBYTES // 2, CHUNK_NBYTES - 4])
def test_chunk_of_unexpected_length_is_refused(store, reader, nbytes):
    for step in range(DEPTH + 1):
        with pytest.raises(CorruptError):
            read(reader, chain_at(store, step), nbytes)


def test_transient_decode_error_is_still_an_error(store, reader, monkeypatch):
    chain = chain_at(store, DEPTH)
    original = chunk_codec.decode
    wrong = [True]

    def decode(payload, steps, *, destination, **named):
        original(payload, steps, destination=destination, **named)
        if wrong.pop() if wrong else False:
            destination[17] ^= 1

    monkeypatch.setattr(chunk_codec, "decode", decode)
    with pytest.raises(ChecksumError, match="every frame of its chain was intact when it was read again"):
        read(reader, chain)
    assert read(reader, chain) == plain_at(DEPTH).tobytes()


def test_failed_reads_are_retried_then_damage(store, backend, reader):
    chain = chain_at(store, DEPTH)
    backend.count = 1
    assert read(reader, chain) == plain_at(DEPTH).tobytes()
    backend.count = 1 << 30
    with pytest.raises(CorruptError, match="cannot be read") as caught:
        read(reader, chain)
    assert caught.value.pack_id == chain[0][0].pack_id.hex()


def test_pack_is_found_in_the_trash_or_missing(store, backend, reader):
    chain = chain_at(store, DEPTH)
    name = pack_name(chain[1][0].pack_id)
    folder = trash_packs_folder(new_token())
    for depth in range(1, folder.count("/") + 2):
        backend.make_folder("/".join(folder.split("/")[:depth]))
    backend.rename_new(name, f"{folder}/{name.rsplit('/', 1)[1]}")
    assert read(reader, chain) == plain_at(DEPTH).tobytes()
    reader.close()
    backend.unlink(f"{folder}/{name.rsplit('/', 1)[1]}")
    with pytest.raises(MissingChunkError, match=chain[1][0].pack_id.hex()):
        read(reader, chain)


def test_roundings_of_roundings_are_read(backend):
    """A rounding may be a chunk of another width, and have a rounding of its own."""
    with ckstore.open(backend) as store:
        words = np.random.default_rng(0).integers(0, 0x3C00, COUNT, np.uint16)
        words[1::2] = 0x3F80
        half = words.view(np.float16)
        single, quarter = half.astype(np.float32), words.view(np.float32).astype(np.float16)
        writer = ChainWriter(store)
        writer.commit({"a": single, "b": half}, 0)
        manifest = writer.commit({"a": single, "b": words.view(np.float32), "c": quarter}, 1)
        index = max(range(len(manifest.frames)), key=lambda index: manifest.frames[index].depth)
        assert manifest.frames[index].depth == 2
        with ChainReader(repository_of(store), FrameDecoder(CHUNK_NBYTES)) as reader:
            assert read(reader, chain_of(manifest, index), quarter.nbytes) == quarter.tobytes()
        for only in (None, "c", ["b", "c"], ["a", "c"]):
            assert store.restore(1, only=only)["c"].tobytes() == quarter.tobytes()
        assert store.verify("decode").is_clean


def test_memory_matches_the_reported_need(store, monkeypatch):
    limits, pools = repository_of(store).limits, []

    class Pool(BufferPool):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            pools.append(self.nbytes)

    monkeypatch.setattr(chain_reader, "BufferPool", Pool)
    with ChainReader(repository_of(store), FrameDecoder(CHUNK_NBYTES)) as reader:
        read(reader, chain_at(store, DEPTH))
    assert 0 < sum(pools) <= read_buffer_nbytes(limits)
    assert DECODE_CHAIN.nbytes(limits) - DECODE.nbytes(limits) == CHUNK_NBYTES
