"""The location section of a manifest: the packs and frames that a restore needs, including bases.

A location names a tier, never a path or a URL. A frame's base precedes it in the table, so there are no cycles.

``decode_pack_table`` reads only the tables of packs and frames. A collection uses it on thousands of manifests.

The packs are stored plain: a listing reads their tiers, and a collection searches damaged manifests for their ids.
Frames and decisions may be compressed.

Decisions are part of the section: the base of the checkpoint, and the estimates for each storage. They describe how
bytes are stored, so a repack may change them, and the checkpoint id does not cover them. A restore does not need them.

Invariants of ``decode_pack_table``:
- It checks the digest of the whole file, so that it never returns a part of a damaged manifest.
- It returns rows in encoded form, so that a caller can skip rows that it has already decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckstore.config import Limits, is_name
from ckstore.errors import ChecksumError, MalformedError
from ckstore.format.frame import FRAME_ALIGN, FRAME_HEADER_NBYTES
from ckstore.format.header import (
    COMPRESSED_VERSION,
    TRAILER_NBYTES,
    ManifestHeader,
    Preamble,
    decode_header_section,
    decode_preamble,
)
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.paths import SEQ_MAX, ManifestName
from ckstore.format.records import FORMAT_VERSION, DecisionsRecord, decode_stored, encode_inner
from ckstore.format.wire import Reader, align_up
from ckstore.hashing import DIGEST_NBYTES, NO_BASE, PACK_ID_NBYTES, ChunkId, PackId, digest_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


TIER_COUNT_MAX = 256

_HEAD = struct.Struct("<QQQQ")
_HEADS = {1: struct.Struct("<QQQ"), 2: _HEAD, 3: _HEAD, 4: _HEAD}
_PACK = struct.Struct("<16s32sQHHI")
_FRAME = struct.Struct("<32sQIIII")
PACK_ROW_NBYTES, FRAME_ROW_NBYTES = _PACK.size, _FRAME.size
NO_BASE_INDEX = 0xFFFFFFFF
"""Stands for a frame without a base, in the rows of frames."""

PACK_NBYTES_MIN = SUPERHEADER_NBYTES + PACK_ALIGN + TAIL_NBYTES


@dataclass(frozen=True, slots=True)
class PackRef:
    """A pack that a manifest refers to: its identity and its tier."""

    pack_id: PackId
    nbytes: int
    directory_digest: bytes
    tier: str = "local"


@dataclass(frozen=True, slots=True)
class FrameRef:
    """A frame that a manifest refers to.

    Args:
        pack: Index into the manifest's packs.
        offset: Offset of the frame's header in the pack.
        stored_nbytes: Length of the payload; the frame is 192 bytes longer.
        base: Index of the base in the manifest's frames, less than the frame's own index; -1: no base.
        depth: Number of bases to decode before this frame.
    """

    chunk_id: ChunkId
    pack: int
    offset: int
    stored_nbytes: int
    base: int = -1
    depth: int = 0

    @property
    def frame_nbytes(self) -> int:
        """Bytes of header and payload."""
        return FRAME_HEADER_NBYTES + self.stored_nbytes


def encode_location(packs: Sequence[PackRef], frames: Sequence[FrameRef], decisions: Decisions | None = None) -> bytes:
    """Return the plain section in the current format version."""
    tiers = sorted({pack.tier for pack in packs})
    return join_location(tiers, pack_rows(packs, tiers), frame_rows(frames), encode_decisions(decisions))


def pack_rows(packs: Sequence[PackRef], tiers: Sequence[str]) -> bytes:
    """Return the encoded rows of packs; ``tiers`` are the names that the rows refer to."""
    return b"".join(
        [_PACK.pack(pack.pack_id, pack.directory_digest, pack.nbytes, tiers.index(pack.tier), 0, 0) for pack in packs]
    )


def frame_rows(frames: Sequence[FrameRef]) -> bytes:
    """Return the encoded rows of frames."""
    return b"".join(
        [
            _FRAME.pack(
                frame.chunk_id,
                frame.offset,
                frame.stored_nbytes,
                frame.pack,
                NO_BASE_INDEX if frame.base < 0 else frame.base,
                frame.depth,
            )
            for frame in frames
        ]
    )


def join_location(tiers: list[str], packs: bytes, frames: bytes, decisions: bytes) -> bytes:
    """Return the plain section with these encoded tables, in the current format version."""
    tier_table = encode_inner(tiers)
    counts = (len(packs) // PACK_ROW_NBYTES, len(frames) // FRAME_ROW_NBYTES)
    head = _HEADS[FORMAT_VERSION].pack(len(tier_table), *counts, len(decisions))
    return b"".join((head, tier_table, packs, frames, decisions))


def stored_location(section: bytes) -> bytes:
    """Return a plain section as it is stored: frames and decisions are compressed if that makes them shorter."""
    from ckstore.format.zstd import stored_section

    head = _HEADS[FORMAT_VERSION]
    tiers_nbytes, pack_count, *_ = head.unpack_from(section)
    packs_end = head.size + tiers_nbytes + _PACK.size * pack_count
    view = memoryview(section)
    return b"".join((view[:packs_end], stored_section(view[packs_end:])))


def plain_location(content: memoryview, preamble: Preamble, limits: Limits, where: object) -> memoryview:
    """Return the plain location section of a whole manifest. Nothing is decompressed before the limits are checked.

    Raises:
        MalformedError: The plain manifest would exceed the limits, or frames and decisions are longer than their plain
            bytes, or shorter and not one zstd frame of this length.
    """
    from ckstore.format.zstd import plain_section

    section = content[preamble.head_nbytes + preamble.logical_nbytes : -TRAILER_NBYTES]
    if preamble.version < COMPRESSED_VERSION:
        return section
    reader = Reader(section, "a manifest's location section", where)
    head = _HEADS[preamble.version]
    tiers_nbytes, pack_count, frame_count, decisions_nbytes = head.unpack(reader.take(head.size))
    reader.take(tiers_nbytes)
    reader.take(_PACK.size * pack_count)
    rest = reader.take(reader.remaining)
    rest_nbytes = _FRAME.size * frame_count + decisions_nbytes
    saved_nbytes = rest_nbytes - len(rest) + preamble.logical_plain_nbytes - preamble.logical_nbytes
    if preamble.file_nbytes + saved_nbytes > limits.manifest_nbytes_max:
        raise MalformedError(
            f"a manifest of {preamble.file_nbytes + saved_nbytes} plain bytes exceeds the limit of this store",
            where=where,
        )
    plain = plain_section(rest, rest_nbytes, where=where)
    return section if plain is rest else memoryview(b"".join((section[: -len(rest)], plain)))


def decode_location(
    section: memoryview, *, version: int, limits: Limits, where: object = None
) -> tuple[tuple[PackRef, ...], tuple[FrameRef, ...], Decisions | None]:
    """Decode the plain section of a manifest of this format version.

    Raises:
        MalformedError: Lengths or indexes contradict each other, or frames overlap, repeat or have impossible offsets.
    """
    tiers, pack_rows, frame_rows, decisions_table = split_location(section, version=version, where=where)
    decisions = decode_decisions(decisions_table, where=where)
    packs = tuple(_packs(pack_rows, tiers, where))
    if tiers != sorted({pack.tier for pack in packs}):
        raise MalformedError("a manifest lists a tier twice, or a tier without packs", where=where)
    frames = tuple(
        [
            FrameRef(chunk_id, pack, offset, stored, -1 if base == NO_BASE_INDEX else base, depth)
            for chunk_id, offset, stored, pack, base, depth in _FRAME.iter_unpack(frame_rows)
        ]
    )
    check_location(packs, frames, limits, where)
    return packs, frames, decisions


def split_location(
    section: memoryview, *, version: int, where: object = None
) -> tuple[list[str], memoryview, memoryview, memoryview]:
    """Return the tiers of a plain section, and its encoded pack rows, frame rows and decisions.

    Raises:
        MalformedError: Lengths contradict each other.
    """
    reader = Reader(section, "a manifest's location section", where)
    head = _HEADS[version]
    tiers_nbytes, pack_count, frame_count, *rest = head.unpack(reader.take(head.size))
    tiers = decode_stored(reader.take(tiers_nbytes), list[str], where=where)
    pack_rows = reader.take(_PACK.size * pack_count)
    frame_rows = reader.take(_FRAME.size * frame_count)
    decisions_table = reader.take(rest[0]) if rest else memoryview(b"")
    reader.done()
    return tiers, pack_rows, frame_rows, decisions_table


def decode_tiers(begin: bytes, *, version: int, where: object = None) -> tuple[str, ...]:
    """Decode the tier names from the first bytes of a section, without checking a digest; for listings.

    Raises:
        MalformedError: A name is invalid, or the tiers need more than the given bytes.
    """
    head = _HEADS[version]
    if len(begin) < head.size:
        raise MalformedError("a manifest's location section is torn", where=where)
    end = head.size + head.unpack_from(begin)[0]
    if end > len(begin):
        raise MalformedError("a manifest names more tiers than a listing reads", where=where)
    tiers = decode_stored(begin[head.size : end], list[str], where=where)
    if not all(is_name(tier) for tier in tiers):
        raise MalformedError("a manifest contains an invalid tier name", where=where)
    return tuple(tiers)


def _packs(pack_rows: memoryview, tiers: list[str], where: object) -> Iterator[PackRef]:
    for pack_id, digest, nbytes, tier, reserved, reserved_too in _PACK.iter_unpack(pack_rows):
        if reserved or reserved_too or tier >= len(tiers):
            raise MalformedError("a pack of a manifest has an unknown tier, or reserved fields are set", where=where)
        yield PackRef(pack_id, nbytes, digest, tiers[tier])


def decode_pack_row(row: bytes, tiers: list[str], *, where: object = None) -> PackRef:
    """Decode one row of the table of packs; raises MalformedError."""
    return next(_packs(memoryview(row), tiers, where))


def check_location(packs: Sequence[PackRef], frames: Sequence[FrameRef], limits: Limits, where: object) -> None:
    """Check packs and frames, before writing and after reading.

    Raises:
        MalformedError: Packs or frames repeat, overlap or are misplaced, or a base is missing.
    """
    for pack in packs:
        if len(pack.pack_id) != PACK_ID_NBYTES or len(pack.directory_digest) != DIGEST_NBYTES or not is_name(pack.tier):
            raise MalformedError("a pack of a manifest has a malformed id, digest or tier", where=where)
        if pack.nbytes % PACK_ALIGN or not PACK_NBYTES_MIN <= pack.nbytes <= limits.pack_nbytes_max:
            raise MalformedError(
                f"a manifest gives a pack the impossible size of {pack.nbytes} bytes", where=where, pack_id=pack.pack_id
            )
    if len({pack.pack_id for pack in packs}) != len(packs) or len({pack.tier for pack in packs}) > TIER_COUNT_MAX:
        raise MalformedError("a manifest names a pack twice, or too many tiers", where=where)
    ids = {frame.chunk_id for frame in frames}
    if len(ids) != len(frames) or NO_BASE in ids:
        raise MalformedError("a manifest locates a chunk twice", where=where)
    _check_bases(frames, limits, where)
    _check_places(packs, frames, limits, where)


def _check_bases(frames: Sequence[FrameRef], limits: Limits, where: object) -> None:
    depth_max = limits.depth_max
    for index, frame in enumerate(frames):
        base = frame.base
        if base == -1:
            depth = 0
        elif 0 <= base < index:
            depth = frames[base].depth + 1
        else:
            raise MalformedError("the base of a frame does not precede it", where=where)
        if frame.depth != depth or depth > depth_max:
            raise MalformedError("the depth of a frame is wrong or over the limit", where=where)


def _check_places(packs: Sequence[PackRef], frames: Sequence[FrameRef], limits: Limits, where: object) -> None:
    frame_counts = [0] * len(packs)
    ends = [SUPERHEADER_NBYTES] * len(packs)
    stored_nbytes_max = limits.chunk_nbytes_max
    # Writers list frames by offset, which makes sorting unnecessary.
    is_overlap_free = True
    for frame in frames:
        pack, offset, stored_nbytes = frame.pack, frame.offset, frame.stored_nbytes
        if not 0 <= pack < len(packs):
            raise MalformedError("a frame is in a pack that the manifest does not list", where=where)
        if not 0 < stored_nbytes <= stored_nbytes_max or offset % FRAME_ALIGN:
            raise MalformedError("a frame is misplaced, empty or over the chunk limit", where=where)
        frame_counts[pack] += 1
        is_overlap_free = is_overlap_free and offset >= ends[pack]
        ends[pack] = max(ends[pack], offset + FRAME_HEADER_NBYTES + stored_nbytes)
    if not is_overlap_free:
        _check_overlaps(frames, where)
    if not all(frame_counts):
        # Such a reference would keep garbage alive forever.
        raise MalformedError("a manifest names a pack that it does not need", where=where)
    for named, count, end in zip(packs, frame_counts, ends, strict=True):
        if end > named.nbytes - TAIL_NBYTES - align_up(count * DIRECTORY_ENTRY_NBYTES, PACK_ALIGN):
            raise MalformedError("a frame reaches into the directory or beyond the end of its pack", where=where)


def _check_overlaps(frames: Sequence[FrameRef], where: object) -> None:
    pack, end = -1, 0
    for frame in sorted(frames, key=lambda frame: (frame.pack, frame.offset)):
        if frame.pack != pack:
            pack, end = frame.pack, SUPERHEADER_NBYTES
        if frame.offset < end:
            raise MalformedError("frames overlap each other or a superheader", where=where)
        end = frame.offset + frame.frame_nbytes


PACK_ROW = (
    ("pack_id", "V16"),
    ("directory_digest", "V32"),
    ("nbytes", "<u8"),
    ("tier", "<u2"),
    ("zero", "<u2"),
    ("zero_too", "<u4"),
)
FRAME_ROW = (
    ("chunk_id", "V32"),
    ("offset", "<u8"),
    ("stored_nbytes", "<u4"),
    ("pack", "<u4"),
    ("base", "<u4"),
    ("depth", "<u4"),
)
"""The fields of the rows of packs and frames, as numpy dtypes."""

_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class PackTable:
    """A manifest's header, and its encoded tables of packs and frames."""

    header: ManifestHeader
    tiers: list[str]
    pack_rows: bytes
    frame_rows: memoryview
    digest: bytes
    """BLAKE3 of the whole file, which identifies the manifest."""

    def rows(self) -> Iterator[bytes]:
        """Yield the encoded row of every pack, by ascending index."""
        for at in range(0, len(self.pack_rows), PACK_ROW_NBYTES):
            yield self.pack_rows[at : at + PACK_ROW_NBYTES]

    @property
    def frame_count(self) -> int:
        """Number of frames in the manifest."""
        return len(self.frame_rows) // FRAME_ROW_NBYTES


def decode_pack_table(
    content: Buffer, *, limits: Limits = _DEFAULT_LIMITS, expect: ManifestName | None = None, where: object = None
) -> PackTable:
    """Decode the header and the tables of a whole manifest.

    Raises:
        ChecksumError: The manifest is damaged.
        MalformedError: It is torn, contradicts its name, or exceeds the limits.
        UnsupportedError: An unknown version or mandatory flag.
    """
    view = memoryview(content).cast("B")
    preamble = decode_preamble(view, where=where)
    if len(view) != preamble.file_nbytes or len(view) > limits.manifest_nbytes_max:
        raise MalformedError(f"a manifest has {len(view)} bytes instead of {preamble.file_nbytes}", where=where)
    digest = bytes(view[-DIGEST_NBYTES:])
    if digest_of(view[:-DIGEST_NBYTES]) != digest:
        raise ChecksumError("the digest of a manifest differs", where=where)
    header = decode_header_section(view, preamble, expect=expect, where=where)
    section = plain_location(view, preamble, limits, where)
    tiers, pack_rows, frame_rows, _ = split_location(section, version=preamble.version, where=where)
    return PackTable(header, tiers, bytes(pack_rows), frame_rows, digest)


UNSAMPLED, FULL, DELTA, DERIVED, IDENTICAL, RESIDUAL = range(6)
MODE_NAMES = ("unsampled", "full", "delta", "derived", "identical", "residual")
BASES = ("none", "previous", "keyframe", "mixed")
VIEWS = BASES[:3]
"""Bases that one storage can be encoded against."""

BITS_STEP = 1 / 256
"""Resolution of the stored estimates, in bits."""

AGE_MAX = 0xFFFF

_DECISIONS = struct.Struct("<I")
_DECISION = struct.Struct("<BBHHHH")
NO_BITS = 0xFFFF
"""Stands for a missing estimate, in the rows of decisions."""

DECISION_ROW = (
    ("mode", "u1"),
    ("view", "u1"),
    ("full", "<u2"),
    ("previous", "<u2"),
    ("keyframe", "<u2"),
    ("age", "<u2"),
)
"""The fields of the decision for one storage, as a numpy dtype."""


@dataclass(frozen=True, slots=True)
class StorageDecision:
    """The decision for one storage, and the estimates from a sample of it, in bits per element.

    Args:
        mode: Unsampled, full, delta, derived (rounded from another storage), identical to the base, or residual
            (lossy).
        full_bits: Estimate without a base; None: not estimated, here and below.
        previous_bits: Estimate against the previous commit.
        keyframe_bits: Estimate against the keyframe.
        view: The base that was chosen: ``"none"``, ``"previous"`` or ``"keyframe"``.
        age: Commits since the storage was last stored without a base; 0: this commit.
    """

    mode: int
    full_bits: float | None = None
    previous_bits: float | None = None
    keyframe_bits: float | None = None
    view: str = "none"
    age: int = 0

    @property
    def mode_name(self) -> str:
        """The name of the mode."""
        return MODE_NAMES[self.mode]


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions of one commit.

    Args:
        base: ``"none"`` for a keyframe, else ``"previous"``, ``"keyframe"``, or ``"mixed"`` if storages differ.
        base_seq: The checkpoint whose chunks are the bases; None for a keyframe.
        keyframe_seq: The keyframe at the start of the chain; None for a keyframe itself.
        reason: A sentence for users.
        storages: One decision for each storage of the logical section.
    """

    base: str
    base_seq: int | None
    keyframe_seq: int | None
    reason: str
    storages: tuple[StorageDecision, ...]


def stored_bits(bits: float | None) -> float | None:
    """Return an estimate rounded to its stored resolution."""
    return None if bits is None else min(round(bits / BITS_STEP), NO_BITS - 1) * BITS_STEP


def encode_decisions(decisions: Decisions | None) -> bytes:
    """Return the table; empty for None.

    Raises:
        MalformedError: A reader would refuse the table.
    """
    if decisions is None:
        return b""
    if any(storage.view not in VIEWS for storage in decisions.storages):
        raise MalformedError("the decision for a storage has fields out of range")
    return join_decisions(decisions_record(decisions), b"".join(decision_rows(decisions.storages)))


def decisions_record(decisions: Decisions) -> DecisionsRecord:
    """Return the record of the decisions for the whole checkpoint."""
    return DecisionsRecord(
        base=decisions.base,
        base_seq=decisions.base_seq,
        keyframe_seq=decisions.keyframe_seq,
        reason=decisions.reason,
    )


def join_decisions(record: DecisionsRecord, rows: bytes) -> bytes:
    """Return the table with these encoded rows.

    Raises:
        MalformedError: A reader would refuse the record.
    """
    check_decisions(record, None)
    head = encode_inner(record)
    return _DECISIONS.pack(len(head)) + head + rows


def decision_rows(storages: Sequence[StorageDecision]) -> Iterator[bytes]:
    """Yield the encoded decision for each storage."""
    # Many small storages have the same decision.
    rows: dict[int, bytes] = {}
    for storage in storages:
        row = rows.get(id(storage))
        if row is None:
            bits = (storage.full_bits, storage.previous_bits, storage.keyframe_bits)
            view = VIEWS.index(storage.view)
            steps = (NO_BITS if value is None else round(value / BITS_STEP) for value in bits)
            row = rows[id(storage)] = _DECISION.pack(storage.mode, view, *steps, min(storage.age, AGE_MAX))
        yield row


def decode_decisions(table: memoryview, *, where: object = None) -> Decisions | None:
    """Read the table.

    Raises:
        MalformedError: Lengths contradict each other, or a field is out of range.
    """
    if not len(table):
        return None
    reader = Reader(table, "a manifest's decisions", where)
    (head_nbytes,) = _DECISIONS.unpack(reader.take(_DECISIONS.size))
    record = decode_stored(reader.take(head_nbytes), DecisionsRecord, where=where)
    rows = reader.take((len(table) - _DECISIONS.size - head_nbytes) // _DECISION.size * _DECISION.size)
    reader.done()
    known: dict[tuple[int, ...], StorageDecision] = {}
    storages = []
    for row in _DECISION.iter_unpack(rows):
        if row not in known:
            mode, view, *steps, age = row
            if view >= len(VIEWS) or mode >= len(MODE_NAMES):
                raise MalformedError("the decision for a storage has fields out of range", where=where)
            full, previous, keyframe = (None if value == NO_BITS else value * BITS_STEP for value in steps)
            known[row] = StorageDecision(mode, full, previous, keyframe, VIEWS[view], age)
        storages.append(known[row])
    check_decisions(record, where)
    return Decisions(
        base=record.base,
        base_seq=record.base_seq,
        keyframe_seq=record.keyframe_seq,
        reason=record.reason,
        storages=tuple(storages),
    )


def check_decisions(decisions: DecisionsRecord, where: object) -> None:
    """Check the decisions for the whole checkpoint, before writing and after reading.

    Raises:
        MalformedError: They contradict each other.
    """
    is_keyframe = decisions.base == "none"
    if (
        decisions.base not in BASES
        or is_keyframe != (decisions.base_seq is None)
        or is_keyframe != (decisions.keyframe_seq is None)
        or not all(0 <= (seq or 0) <= SEQ_MAX for seq in (decisions.base_seq, decisions.keyframe_seq))
    ):
        raise MalformedError("a manifest's decisions have fields out of range", where=where)
