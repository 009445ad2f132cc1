"""The head of a manifest: preamble and header. A listing reads these alone, without numpy or torch.

The preamble has 128 bytes. It contains the length of every section and the checksum of the header, which follows it
directly. The header repeats facts of the sections or is computed from them; ``decode_manifest`` compares both. Preamble
and header are never compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckstore.config import STEP_MAX, is_name
from ckstore.errors import ChecksumError, MalformedError, UsageError
from ckstore.format.paths import GENERATION_MAX, SEQ_MAX, ManifestName
from ckstore.format.records import HeaderRecord, check_readable, decode_inner, decode_stored, encode_inner
from ckstore.format.wire import SEAL_NBYTES, STORE_ID_NBYTES, check_seal, check_zero, sealed, xxh3_64
from ckstore.hashing import DIGEST_NBYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer


MANIFEST_MAGIC = b"CKMANI\x00\x01"
PREAMBLE_NBYTES = 128
TRAILER_NBYTES = 72
HEAD_NBYTES_MAX = 64 * 1024
"""Upper bound of the length of preamble and header."""

COMPRESSED_VERSION = 4
"""The first format version in which sections may be compressed."""

_PREAMBLE = struct.Struct("<8sHHIQQ16sQQQQQQ")


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first 128 bytes of a manifest, with the stored length of every section.

    Attributes:
        logical_plain_nbytes: Length of the logical section before it was compressed; never less than the stored one.
    """

    version: int
    mandatory_flags: int
    optional_flags: int
    store_id: bytes
    header_nbytes: int
    logical_nbytes: int
    location_nbytes: int
    file_nbytes: int
    header_xxh3: int
    logical_plain_nbytes: int

    @property
    def head_nbytes(self) -> int:
        """Bytes of preamble and header."""
        return PREAMBLE_NBYTES + self.header_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHeader:
    """The facts of a checkpoint that a listing shows.

    Attributes:
        parent: The seq that the handle had last restored or committed before this commit.
        checkpoint_id: BLAKE3 of the logical section.
        origin_id: The checkpoint from which a rewind, an undelete or a demotion created this one.
        bytes_state: Plain bytes of all storages, each counted once.
        bytes_stored: Payload bytes of all frames that a restore needs, including bases.
        bytes_written: Bytes of the packs that this commit wrote.
        chunk_count: Distinct chunks of the state.
        chunks_new: Chunks that this commit wrote.
        chunks_reused: Chunks in the plan of the commit, repetitions included, that this commit did not write.
        depth_max: Longest chain of bases.
    """

    store_id: bytes
    run: str
    seq: int
    step: int
    generation: int
    time_ns: int
    parent: int | None
    checkpoint_id: bytes
    origin_id: bytes | None
    is_archival: bool
    fidelity: str
    bytes_state: int
    bytes_stored: int
    bytes_written: int
    metrics: Mapping[str, float]
    tensor_count: int
    chunk_count: int
    chunks_new: int
    chunks_reused: int
    depth_max: int

    @property
    def name(self) -> ManifestName:
        """The name that the manifest's file must have."""
        return ManifestName(self.run, self.seq, self.step, self.generation)

    @property
    def may_be_in_replay_form(self) -> bool:
        """Whether the manifest may be in replay form (docs/FORMAT.md, section 15). Then its tree decides."""
        is_empty = self.tensor_count == self.chunk_count == 0
        return self.generation > 0 and is_empty and self.origin_id is not None and self.fidelity == "exact"


def encode_preamble(preamble: Preamble) -> bytes:
    """Return the first 128 bytes."""
    assert len(preamble.store_id) == STORE_ID_NBYTES, "a store id has 16 bytes"
    body = _PREAMBLE.pack(
        MANIFEST_MAGIC,
        preamble.version,
        0,
        0,
        preamble.mandatory_flags,
        preamble.optional_flags,
        preamble.store_id,
        preamble.header_nbytes,
        preamble.logical_nbytes,
        preamble.location_nbytes,
        preamble.file_nbytes,
        preamble.header_xxh3,
        preamble.logical_plain_nbytes,
    )
    return sealed(body, PREAMBLE_NBYTES)


def decode_preamble(head: Buffer, *, where: object = None) -> Preamble:
    """Decode the preamble from the first 128 or more bytes of a manifest.

    Raises:
        ChecksumError: The preamble is damaged.
        MalformedError: Not a manifest, or its lengths contradict each other.
        UnsupportedError: An unknown version or mandatory flag.
    """
    view = memoryview(head).cast("B")
    if len(view) < PREAMBLE_NBYTES:
        raise MalformedError(f"a manifest of {len(view)} bytes is torn", where=where)
    view = view[:PREAMBLE_NBYTES]
    if view[:8] != MANIFEST_MAGIC:
        raise MalformedError("no manifest starts here", where=where)
    check_seal(view, "a manifest's preamble", where)
    _, version, reserved, reserved_too, mandatory, optional, *facts = _PREAMBLE.unpack_from(view)
    check_readable(version, mandatory, where=where)
    check_zero(view[_PREAMBLE.size : -SEAL_NBYTES], "a manifest's preamble", where)
    preamble = Preamble(version, mandatory, optional, *facts)
    if version < COMPRESSED_VERSION:
        reserved_too |= preamble.logical_plain_nbytes
        preamble = replace(preamble, logical_plain_nbytes=preamble.logical_nbytes)
    sections = preamble.head_nbytes + preamble.logical_nbytes + preamble.location_nbytes + TRAILER_NBYTES
    if (
        reserved
        or reserved_too
        or preamble.head_nbytes > HEAD_NBYTES_MAX
        or preamble.file_nbytes != sections
        or preamble.logical_plain_nbytes < preamble.logical_nbytes
    ):
        raise MalformedError("lengths in a manifest's preamble contradict each other or the limits", where=where)
    return preamble


def header_nbytes_needed(head: Buffer, *, where: object = None) -> int:
    """Return how many bytes of the file ``decode_header`` needs. Raises the same errors.

    ``head`` is the first 128 or more bytes.
    """
    return decode_preamble(head, where=where).head_nbytes


def encode_header(header: ManifestHeader) -> bytes:
    """Return the header section.

    Raises:
        UsageError: The metrics do not fit into a header.
        MalformedError: A reader would refuse this header.
    """
    _check_header(header, None)
    facts: dict[str, Any] = {name: getattr(header, name) for name in HeaderRecord.__struct_fields__}
    facts["metrics"] = dict(header.metrics)
    encoded = encode_inner(HeaderRecord(**facts))
    if PREAMBLE_NBYTES + len(encoded) > HEAD_NBYTES_MAX:
        raise UsageError(
            f"with these metrics, the header would have {len(encoded)} bytes",
            todo="commit fewer metrics, or shorter names",
        )
    # msgspec encodes lone surrogates and oversized ints without an error, but a reader refuses them.
    decode_inner(encoded, HeaderRecord)
    return encoded


def decode_header(head: Buffer, *, expect: ManifestName | None = None, where: object = None) -> ManifestHeader:
    """Decode the header from the first ``header_nbytes_needed`` or more bytes of a manifest.

    ``expect`` is the parsed name of the file.

    Raises:
        ChecksumError: The header is damaged.
        MalformedError: The head is too short, or the header contradicts the name of the file.
        UnsupportedError: An unknown version or mandatory flag.
    """
    return decode_header_section(head, decode_preamble(head, where=where), expect=expect, where=where)


def decode_header_section(
    head: Buffer, preamble: Preamble, *, expect: ManifestName | None, where: object
) -> ManifestHeader:
    """Decode the header with a preamble that is already decoded; see ``decode_header``."""
    section = memoryview(head).cast("B")[PREAMBLE_NBYTES : preamble.head_nbytes]
    if len(section) != preamble.header_nbytes:
        raise MalformedError("a manifest's header is cut off", where=where, nbytes_needed=preamble.head_nbytes)
    if xxh3_64(section) != preamble.header_xxh3:
        raise ChecksumError("the checksum of a manifest's header differs", where=where)
    record = decode_stored(section, HeaderRecord, where=where)
    header = ManifestHeader(
        store_id=preamble.store_id, **{name: getattr(record, name) for name in HeaderRecord.__struct_fields__}
    )
    _check_header(header, where)
    if expect is not None and header.name != expect:
        raise MalformedError(
            f"the header of this manifest belongs to {header.name.path}", where=where, expected=expect.path
        )
    return header


def _check_header(header: ManifestHeader, where: object) -> None:
    if (
        not is_name(header.run)
        or not 0 <= header.seq <= SEQ_MAX
        or not 0 <= header.step <= STEP_MAX
        or not 0 <= header.generation <= GENERATION_MAX
        or not (header.parent is None or header.parent <= SEQ_MAX)
        or len(header.checkpoint_id) != DIGEST_NBYTES
        or not (header.origin_id is None or len(header.origin_id) == DIGEST_NBYTES)
    ):
        raise MalformedError("a manifest's header has fields out of range", where=where)
