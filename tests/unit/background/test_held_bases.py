"""Protects bases that a saver holds in arena slots and on its heap: they are unchanged, and within their bound."""

from __future__ import annotations

import functools

import numpy as np

import ckstore
from ckstore._testing import repository_of
from ckstore.config import MIB
from ckstore.delta.base_cache import BaseCache
from ckstore.hashing import ChunkId, chunk_id_of
from ckstore.io.memory import MemoryBackend
from ckstore.store.refs import load_whole, resolve


@functools.cache
def checkpoint():
    """Return the manifest of a checkpoint of three chunks, and their ids."""
    with ckstore.open(MemoryBackend()) as store:
        store.commit([np.full(MIB, number, np.uint8) for number in range(3)], 0)
        parts = repository_of(store)
        manifest = load_whole(parts, resolve(parts, "seq:0"))
    chunk_ids = [chunk.chunk_id for chunk in manifest.chunks]
    assert len(chunk_ids) == 3
    return manifest, chunk_ids


class UncopyableBytes:
    """A hundred bytes whose copy raises MemoryError."""

    def __len__(self):
        return 100

    def __bytes__(self):
        raise MemoryError


def held_by(*tickets, plain=None):
    """Return bases that hold 100 bytes of one chunk in the slot of each ticket; None means the heap."""
    bases, (manifest, chunk_ids) = BaseCache(), checkpoint()
    for chunk_id, ticket in zip(chunk_ids, tickets, strict=False):
        if plain is None:
            bases.hold(chunk_id, memoryview(bytes(100)), ticket=ticket)
        else:
            bases.hold(chunk_id, plain, checksum=0, ticket=ticket)
    bases.follow(manifest)
    return bases


def test_bases_leave_older_slot_once_newer_has_some():
    bases = held_by(1, 2, None)
    assert (bases.held_nbytes, bases.staged_nbytes) == (100, 200)
    bases.begin(None)
    bases.keep_only_slot(2)
    assert bases.tickets == {2}
    assert bases.held_nbytes_peak == 200
    assert (bases.held_nbytes, bases.staged_nbytes) == (200, 100)
    assert [bases.held(chunk_id) for chunk_id in checkpoint()[1]] == [bytes(100)] * 3


def test_bases_stay_in_older_slot_if_newer_is_empty():
    bases = held_by(1, 1)
    bases.keep_only_slot(2)
    assert bases.tickets == {1}
    bases.keep_only_slot(None)
    assert bases.tickets == frozenset()
    assert bases.held(checkpoint()[1][0]) is None


def test_bases_moved_from_a_slot_obey_the_bound():
    bases = held_by(1, 1, 2)
    bases.begin(150)
    bases.keep_only_slot(2)
    assert bases.held_nbytes == 100
    assert bases.tickets == {2}


def test_bases_without_memory_are_dropped():
    bases = held_by(1, 2, plain=UncopyableBytes())
    bases.keep_only_slot(2)
    bases.hold_read(ChunkId(b"x" * 32), UncopyableBytes())
    assert (bases.held_nbytes, bases.tickets) == (0, {2})


def test_read_base_is_held_only_if_its_hash_matches():
    bases, plain = BaseCache(), memoryview(bytearray(b"abc" * 40))
    bases.hold_read(ChunkId(b"x" * 32), plain)
    assert bases.held_nbytes == 0, "its hash differs"
    bases.hold_read(chunk_id_of(plain), plain)
    plain[:] = bytes(120)
    assert bases.held(chunk_id_of(b"abc" * 40)) == b"abc" * 40


def test_changed_bytes_in_a_slot_are_not_a_base():
    memory = bytearray(100)
    bases = BaseCache()
    bases.hold(ChunkId(bytes(32)), memoryview(memory), ticket=1)
    assert bases.held(ChunkId(bytes(32))) == bytes(100)
    memory[50] = 1
    assert bases.held(ChunkId(bytes(32))) is None
