"""The payload of a quantized chunk: geometry, factors, codebook, streams of symbols and escapes, written and read.

Invariants:
- For any bytes, reading yields lengths and numbers within the bounds of FORMAT.md, or raises. Everything is checked
  before anything is reconstructed.
- Nothing is allocated for a length that was not compared with the payload. Reading uses the scratch, and arrays that
  are small compared with the chunk.
- A payload must be consumed to its last byte.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.codec.planes import RAW, decode_section, encode_section
from ckstore.errors import MalformedError
from ckstore.quant.geometry import ROW_MAX, ROW_MIN, Factors, Grid, require_known
from ckstore.quant.grid import STREAM_COUNT_MAX, SUM_COUNT, Contexts, Occurring

_HEAD = struct.Struct("<IIIfhhBBBBBBH")
_SECTION = struct.Struct("<BI")
_STREAM = struct.Struct("<BBB")
_PER_BYTE_MAX = 8


@dataclass(frozen=True, slots=True)
class Section:
    """The mode and the stored length of a section."""

    mode: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Symbols that are coded together.

    Args:
        lowest: The smallest symbol.
        alphabet: Number of symbols, from ``lowest`` on.
        per_byte: Symbols packed into a byte.
        section: The packed bytes; empty if only one symbol occurs, or none.
    """

    lowest: int
    alphabet: int
    per_byte: int
    section: Section

    def packed_nbytes(self, count: int) -> int:
        """Return the length of ``count`` packed symbols before coding."""
        return 0 if self.alphabet == 1 else -(-count // self.per_byte)


@dataclass(frozen=True, slots=True)
class Layout:
    """The fixed part of a payload, which precedes the sections.

    Args:
        grid: Rows and columns of the chunk.
        floor: Lower bound of second moments; 0 for other values.
        row_exponent: Exponent of the row factors.
        row_octave_bits: Octave bits of the row factors.
        col_exponent: Exponent of the column factors.
        col_octave_bits: Octave bits of the column factors.
        first: The symbol of the codebook's first entry.
        codebook: The values of the symbols, from ``first`` on.
        rows: The codes of the row factors.
        cols: The codes of the column factors.
        classes: The classes of rows and of columns, and the stream of each sum; None if there is one stream.
        streams: The symbols.
        escape_count: Elements that are stored exactly.
    """

    grid: Grid
    floor: float
    row_exponent: int
    row_octave_bits: int
    col_exponent: int
    col_octave_bits: int
    first: int
    codebook: NDArray[np.float32]
    rows: Section
    cols: Section
    classes: tuple[Section, Section, bytes] | None
    streams: tuple[Stream, ...]
    escape_count: int

    def table(self) -> NDArray[np.float32]:
        """Return the value of each of 256 symbols."""
        found = np.zeros(256, np.float32)
        found[self.first : self.first + self.codebook.size] = self.codebook
        return found


def write_layout(layout: Layout) -> bytes:
    """Return the fixed part of a payload."""
    head = _HEAD.pack(
        layout.grid.row,
        layout.grid.phase,
        layout.escape_count,
        layout.floor,
        layout.row_exponent,
        layout.col_exponent,
        layout.row_octave_bits,
        layout.col_octave_bits,
        layout.first,
        layout.codebook.size - 1,
        len(layout.streams),
        0,
        0,
    )
    parts = [head, layout.codebook.astype("<f4").tobytes(), _packed(layout.rows), _packed(layout.cols)]
    if layout.classes is not None:
        rows, cols, stream_of = layout.classes
        parts += [_packed(rows), _packed(cols), stream_of]
    for stream in layout.streams:
        parts += [_STREAM.pack(stream.lowest, stream.alphabet - 1, stream.per_byte), _packed(stream.section)]
    return b"".join(parts)


class _Reader:
    """Reads a payload from the front."""

    def __init__(self, payload: memoryview) -> None:
        self.rest = payload

    def take(self, nbytes: int) -> memoryview:
        if nbytes > self.rest.nbytes:
            raise MalformedError("a quantized payload is truncated")
        taken, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return taken

    def section(self) -> Section:
        return Section(*_SECTION.unpack(self.take(_SECTION.size)))


def read_layout(payload: memoryview, count: int, *, is_second: bool) -> tuple[Layout, memoryview]:
    """Return the fixed part of the payload of ``count`` elements, and the rest of the payload.

    Args:
        payload: The stored bytes.
        count: Elements of the chunk, at least one.
        is_second: The chunk is a second moment, which has a floor above 0. Other chunks have none.

    Raises:
        MalformedError: No writer makes this payload.
    """
    reader = _Reader(payload)
    row, phase, escapes, floor, row_exponent, col_exponent, row_bits, col_bits, first, last, stream_count, *zeros = (
        _HEAD.unpack(reader.take(_HEAD.size))
    )
    if not ROW_MIN <= row <= ROW_MAX or phase >= row or any(zeros) or escapes > count:
        raise MalformedError(f"a quantized payload has rows of {row}, phase {phase} and {escapes} escapes")
    if not (0 < floor < math.inf if is_second else struct.pack("<f", floor) == bytes(4)):
        raise MalformedError(f"a quantized payload has the floor {floor}")
    if not 1 <= stream_count <= STREAM_COUNT_MAX or first + last > 255:
        raise MalformedError(f"a quantized payload has {stream_count} streams of {last + 1} symbols from {first} on")
    require_known(row_exponent, row_bits)
    require_known(col_exponent, col_bits)
    codebook = np.frombuffer(reader.take(4 * (last + 1)), "<f4").astype(np.float32)
    if not np.isfinite(codebook).all():
        raise MalformedError("a codebook has entries that are not finite")
    rows, cols = reader.section(), reader.section()
    classes = None
    if stream_count > 1:
        classes = (reader.section(), reader.section(), bytes(reader.take(SUM_COUNT)))
        if max(classes[2]) >= stream_count:
            raise MalformedError("a sum of classes names a stream that does not exist")
    streams = tuple(_read_stream_head(reader, first, first + last) for _ in range(stream_count))
    grid = Grid(count, row, phase)
    layout = Layout(
        *(grid, floor, row_exponent, row_bits, col_exponent, col_bits, first, codebook),
        *(rows, cols, classes, streams, escapes),
    )
    return layout, reader.rest


def _read_stream_head(reader: _Reader, first: int, last: int) -> Stream:
    lowest, more, per_byte = _STREAM.unpack(reader.take(_STREAM.size))
    alphabet = more + 1
    if lowest < first or lowest + more > last:
        raise MalformedError(f"a stream has symbols {lowest} to {lowest + more}, some without a value")
    if not 1 <= per_byte <= _PER_BYTE_MAX or alphabet**per_byte > 256 or (alphabet == 1 and per_byte != 1):
        raise MalformedError(f"a stream packs {per_byte} of {alphabet} symbols into a byte")
    return Stream(lowest, alphabet, per_byte, reader.section())


def _packed(section: Section) -> bytes:
    return _SECTION.pack(section.mode, section.stored_nbytes)


Bytes = NDArray[np.uint8]

_NOTHING = Section(RAW, 0)
# The number of symbols per byte is chosen by a trial with this many symbols.
_TRIAL_COUNT = 1 << 15


@dataclass(frozen=True, slots=True)
class Codes:
    """The contents of a payload.

    Args:
        grid: Rows and columns of the chunk.
        rows: Factors of rows.
        cols: Factors of columns.
        symbols: One for each element.
        table: The value of each of 256 symbols.
        floor: Lower bound of second moments; 0 for other values.
        escapes: Elements that are stored exactly, in rising order.
        words: The bytes of these elements, one after another.
    """

    grid: Grid
    rows: Factors
    cols: Factors
    symbols: memoryview
    table: NDArray[np.float32]
    floor: float
    escapes: NDArray[np.int64]
    words: bytes


class _Writer:
    """Codes sections one after another into the scratch."""

    def __init__(self, scratch: Scratch, nbytes: int) -> None:
        self._scratch = scratch
        self._room = scratch.coded(nbytes)
        self.parts: list[memoryview] = []

    def add(self, plain: memoryview) -> Section:
        mode, stored = encode_section(plain, self._room, self._scratch)
        if stored.obj is self._room.obj:
            self._room = self._room[stored.nbytes :]
        elif stored.obj is not None and stored.nbytes:
            # The memory of the plain bytes will be reused.
            stored = memoryview(bytes(stored))
        self.parts.append(stored)
        return Section(mode, stored.nbytes)

    def coded_nbytes(self, plain: memoryview) -> int:
        """Return the length of the bytes after coding."""
        return encode_section(plain, self._room, self._scratch)[1].nbytes


def write_codes(codes: Codes, contexts: Contexts, counts: NDArray[np.float64], scratch: Scratch) -> list[memoryview]:
    """Return the parts of the payload. They are valid until the next use of the scratch.

    Args:
        codes: The contents. The symbols are in the first half of ``scratch.planes``.
        contexts: The streams of the symbols.
        counts: Occurrences of each symbol.
        scratch: Memory of this thread.
    """
    grid, occurring = codes.grid, Occurring.of(counts)
    writer = _Writer(scratch, kernels.plane_bound(scratch.chunk_nbytes_max))
    rows, cols = writer.add(codes.rows.codes.data), writer.add(codes.cols.codes.data)
    classes, sizes, streams = None, [grid.count], codes.symbols
    if contexts.stream_count > 1:
        edges = (contexts.rows.data, contexts.cols.data, contexts.stream_of.data)
        classes = (writer.add(edges[0]), writer.add(edges[1]), contexts.stream_of.tobytes())
        sizes = _sizes(edges, grid)[: contexts.stream_count]
        streams = scratch.planes(2 * grid.count)[grid.count :]
        kernels.split_streams(codes.symbols, *edges, streams, grid.row, grid.phase)
    table, at = [], 0
    for size in sizes:
        table.append(_write_stream(streams[at : at + size], occurring, writer, scratch))
        at += size
    layout = Layout(
        grid=grid,
        floor=codes.floor,
        row_exponent=codes.rows.exponent,
        row_octave_bits=codes.rows.octave_bits,
        col_exponent=codes.cols.exponent,
        col_octave_bits=codes.cols.octave_bits,
        first=occurring.first,
        codebook=codes.table[occurring.first : occurring.first + occurring.count],
        rows=rows,
        cols=cols,
        classes=classes,
        streams=tuple(table),
        escape_count=codes.escapes.size,
    )
    escapes = codes.escapes.astype("<u4").tobytes() + codes.words
    return [memoryview(write_layout(layout)), *writer.parts, memoryview(escapes)]


def read_codes(payload: memoryview, count: int, *, width: int, is_second: bool, scratch: Scratch) -> Codes:
    """Return the contents of a payload. The symbols are in ``scratch.planes``.

    Raises:
        CorruptError: No writer makes this payload for so many elements.
    """
    layout, rest = read_layout(payload, count, is_second=is_second)
    grid = layout.grid
    stored = [layout.rows, layout.cols, *(layout.classes[:2] if layout.classes else ())]
    stored += [stream.section for stream in layout.streams]
    pieces = []
    for section in stored:
        if section.stored_nbytes > rest.nbytes:
            raise MalformedError("a quantized payload is truncated")
        pieces.append(rest[: section.stored_nbytes])
        rest = rest[section.stored_nbytes :]
    if rest.nbytes != layout.escape_count * (4 + width):
        raise MalformedError("a quantized payload is longer or shorter than its contents")
    edges = [grid.row_count, grid.row, grid.row_count, grid.row]
    head = [_section(*pair, scratch) for pair in zip(stored, pieces, edges[: 4 if layout.classes else 2], strict=False)]
    symbols = _read_symbols(layout, pieces[len(head) :], head[2:], scratch)
    escapes = np.frombuffer(rest[: 4 * layout.escape_count], "<u4").astype(np.int64)
    if escapes.size and (escapes[-1] >= count or not (np.diff(escapes) > 0).all()):
        raise MalformedError("escapes are not in rising order, or are outside the chunk")
    return Codes(
        grid,
        Factors(head[0], layout.row_exponent, layout.row_octave_bits),
        Factors(head[1], layout.col_exponent, layout.col_octave_bits),
        symbols,
        layout.table(),
        layout.floor,
        escapes,
        bytes(rest[4 * layout.escape_count :]),
    )


def _section(section: Section, stored: memoryview, count: int, scratch: Scratch) -> Bytes:
    found = np.empty(count, np.uint8)
    decode_section(section.mode, stored, found.data, scratch)
    return found


def _read_symbols(layout: Layout, pieces: list[memoryview], classes: list[Bytes], scratch: Scratch) -> memoryview:
    grid = layout.grid
    room = scratch.planes(2 * grid.count)
    symbols, streams, sizes = room[: grid.count], room[: grid.count], [grid.count]
    edges = None
    if layout.classes is not None:
        if max(classes[0].max(), classes[1].max()) >= STREAM_COUNT_MAX:
            raise MalformedError("a class is not below 16")
        edges = (classes[0].data, classes[1].data, memoryview(layout.classes[2]))
        sizes = _sizes(edges, grid)
        streams = room[grid.count :]
    at = 0
    for stream, stored, size in zip(layout.streams, pieces, sizes, strict=False):
        _read_stream(stream, stored, streams[at : at + size], scratch)
        at += size
    if edges is not None:
        kernels.merge_streams(streams, *edges, symbols, grid.row, grid.phase)
    return symbols


def _sizes(edges: tuple[memoryview, memoryview, memoryview], grid: Grid) -> list[int]:
    sizes = np.empty(STREAM_COUNT_MAX, np.uint64)
    kernels.stream_sizes(*edges, sizes.data, grid.count, grid.row, grid.phase)
    return [int(size) for size in sizes]


def _write_stream(symbols: memoryview, occurring: Occurring, writer: _Writer, scratch: Scratch) -> Stream:
    if not symbols.nbytes:
        return Stream(occurring.first, 1, 1, _NOTHING)
    counts = np.zeros(256, np.uint32)
    kernels.histogram(symbols, counts.data)
    own = Occurring.of(counts.astype(np.float64))
    if own.count == 1:
        return Stream(own.first, 1, 1, _NOTHING)
    per_byte = _choose_per_byte(symbols, own, writer, scratch)
    packed = scratch.decoded(-(-symbols.nbytes // per_byte))
    kernels.pack_symbols(symbols, packed, own.first, own.count, per_byte)
    return Stream(own.first, own.count, per_byte, writer.add(packed))


def _choose_per_byte(symbols: memoryview, own: Occurring, writer: _Writer, scratch: Scratch) -> int:
    """Return the number of symbols per byte that makes the beginning of the stream shortest."""
    most = next(count for count in range(8, 0, -1) if own.count**count <= 256)
    trial = symbols[: min(symbols.nbytes, _TRIAL_COUNT)]
    best, fewest = 1, -1
    # Fewer than half of the possible number give the same length in more time.
    for per_byte in range(max(1, most // 2), most + 1):
        packed = scratch.decoded(-(-trial.nbytes // per_byte))
        kernels.pack_symbols(trial, packed, own.first, own.count, per_byte)
        nbytes = writer.coded_nbytes(packed)
        if fewest < 0 or nbytes < fewest:
            best, fewest = per_byte, nbytes
    return best


def _read_stream(stream: Stream, stored: memoryview, symbols: memoryview, scratch: Scratch) -> None:
    packed_nbytes = stream.packed_nbytes(symbols.nbytes)
    if packed_nbytes == 0:
        if stored.nbytes or stream.section.mode != RAW:
            raise MalformedError("a stream of at most one symbol has stored bytes")
        np.frombuffer(symbols, np.uint8).fill(stream.lowest)
        return
    packed = scratch.decoded(packed_nbytes)
    decode_section(stream.section.mode, stored, packed, scratch)
    if not kernels.unpack_symbols(packed, symbols, stream.lowest, stream.alphabet, stream.per_byte):
        raise MalformedError("a stream has bytes that are not symbols of its alphabet")
