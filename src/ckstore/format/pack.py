"""Superheader, directory and tail of a pack, and the scan that finds frames without directory and tail.

A pack is ``superheader 4 KiB | frames | zeros | directory | zeros | tail 4 KiB``. Directory and tail start at multiples
of 4096, frames at multiples of 64. The file ends with the tail. A pack without a tail is torn; ``scan_frames`` finds
its frames.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckstore.config import Limits
from ckstore.errors import ChecksumError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.frame import (
    ELEMENT_WIDTHS,
    FRAME_ALIGN,
    FRAME_HEADER_NBYTES,
    FRAME_MAGIC,
    FrameHeader,
    decode_frame_header,
    frame_extent,
)
from ckstore.format.records import FORMAT_VERSION, check_readable
from ckstore.format.wire import (
    BLOCK_NBYTES,
    SEAL_NBYTES,
    STORE_ID_NBYTES,
    align_up,
    check_seal,
    check_zero,
    exactly,
    sealed,
)
from ckstore.hashing import NO_BASE, PACK_ID_NBYTES, ChunkId, PackId, digest_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


PACK_ALIGN = BLOCK_NBYTES
SUPERHEADER_NBYTES = BLOCK_NBYTES
TAIL_NBYTES = BLOCK_NBYTES
DIRECTORY_ENTRY_NBYTES = 96
SUPERHEADER_MAGIC = b"CKPACK\x00\x01"
TAIL_MAGIC = b"CKTAIL\x00\x01"

_DEFAULT_LIMITS = Limits()
_SCAN_NBYTES = 1 << 20
_SUPERHEADER = struct.Struct("<8sHHIQQ16s16s")
_TAIL_HEAD = struct.Struct("<8sHHIQQ")
_TAIL_FACTS = struct.Struct("<16s16sQQQQ32s")
_ENTRY = struct.Struct("<32s32sQQQBBHI")


@dataclass(frozen=True, slots=True)
class Superheader:
    """The first 4 KiB of a pack."""

    store_id: bytes
    pack_id: PackId
    mandatory_flags: int = 0
    optional_flags: int = 0


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """A frame in a pack's directory; ``offset`` is that of its header, ``stored_nbytes`` the payload length."""

    chunk_id: ChunkId
    base_id: ChunkId
    offset: int
    stored_nbytes: int
    plain_nbytes: int
    element_width: int

    @classmethod
    def of(cls, header: FrameHeader, *, offset: int) -> DirectoryEntry:
        """Return the entry for a frame at ``offset``."""
        return cls(
            header.chunk_id, header.base_id, offset, header.stored_nbytes, header.plain_nbytes, header.element_width
        )

    @property
    def end(self) -> int:
        """The offset after the payload."""
        return self.offset + FRAME_HEADER_NBYTES + self.stored_nbytes


@dataclass(frozen=True, slots=True)
class PackDirectory:
    """Every frame of a pack, by ascending offset."""

    entries: tuple[DirectoryEntry, ...]


@dataclass(frozen=True, slots=True)
class EncodedDirectory:
    """An encoded directory, and its BLAKE3, which the tail and manifests repeat."""

    encoded: bytes
    digest: bytes
    frame_count: int


@dataclass(frozen=True, slots=True)
class PackTail:
    """The last 4 KiB of a pack: location and digest of its directory."""

    store_id: bytes
    pack_id: PackId
    directory_offset: int
    directory_nbytes: int
    frame_count: int
    pack_nbytes: int
    directory_digest: bytes
    mandatory_flags: int = 0
    optional_flags: int = 0


def encode_superheader(*, store_id: bytes, pack_id: PackId) -> bytes:
    """Return the first 4 KiB of a pack."""
    assert len(store_id) == STORE_ID_NBYTES, "a store id has 16 bytes"
    assert len(pack_id) == PACK_ID_NBYTES, "a pack id has 16 bytes"
    body = _SUPERHEADER.pack(SUPERHEADER_MAGIC, FORMAT_VERSION, 0, 0, 0, 0, store_id, pack_id)
    return sealed(body, SUPERHEADER_NBYTES)


def decode_superheader(
    content: Buffer, *, store_id: bytes | None = None, pack_id: PackId | None = None, where: object = None
) -> Superheader:
    """Decode the first 4 KiB of a pack, and compare its ids with the given ones.

    Raises:
        ChecksumError: The superheader is damaged.
        MalformedError: Not a pack, or another id or store.
        UnsupportedError: An unknown version or mandatory flag.
    """
    view = exactly(content, SUPERHEADER_NBYTES, "a pack's superheader", where)
    if view[:8] != SUPERHEADER_MAGIC:
        raise MalformedError("no pack starts here", where=where)
    check_seal(view, "a pack's superheader", where)
    _, version, reserved, reserved_too, mandatory, optional, found_store, found_pack = _SUPERHEADER.unpack_from(view)
    check_readable(version, mandatory, where=where)
    check_zero(view[_SUPERHEADER.size : -SEAL_NBYTES], "a pack's superheader", where)
    if reserved or reserved_too:
        raise MalformedError("reserved fields of a pack's superheader are set", where=where)
    _check_ids(found_store, found_pack, store_id, pack_id, where)
    return Superheader(found_store, PackId(found_pack), mandatory, optional)


def _check_ids(
    found_store: bytes, found_pack: bytes, store_id: bytes | None, pack_id: PackId | None, where: object
) -> None:
    if store_id is not None and found_store != store_id:
        raise MalformedError(
            f"this pack belongs to store {found_store.hex()}", where=where, todo="move it back to its own store"
        )
    if pack_id is not None and found_pack != pack_id:
        raise MalformedError(f"the id in this pack is {found_pack.hex()}", where=where)


def encode_directory(entries: Iterable[DirectoryEntry], *, limits: Limits = _DEFAULT_LIMITS) -> EncodedDirectory:
    """Return the directory, sorted by offset, without padding.

    Raises:
        MalformedError: A reader would refuse these entries.
    """
    ordered = sorted(entries, key=lambda entry: entry.offset)
    _check_entries(ordered, ordered[-1].end if ordered else SUPERHEADER_NBYTES, limits, None)
    encoded = b"".join(
        _ENTRY.pack(
            entry.chunk_id,
            entry.base_id,
            entry.offset,
            entry.stored_nbytes,
            entry.plain_nbytes,
            entry.element_width,
            0,
            0,
            0,
        )
        for entry in ordered
    )
    return EncodedDirectory(encoded, digest_of(encoded), len(ordered))


def decode_directory(
    content: Buffer, tail: PackTail, *, limits: Limits = _DEFAULT_LIMITS, where: object = None
) -> PackDirectory:
    """Decode the ``tail.directory_nbytes`` bytes at ``tail.directory_offset``.

    Raises:
        ChecksumError: The directory is damaged, or belongs to another pack.
        MalformedError: Frames overlap, repeat, or have impossible offsets.
    """
    view = exactly(content, tail.directory_nbytes, "a pack's directory", where)
    if digest_of(view) != tail.directory_digest:
        raise ChecksumError("the digest of a pack's directory differs", where=where, pack_id=tail.pack_id)
    entries = []
    for chunk_id, base_id, offset, stored, plain, width, reserved, flags, reserved_too in _ENTRY.iter_unpack(view):
        if flags:
            raise UnsupportedError(
                f"this version of ckstore does not know the directory flags {flags:#x}",
                where=where,
                todo="upgrade ckstore",
            )
        if reserved or reserved_too:
            raise MalformedError("reserved fields of a directory are set", where=where)
        entries.append(DirectoryEntry(chunk_id, base_id, offset, stored, plain, width))
    _check_entries(entries, tail.directory_offset, limits, where)
    return PackDirectory(tuple(entries))


def _check_entries(entries: list[DirectoryEntry], frames_end: int, limits: Limits, where: object) -> None:
    end = SUPERHEADER_NBYTES
    for entry in entries:
        if entry.offset % FRAME_ALIGN or entry.offset < end:
            raise MalformedError(f"frames of a pack overlap or are misplaced at offset {entry.offset}", where=where)
        if (
            entry.element_width not in ELEMENT_WIDTHS
            or not 1 <= entry.plain_nbytes <= limits.chunk_nbytes_max
            or not 1 <= entry.stored_nbytes <= entry.plain_nbytes
            or entry.plain_nbytes % entry.element_width
            or entry.chunk_id in (NO_BASE, entry.base_id)
        ):
            raise MalformedError(f"the directory entry for offset {entry.offset} is malformed", where=where)
        end = entry.end
    if end > frames_end:
        raise MalformedError("a frame reaches into the directory of its pack", where=where)
    if len({entry.chunk_id for entry in entries}) != len(entries):
        raise MalformedError("a directory names a chunk twice", where=where)


def encode_tail(
    *,
    store_id: bytes,
    pack_id: PackId,
    directory: EncodedDirectory,
    directory_offset: int,
    limits: Limits = _DEFAULT_LIMITS,
) -> bytes:
    """Return the tail of a pack whose directory starts at ``directory_offset``, a multiple of 4096.

    Raises:
        MalformedError: A reader would refuse this tail.
    """
    directory_nbytes = len(directory.encoded)
    tail = PackTail(
        store_id=store_id,
        pack_id=pack_id,
        directory_offset=directory_offset,
        directory_nbytes=directory_nbytes,
        frame_count=directory.frame_count,
        pack_nbytes=align_up(directory_offset + directory_nbytes, PACK_ALIGN) + TAIL_NBYTES,
        directory_digest=directory.digest,
    )
    _check_tail(tail, limits, None)
    body = _TAIL_HEAD.pack(TAIL_MAGIC, FORMAT_VERSION, 0, 0, 0, 0) + _TAIL_FACTS.pack(
        store_id,
        pack_id,
        directory_offset,
        directory_nbytes,
        tail.frame_count,
        tail.pack_nbytes,
        tail.directory_digest,
    )
    return sealed(body, TAIL_NBYTES)


def decode_tail(
    content: Buffer,
    *,
    pack_nbytes: int | None = None,
    store_id: bytes | None = None,
    pack_id: PackId | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    where: object = None,
) -> PackTail:
    """Decode the last 4 KiB of a pack, and compare its size and ids with the given ones.

    Raises:
        ChecksumError: The tail is damaged.
        MalformedError: Not a tail, or the tail of another pack.
        UnsupportedError: An unknown version or mandatory flag.
    """
    view = exactly(content, TAIL_NBYTES, "a pack's tail", where)
    if view[:8] != TAIL_MAGIC:
        raise MalformedError("this pack does not end with a tail", where=where, todo="it is torn; run `ckstore verify`")
    check_seal(view, "a pack's tail", where)
    _, version, reserved, reserved_too, mandatory, optional = _TAIL_HEAD.unpack_from(view)
    check_readable(version, mandatory, where=where)
    check_zero(view[_TAIL_HEAD.size + _TAIL_FACTS.size : -SEAL_NBYTES], "a pack's tail", where)
    if reserved or reserved_too:
        raise MalformedError("reserved fields of a pack's tail are set", where=where)
    facts: list[Any] = [*_TAIL_FACTS.unpack_from(view, _TAIL_HEAD.size), mandatory, optional]
    tail = PackTail(*facts)
    _check_ids(tail.store_id, tail.pack_id, store_id, pack_id, where)
    if pack_nbytes is not None and tail.pack_nbytes != pack_nbytes:
        raise MalformedError(
            f"this pack has {pack_nbytes} bytes instead of {tail.pack_nbytes}", where=where, pack_id=tail.pack_id
        )
    _check_tail(tail, limits, where)
    return tail


def _check_tail(tail: PackTail, limits: Limits, where: object) -> None:
    if (
        tail.pack_nbytes > limits.pack_nbytes_max
        or tail.directory_offset < SUPERHEADER_NBYTES
        or tail.directory_offset % BLOCK_NBYTES
        or tail.directory_nbytes != tail.frame_count * DIRECTORY_ENTRY_NBYTES
        or tail.pack_nbytes != align_up(tail.directory_offset + tail.directory_nbytes, BLOCK_NBYTES) + TAIL_NBYTES
        or tail.frame_count > (tail.directory_offset - SUPERHEADER_NBYTES) // (FRAME_HEADER_NBYTES + FRAME_ALIGN)
    ):
        raise MalformedError("lengths in a pack's tail contradict each other or the limits", where=where)


def check_entry(entry: DirectoryEntry, header: FrameHeader, *, where: object = None) -> None:
    """Compare a directory entry with the header of its frame.

    Raises:
        MalformedError: They differ.
    """
    listed = (entry.chunk_id, entry.base_id, entry.stored_nbytes, entry.plain_nbytes, entry.element_width)
    found = (header.chunk_id, header.base_id, header.stored_nbytes, header.plain_nbytes, header.element_width)
    if listed != found:
        raise MalformedError(
            "the header of a frame contradicts the directory of its pack", where=where, offset=entry.offset
        )


def scan_frames(
    read: Callable[[int, int], Buffer], nbytes: int, *, limits: Limits = _DEFAULT_LIMITS
) -> Iterator[tuple[int, FrameHeader]]:
    """Scan a pack from the front for frames, and yield their offsets and headers.

    ``read(offset, nbytes)`` returns bytes of the file, fewer at its end; the file has ``nbytes`` bytes. The caller must
    check payloads and chunk ids, because a chunk may contain the bytes of a pack.
    """
    at = SUPERHEADER_NBYTES
    while at + FRAME_HEADER_NBYTES < nbytes:
        window = memoryview(read(at, min(_SCAN_NBYTES, nbytes - at))).cast("B")
        if len(window) < FRAME_HEADER_NBYTES:
            return
        jump = align_up(len(window) - FRAME_HEADER_NBYTES + 1, FRAME_ALIGN)
        for offset, header in _frames_in(window, limits):
            if at + offset + header.frame_nbytes > nbytes:
                # The payload is cut off, so all following bytes belong to it.
                continue
            yield at + offset, header
            jump = max(jump, offset + frame_extent(header.stored_nbytes))
        at += jump


def _frames_in(window: memoryview, limits: Limits) -> Iterator[tuple[int, FrameHeader]]:
    """Yield the frames whose headers are completely in the window, skipping their payloads."""
    content = bytes(window)
    offset = content.find(FRAME_MAGIC)
    while 0 <= offset <= len(content) - FRAME_HEADER_NBYTES:
        resume = offset + 1
        if offset % FRAME_ALIGN == 0:
            try:
                header = decode_frame_header(window[offset : offset + FRAME_HEADER_NBYTES], limits=limits)
            except (CorruptError, UnsupportedError):
                # The magic occurs in a payload by chance, or the header is damaged: continue one byte later.
                header = None
            if header is not None:
                resume = offset + frame_extent(header.stored_nbytes)
                yield offset, header
        offset = content.find(FRAME_MAGIC, resume)
