"""The manifest of one checkpoint: its tree, its tensors, and the locations of all frames that it needs.

A manifest is ``preamble | header | logical section | location section | trailer``. The header has its own checksum, for
listings. The trailer contains the BLAKE3 of everything before it. ``encode_manifest`` refuses what ``decode_manifest``
refuses. It is deterministic, but another version of zstd may compress the sections to other bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckstore.concurrency import collector_paused
from ckstore.config import Limits
from ckstore.errors import ChecksumError, MalformedError
from ckstore.format.header import (
    PREAMBLE_NBYTES,
    TRAILER_NBYTES,
    ManifestHeader,
    Preamble,
    decode_header_section,
    decode_preamble,
    encode_header,
    encode_preamble,
)
from ckstore.format.location import (
    Decisions,
    FrameRef,
    PackRef,
    check_location,
    decode_location,
    encode_location,
    plain_location,
    stored_location,
)
from ckstore.format.logical import (
    EXACT_FIDELITY,
    Logical,
    Loss,
    check_fidelity,
    check_logical,
    decode_logical,
    distinct_chunks,
    encode_logical,
)
from ckstore.format.paths import ManifestName
from ckstore.format.records import FORMAT_VERSION, LogicalRecord, encode_inner
from ckstore.format.tensors import ChunkSpec, StorageSpec, Table, TensorSpec
from ckstore.format.tree import Node, TensorNode, format_path, leaves_of
from ckstore.format.wire import xxh3_64
from ckstore.format.zstd import plain_section, stored_section
from ckstore.hashing import DIGEST_NBYTES, digest_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


__all__ = [
    "ChunkSpec",
    "Decisions",
    "FrameRef",
    "Loss",
    "Manifest",
    "ManifestHeader",
    "PackRef",
    "build_manifest",
    "decode_manifest",
    "encode_manifest",
    "relocated",
    "republished",
]

TRAILER_MAGIC = b"CKMEND\x00\x01"

_DEFAULT_LIMITS = Limits()
_TRAILER = struct.Struct("<8sQQQQ32s")


@dataclass(frozen=True, slots=True)
class Manifest:
    """All facts that a restore needs; the types of the fields document them."""

    header: ManifestHeader
    tree: Node
    tensors: tuple[TensorSpec, ...]
    storages: tuple[StorageSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    packs: tuple[PackRef, ...]
    frames: tuple[FrameRef, ...]
    decisions: Decisions | None = None
    """How the commit chose bases; None if it made no choice, and before format version 2."""
    losses: tuple[Loss, ...] = ()
    """Losses by storage; empty for an exact checkpoint."""

    @property
    def store_id(self) -> bytes:
        """Id of the manifest's store."""
        return self.header.store_id

    @property
    def checkpoint_id(self) -> bytes:
        """BLAKE3 of the logical section; repacks and moves do not change it."""
        return self.header.checkpoint_id

    @property
    def logical(self) -> Logical:
        """The logical section without the scalars that the header repeats."""
        return Logical(self.tree, self.tensors, self.storages, self.chunks, self.losses)


def build_manifest(
    *,
    store_id: bytes,
    run: str,
    seq: int,
    step: int,
    time_ns: int,
    parent: int | None,
    tree: Node,
    tensors: Sequence[TensorSpec],
    storages: Sequence[StorageSpec],
    chunks: Sequence[ChunkSpec],
    packs: Sequence[PackRef],
    frames: Sequence[FrameRef],
    bytes_written: int,
    chunks_new: int,
    generation: int = 0,
    origin_id: bytes | None = None,
    is_archival: bool = False,
    fidelity: str = EXACT_FIDELITY,
    metrics: Mapping[str, float] | None = None,
    decisions: Decisions | None = None,
    losses: Sequence[Loss] = (),
) -> Manifest:
    """Build a manifest, and compute the fields that follow from its parts.

    ``chunks`` may repeat a chunk, once for each occurrence in the plan of the commit. The manifest lists each chunk
    once, and the pieces of the storages are renumbered.
    """
    distinct, renumbered = distinct_chunks(chunks, storages)
    described = tensors if isinstance(tensors, Table) else tuple(tensors)
    logical = Logical(tree, described, renumbered, distinct, tuple(losses))
    facts = LogicalRecord(
        run=run,
        seq=seq,
        step=step,
        time_ns=time_ns,
        parent=parent,
        origin_id=origin_id,
        is_archival=is_archival,
        fidelity=fidelity,
        metrics={str(name): float(value) for name, value in (metrics or {}).items()},
    )
    header = header_of(
        facts,
        digest_of(encode_logical(encode_inner(facts), logical)),
        store_id=store_id,
        generation=generation,
        bytes_written=bytes_written,
        chunks_new=chunks_new,
        chunks_reused=len(chunks) - chunks_new,
        **_computed(logical, frames),
    )
    places = tuple(packs), tuple(frames)
    return Manifest(header, tree, logical.tensors, renumbered, distinct, *places, decisions, logical.losses)


def header_of(facts: LogicalRecord, checkpoint_id: bytes, **others: Any) -> ManifestHeader:
    """Return the header of a manifest: the facts that the checkpoint id covers, the id, and the other fields."""
    repeated = {name: getattr(facts, name) for name in LogicalRecord.__struct_fields__}
    return ManifestHeader(checkpoint_id=checkpoint_id, **repeated, **others)


def republished(entry: Manifest, *, seq: int, time_ns: int, is_archival: bool, generation: int = 0) -> Manifest:
    """Return the checkpoint as a new entry of its run, with the same frames; nothing is written to packs."""
    header = entry.header
    return build_manifest(
        store_id=header.store_id,
        run=header.run,
        seq=seq,
        step=header.step,
        time_ns=time_ns,
        parent=header.seq,
        tree=entry.tree,
        tensors=entry.tensors,
        storages=entry.storages,
        chunks=entry.chunks,
        packs=entry.packs,
        frames=entry.frames,
        bytes_written=0,
        chunks_new=0,
        generation=generation,
        origin_id=header.checkpoint_id,
        is_archival=is_archival,
        fidelity=header.fidelity,
        metrics=header.metrics,
        decisions=entry.decisions,
        losses=entry.losses,
    )


def relocated(
    entry: Manifest,
    *,
    generation: int,
    packs: Sequence[PackRef],
    frames: Sequence[FrameRef],
    bytes_written: int,
    chunks_new: int,
    decisions: Decisions | None,
) -> Manifest:
    """Return a later generation of a manifest: the same checkpoint with other frame locations."""
    header = entry.header
    later = build_manifest(
        store_id=header.store_id,
        run=header.run,
        seq=header.seq,
        step=header.step,
        time_ns=header.time_ns,
        parent=header.parent,
        tree=entry.tree,
        tensors=entry.tensors,
        storages=entry.storages,
        chunks=entry.chunks,
        packs=packs,
        frames=frames,
        bytes_written=bytes_written,
        chunks_new=chunks_new,
        generation=generation,
        origin_id=header.origin_id,
        is_archival=header.is_archival,
        fidelity=header.fidelity,
        metrics=header.metrics,
        decisions=decisions,
        losses=entry.losses,
    )
    assert later.checkpoint_id == header.checkpoint_id, "a relocation does not change the checkpoint id"
    return later


def _computed(logical: Logical, frames: Sequence[FrameRef]) -> dict[str, Any]:
    return {
        "bytes_state": sum(storage.nbytes for storage in logical.storages),
        "bytes_stored": sum(frame.stored_nbytes for frame in frames),
        "tensor_count": len(logical.tensors),
        "chunk_count": len(logical.chunks),
        "depth_max": max((frame.depth for frame in frames), default=0),
    }


def encode_manifest(manifest: Manifest, *, limits: Limits = _DEFAULT_LIMITS) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        MalformedError: A reader would refuse the manifest.
        UsageError: Its metrics do not fit into a header.
    """
    header = encode_header(manifest.header)
    logical = encode_logical(logical_record(manifest.header), manifest.logical)
    location = encode_location(manifest.packs, manifest.frames, manifest.decisions)
    check_plain_size(header, logical, location, limits)
    check_logical(manifest.logical, limits, None)
    check_location(manifest.packs, manifest.frames, limits, None)
    _check_header(manifest, logical, None)
    return join_manifest(manifest.store_id, header, logical, location)


def check_plain_size(header: bytes, logical: bytes, location: bytes, limits: Limits) -> None:
    """Check the length of a manifest with these plain sections.

    Raises:
        MalformedError: It exceeds the limit of the store.
    """
    _check_size(PREAMBLE_NBYTES + len(header) + len(logical) + len(location) + TRAILER_NBYTES, limits, None)


def join_manifest(store_id: bytes, header: bytes, logical: bytes, location: bytes) -> bytes:
    """Return the bytes of a manifest with these plain sections, which the caller has checked."""
    stored = stored_section(memoryview(logical)), stored_location(location)
    lengths = (len(header), len(stored[0]), len(stored[1]))
    file_nbytes = PREAMBLE_NBYTES + sum(lengths) + TRAILER_NBYTES
    preamble = Preamble(FORMAT_VERSION, 0, 0, store_id, *lengths, file_nbytes, xxh3_64(header), len(logical))
    body = b"".join((encode_preamble(preamble), header, *stored))
    body += _TRAILER.pack(TRAILER_MAGIC, *lengths, file_nbytes, bytes(DIGEST_NBYTES))[:-DIGEST_NBYTES]
    return body + digest_of(body)


def decode_manifest(
    content: Buffer,
    *,
    limits: Limits = _DEFAULT_LIMITS,
    expect: ManifestName | None = None,
    written: Manifest | None = None,
    where: object = None,
) -> Manifest:
    """Decode a whole manifest.

    Args:
        content: The file.
        limits: Bounds of the store.
        expect: The parsed name of the file.
        written: The manifest that was encoded, if this is a check that readers accept it; see ``decode_logical``.
        where: The file, for errors.

    Raises:
        ChecksumError: The manifest is damaged.
        MalformedError: It is torn, contradicts itself or its name, or exceeds the limits.
        UnsupportedError: An unknown version or mandatory flag.
    """
    with collector_paused():
        return _decode(memoryview(content).cast("B"), limits, expect, written, where)


def _decode(
    view: memoryview, limits: Limits, expect: ManifestName | None, written: Manifest | None, where: object
) -> Manifest:
    preamble = decode_preamble(view, where=where)
    if len(view) != preamble.file_nbytes:
        raise MalformedError(
            f"a manifest has {len(view)} bytes instead of {preamble.file_nbytes}: it is torn or has trailing bytes",
            where=where,
        )
    _check_size(len(view), limits, where)
    _check_trailer(view, preamble, where)
    header = decode_header_section(view, preamble, expect=expect, where=where)
    location = plain_location(view, preamble, limits, where)
    stored = view[preamble.head_nbytes : preamble.head_nbytes + preamble.logical_nbytes]
    section = plain_section(stored, preamble.logical_plain_nbytes, where=where)
    encoded = None if written is None else written.logical
    record, logical = decode_logical(section, limits=limits, version=preamble.version, written=encoded, where=where)
    packs, frames, decisions = decode_location(location, version=preamble.version, limits=limits, where=where)
    parts = logical.tree, logical.tensors, logical.storages, logical.chunks
    manifest = Manifest(header, *parts, packs, frames, decisions, logical.losses)
    if record != logical_record(header):
        raise MalformedError("the header of a manifest contradicts its logical section", where=where)
    _check_header(manifest, section, where)
    return manifest


def _check_size(nbytes: int, limits: Limits, where: object) -> None:
    if nbytes > limits.manifest_nbytes_max:
        raise MalformedError(f"a manifest of {nbytes} bytes exceeds the limit of this store", where=where)


def _check_trailer(view: memoryview, preamble: Preamble, where: object) -> None:
    magic, header_nbytes, logical_nbytes, location_nbytes, file_nbytes, digest = _TRAILER.unpack(view[-TRAILER_NBYTES:])
    if magic != TRAILER_MAGIC:
        raise MalformedError("a manifest does not end with a trailer: it is torn", where=where)
    if digest_of(view[:-DIGEST_NBYTES]) != digest:
        raise ChecksumError("the digest of a manifest differs", where=where)
    expected = (header_nbytes, logical_nbytes, location_nbytes, file_nbytes)
    if expected != (preamble.header_nbytes, preamble.logical_nbytes, preamble.location_nbytes, preamble.file_nbytes):
        raise MalformedError("a manifest's trailer contradicts its preamble", where=where)


def logical_record(header: ManifestHeader) -> bytes:
    """Return the encoded facts of a header that the checkpoint id covers."""
    facts = {name: getattr(header, name) for name in LogicalRecord.__struct_fields__}
    facts["metrics"] = dict(header.metrics)
    return encode_inner(LogicalRecord(**facts))


def _check_header(manifest: Manifest, logical_section: Buffer, where: object) -> None:
    header = manifest.header
    if digest_of(logical_section) != header.checkpoint_id:
        raise MalformedError("the checkpoint id of a manifest is not the digest of its logical section", where=where)
    expected = _computed(manifest.logical, manifest.frames)
    if any(getattr(header, name) != value for name, value in expected.items()):
        raise MalformedError("the header of a manifest contradicts its sections", where=where)
    check_fidelity(header.fidelity, manifest.losses, where)
    _check_frames(manifest, where)
    if manifest.decisions is not None and len(manifest.decisions.storages) != len(manifest.storages):
        raise MalformedError("a manifest has decisions for another number of storages", where=where)


def _check_frames(manifest: Manifest, where: object) -> None:
    """Refuse a chunk without a frame, and a frame that is neither a chunk of the state nor a base."""
    located = {frame.chunk_id for frame in manifest.frames}
    chunk_ids = {chunk.chunk_id for chunk in manifest.chunks}
    if not chunk_ids <= located:
        raise MalformedError("a manifest does not locate all of its chunks", where=where)
    if len(chunk_ids) == len(located):
        return
    bases = {frame.base for frame in manifest.frames}
    for index, frame in enumerate(manifest.frames):
        if frame.chunk_id not in chunk_ids and index not in bases:
            raise MalformedError("a manifest locates a frame that it does not need", where=where)


def tensor_paths(manifest: Manifest, chunks: Container[int], *, count_max: int) -> tuple[str, ...]:
    """Return the dotted paths of the first tensors that have bytes in any of the chunks."""
    storages = {
        index
        for index, storage in enumerate(manifest.storages)
        if any(piece.chunk in chunks for piece in storage.pieces)
    }
    found = (
        format_path(path)
        for path, leaf in leaves_of(manifest.tree)
        if isinstance(leaf, TensorNode) and manifest.tensors[leaf.tensor].storage in storages
    )
    return tuple(islice(found, count_max))
