"""Protects the encoding of manifests from columns: the same bytes, and the same refusals, as from objects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.errors import MalformedError
from ckstore.format import columns as c
from ckstore.format.columns import Columns, Facts, Pieces, encode_columns, numbered
from ckstore.format.location import decision_rows, decisions_record, frame_rows, pack_rows
from ckstore.format.manifest import (
    ChunkSpec,
    FrameRef,
    Manifest,
    PackRef,
    build_manifest,
    decode_manifest,
    encode_manifest,
)
from ckstore.format.records import LogicalRecord
from ckstore.format.tensors import Piece, StorageSpec, TensorSpec
from ckstore.format.tree import ListNode, TensorNode
from ckstore.hashing import PackId, digest_of
from support.format_samples import STORE_ID, TIME_NS, sample_chunk_id, sample_manifest

SAMPLE = sample_manifest()


def facts_of(manifest: Manifest) -> Facts:
    header = manifest.header
    record = LogicalRecord(**{name: getattr(header, name) for name in LogicalRecord.__struct_fields__})
    numbers = (header.bytes_written, header.chunks_new, header.chunks_reused, header.generation)
    return Facts(record, manifest.store_id, *numbers)


def columns_of(manifest: Manifest) -> Columns:
    """Return a manifest's content as columns."""
    storages = [(s.nbytes, len(s.pieces), s.element_width, s.is_float, 0) for s in manifest.storages]
    pieces = [tuple(piece) for storage in manifest.storages for piece in storage.pieces]
    chunks = [(chunk.chunk_id, chunk.nbytes, chunk.element_width, chunk.is_float, 0) for chunk in manifest.chunks]
    tiers = sorted({pack.tier for pack in manifest.packs})
    decisions = manifest.decisions
    rows = b"" if decisions is None else b"".join(decision_rows(decisions.storages))
    return Columns(
        manifest.tree,
        manifest.tensors,
        np.array(storages, c.STORAGE),
        Pieces(np.array(pieces, c.PIECE)),
        np.array(chunks, c.CHUNK),
        tiers,
        np.frombuffer(pack_rows(manifest.packs, tiers), c.PACK),
        np.frombuffer(frame_rows(manifest.frames), c.FRAME),
        None if decisions is None else (decisions_record(decisions), np.frombuffer(rows, c.DECISION)),
        manifest.losses,
    )


def small_manifest(lengths: list[int], *, shared: bool = False) -> Manifest:
    """Return a manifest of storages with these lengths, each in chunks of at most 256 bytes."""
    pieces, chunks, storages, frames = [], [], [], []
    for length in lengths:
        own = []
        for offset in range(0, length, 256):
            own.append(Piece(len(chunks), 0, min(256, length - offset)))
            number = len(chunks) % 3 if shared else len(chunks)
            chunks.append(c_spec(number, own[-1].nbytes))
        pieces.append(own)
        storages.append(StorageSpec(length, 1, False, tuple(own)))
    offset = 4096
    for chunk_id in dict.fromkeys(chunk.chunk_id for chunk in chunks):
        frames.append(FrameRef(chunk_id, 0, offset, 100))
        offset += 320
    packs = [PackRef(PackId(bytes(range(16))), 1 << 20, digest_of(b""))] if frames else []
    return build_manifest(
        store_id=STORE_ID,
        run="main",
        seq=1,
        step=1,
        time_ns=TIME_NS,
        parent=None,
        tree=ListNode(tuple(TensorNode(index) for index in range(len(lengths)))),
        tensors=[TensorSpec("torch", "uint8", (n,), (1,), index, 0) for index, n in enumerate(lengths)],
        storages=storages,
        chunks=chunks,
        packs=packs,
        frames=frames,
        bytes_written=0,
        chunks_new=0,
    )


def c_spec(number: int, nbytes: int) -> ChunkSpec:
    """Return a chunk; equal for equal arguments."""
    return ChunkSpec(sample_chunk_id(1000 * number + nbytes), nbytes, 1, False)


def test_the_sample_has_the_same_bytes_from_columns():
    header, content = encode_columns(columns_of(SAMPLE), facts_of(SAMPLE))
    assert content == encode_manifest(SAMPLE)
    assert repr(header) == repr(SAMPLE.header)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 1500), max_size=8), st.booleans())
def test_any_storages_have_the_same_bytes_from_columns(lengths, shared):
    manifest = small_manifest(lengths, shared=shared)
    header, content = encode_columns(columns_of(manifest), facts_of(manifest))
    assert content == encode_manifest(manifest)
    assert (header, decode_manifest(content)) == (manifest.header, manifest)


FIELDS = [
    (table, name)
    for table, dtype in (
        ("storages", c.STORAGE),
        ("pieces", c.PIECE),
        ("chunks", c.CHUNK),
        ("packs", c.PACK),
        ("frames", c.FRAME),
    )
    for name in dtype.names
    if not name.endswith("_digest")
]


def changed(columns: Columns, table: str, name: str, row: int, value: int) -> Columns:
    rows = columns.pieces.rows if table == "pieces" else getattr(columns, table)
    rows = rows.copy()
    if rows.dtype[name].kind == "V":
        rows[name][row % len(rows)] = bytes(rows[name][value % len(rows)])
    else:
        rows[name][row % len(rows)] = value % (1 << 8 * rows.dtype[name].itemsize)
    return replace(columns, **{table: Pieces(rows) if table == "pieces" else rows})


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from(FIELDS),
    st.integers(0, 5),
    st.sampled_from([0, 1, 2, 3, 64, 192, 255, 256, 257, 512, 4096, 8192, 1 << 20, (1 << 32) - 1, (1 << 64) - 1]),
)
def test_what_columns_encode_is_what_readers_accept(field, row, value):
    manifest = small_manifest([700, 0, 300, 256]) if value % 2 else SAMPLE
    columns = changed(columns_of(manifest), *field, row, value)
    try:
        _, content = encode_columns(columns, facts_of(manifest))
    except MalformedError:
        # What was changed is refused for a reason: unchanged columns are accepted.
        encode_columns(columns_of(manifest), facts_of(manifest))
        found = forced(columns, manifest)
        if found is not None:
            with pytest.raises(MalformedError):
                decode_manifest(found)
        return
    decode_manifest(content)


def forced(columns: Columns, manifest: Manifest) -> bytes | None:
    """Return the bytes without any check, with a header that fits; None if a header cannot say it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c, "check_columns", lambda *_: None)
        try:
            return encode_columns(columns, facts_of(manifest))[1]
        except MalformedError:
            return None


def test_pieces_that_fit_are_checked_again_when_a_chunk_is_shorter():
    manifest = small_manifest([700])
    columns = columns_of(manifest)
    encode_columns(columns, facts_of(manifest))
    chunks = columns.chunks.copy()
    chunks["nbytes"][0] -= 1
    with pytest.raises(MalformedError, match="reaches beyond its chunk"):
        encode_columns(replace(columns, chunks=chunks), facts_of(manifest))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), max_size=40))
def test_ids_have_equal_numbers_if_they_are_equal(words):
    ids = np.array(words, "<u8").reshape(-1, 4).view("V32").reshape(-1)
    found = numbered(ids).tolist()
    assert [[a == b for b in found] for a in found] == [[a == b for b in words] for a in words]
