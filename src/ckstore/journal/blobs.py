"""What a record stores: arrays in blobs, blobs in chunks, chunks in frames; and back.

A long array has a blob of its own. Short ones of one element type share a blob, so that hundreds of small gradients
need few frames.

"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckstore.codec import chunk_codec
from ckstore.codec.byte_codecs import Scratch
from ckstore.codec.frame_decoder import Expected, FrameDecoder
from ckstore.concurrency import map_in_threads
from ckstore.config import KIB, Compression, Limits
from ckstore.errors import ChecksumError, MalformedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, encode_frame_header, frame_extent
from ckstore.format.journal import PlacedHead, Read, read_frames
from ckstore.format.points import Blob, Span
from ckstore.format.wire import new_xxh3
from ckstore.hashing import NO_BASE, chunk_id_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

OWN_NBYTES_MIN = 256 * KIB
"""Arrays from this length on have a blob of their own: their numbers are coded better without those of others."""


class EncodedFrame(NamedTuple):
    """A frame as it is written, in parts, with its padding."""

    header: FrameHeader
    parts: tuple[bytes, ...]


class BlobWriter:
    """Collects arrays, and encodes them into frames.

    Args:
        limits: Limits of the store.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parts: list[list[NDArray[np.uint8]]] = []
        self._kinds: list[tuple[int, bool]] = []
        self._lengths: list[int] = []
        self._shared: dict[tuple[int, bool], int] = {}

    def add(self, array: NDArray[np.generic], *, element_width: int, is_float: bool) -> Span:
        """Add the bytes of an array. They must not change until the frames are encoded."""
        plain = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not plain.size:
            return Span(0, 0, 0)
        kind = element_width, is_float
        index = self._shared.get(kind) if plain.size < OWN_NBYTES_MIN else None
        if index is None:
            index = len(self._parts)
            self._parts.append([])
            self._kinds.append(kind)
            self._lengths.append(0)
            if plain.size < OWN_NBYTES_MIN:
                self._shared[kind] = index
        span = Span(index, self._lengths[index], plain.size)
        self._parts[index].append(plain)
        self._lengths[index] += plain.size
        return span

    def encode(self, compression: Compression, *, thread_count: int) -> tuple[tuple[Blob, ...], list[EncodedFrame]]:
        """Return the blobs, and the frames of their chunks in order."""
        own = threading.local()
        nbytes_max = self._limits.chunk_nbytes_max

        def encoded(chunk: tuple[memoryview, int, bool]) -> EncodedFrame:
            if not hasattr(own, "scratch"):
                own.scratch = Scratch(nbytes_max)
            plain, width, is_float = chunk
            return _frame_of(plain, width, is_float, compression, own.scratch, self._limits)

        frames = list(map_in_threads(encoded, self._chunks(), count_max=thread_count, name="ckstore-journal"))
        rows = iter(frames)
        blobs = []
        for (width, is_float), nbytes in zip(self._kinds, self._lengths, strict=True):
            headers = [next(rows).header for _ in range(-(-nbytes // nbytes_max))]
            chunks = tuple((header.chunk_id, header.plain_nbytes) for header in headers)
            blobs.append(Blob(width, is_float, chunks))
        return tuple(blobs), frames

    def _chunks(self) -> Iterator[tuple[memoryview, int, bool]]:
        for parts, (width, is_float) in zip(self._parts, self._kinds, strict=True):
            plain = parts[0] if len(parts) == 1 else np.concatenate(parts)
            for begin in range(0, plain.size, self._limits.chunk_nbytes_max):
                yield plain[begin : begin + self._limits.chunk_nbytes_max].data, width, is_float


def _frame_of(
    plain: memoryview, width: int, is_float: bool, compression: Compression, scratch: Scratch, limits: Limits
) -> EncodedFrame:
    chunk_id = chunk_id_of(plain)
    coded = chunk_codec.encode(plain, width=width, is_float=is_float, compression=compression, scratch=scratch)
    # A part may be memory of the scratch, which the next chunk overwrites.
    payload = b"".join(coded.parts)
    checksum = new_xxh3()
    checksum.update(payload)
    header = FrameHeader(chunk_id, NO_BASE, len(plain), len(payload), coded.width, coded.steps, checksum.intdigest())
    padding = bytes(frame_extent(len(payload)) - FRAME_HEADER_NBYTES - len(payload))
    return EncodedFrame(header, (encode_frame_header(header, limits=limits), payload, padding))


class DecodeMemory:
    """What decoding needs, for many records. Used on one thread at a time.

    Args:
        limits: Limits of the store.
    """

    def __init__(self, limits: Limits) -> None:
        self.decoder = FrameDecoder(limits.chunk_nbytes_max)
        self._passing = np.empty(0, np.uint8)

    def passing(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory for bytes that are used before the next call. It stays in the processor's cache."""
        if self._passing.size < nbytes:
            self._passing = np.empty(nbytes, np.uint8)
        return self._passing[:nbytes]


class BlobReader:
    """Decodes the blobs of one record. A blob is decoded when it is first needed.

    Args:
        read: Reads bytes of the segment.
        placed: The record.
        blobs: Its blobs.
        limits: Limits of the store.
        where: The segment, for messages.
        memory: Memory that other records use, too.
    """

    def __init__(
        self,
        read: Read,
        placed: PlacedHead,
        blobs: Sequence[Blob],
        limits: Limits,
        *,
        where: object = None,
        memory: DecodeMemory | None = None,
    ) -> None:
        self._read = read
        self.where = where
        frames = list(read_frames(read, placed, limits=limits, where=where))
        if len(frames) != sum(len(blob.chunks) for blob in blobs):
            raise MalformedError("a record of a journal has another number of frames than its body says", where=where)
        rows = iter(frames)
        self._blobs = [(blob, [next(rows) for _ in blob.chunks]) for blob in blobs]
        self._plain: dict[int, NDArray[np.uint8]] = {}
        self._memory = DecodeMemory(limits) if memory is None else memory

    def bytes_of(self, span: Span) -> NDArray[np.uint8]:
        """Return bytes of a blob, as a view that is valid as long as it is held.

        Raises:
            CorruptError: A frame is damaged, or holds another chunk than the body says.
        """
        if not span.nbytes:
            return np.empty(0, np.uint8)
        if span.blob not in self._plain:
            plain = np.empty(self._blobs[span.blob][0].nbytes, np.uint8)
            self._decode(span.blob, plain)
            self._plain[span.blob] = plain
        return self._plain[span.blob][span.offset : span.offset + span.nbytes]

    def passing_bytes_of(self, span: Span) -> NDArray[np.uint8]:
        """Return bytes of a blob, as a view that is valid until the next call for any record with this memory.

        Raises:
            CorruptError: A frame is damaged, or holds another chunk than the body says.
        """
        if span.nbytes < OWN_NBYTES_MIN or span.nbytes != self._blobs[span.blob][0].nbytes or span.blob in self._plain:
            return self.bytes_of(span)
        plain = self._memory.passing(span.nbytes)
        self._decode(span.blob, plain)
        return plain

    def _decode(self, index: int, plain: NDArray[np.uint8]) -> None:
        blob, frames = self._blobs[index]
        begin = 0
        for (chunk_id, nbytes), (header, offset) in zip(blob.chunks, frames, strict=True):
            frame = memoryview(self._read(offset, header.frame_nbytes)).cast("B")
            if len(frame) != header.frame_nbytes:
                raise ChecksumError("a frame of a journal is cut off", where=self.where)
            self._memory.decoder.decode(frame, Expected(chunk_id, nbytes), plain[begin : begin + nbytes].data)
            begin += nbytes
