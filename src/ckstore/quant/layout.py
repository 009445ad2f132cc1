"""The fixed part of a lossy payload: geometry, factors, codebook and table of what follows, checked as it is read.

Invariants:
- Whatever the bytes, reading them yields lengths and numbers within the bounds that FORMAT.md names, or raises.
- Nothing is allocated by a length that was not compared with the bytes at hand.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import MalformedError
from ckstore.quant.contexts import STREAM_COUNT_MAX, SUM_COUNT
from ckstore.quant.factors import require_known
from ckstore.quant.geometry import ROW_MAX, ROW_MIN, Grid

_HEAD = struct.Struct("<IIIfhhBBBBBBH")
_SECTION = struct.Struct("<BI")
_STREAM = struct.Struct("<BBB")
_PER_BYTE_MAX = 8


@dataclass(frozen=True, slots=True)
class Section:
    """How some bytes are stored, and how many there are."""

    mode: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Symbols that are coded together.

    Args:
        lowest: Its least symbol.
        alphabet: How many there are from that on.
        per_byte: Symbols in a byte.
        section: The packed bytes; none where there is one symbol only, or no element.
    """

    lowest: int
    alphabet: int
    per_byte: int
    section: Section

    def packed_nbytes(self, count: int) -> int:
        """Return how many bytes so many symbols take before they are coded."""
        return 0 if self.alphabet == 1 else -(-count // self.per_byte)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a payload says before its sections.

    Args:
        grid: Where the chunk lies.
        floor: Least second moment; 0 elsewhere.
        row_exponent: Of the factors of rows.
        row_octave_bits: Of the same.
        col_exponent: Of the factors of columns.
        col_octave_bits: Of the same.
        first: The symbol of the codebook's first entry.
        codebook: What symbols stand for, from ``first`` on.
        rows: The codes of the rows' factors.
        cols: The codes of the columns' factors.
        classes: The classes of rows and of columns, and the stream of each sum; None if there is one stream.
        streams: The symbols.
        escape_count: Elements that are stored as they are.
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
        """Return what each of 256 symbols stands for."""
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
    """Takes bytes from the front."""

    def __init__(self, payload: memoryview) -> None:
        self.rest = payload

    def take(self, nbytes: int) -> memoryview:
        if nbytes > self.rest.nbytes:
            raise MalformedError("a lossy payload is cut short")
        taken, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return taken

    def section(self) -> Section:
        return Section(*_SECTION.unpack(self.take(_SECTION.size)))


def read_layout(payload: memoryview, count: int, *, is_second: bool) -> tuple[Layout, memoryview]:
    """Return the fixed part of the payload of ``count`` elements, and what follows it.

    Args:
        payload: The stored bytes.
        count: Elements of the chunk, at least one.
        is_second: Second moments have a floor above 0, and nothing else has one.

    Raises:
        MalformedError: No writer makes it.
    """
    reader = _Reader(payload)
    row, phase, escapes, floor, row_exponent, col_exponent, row_bits, col_bits, first, last, stream_count, *zeros = (
        _HEAD.unpack(reader.take(_HEAD.size))
    )
    if not ROW_MIN <= row <= ROW_MAX or phase >= row or any(zeros) or escapes > count:
        raise MalformedError(f"a lossy payload has rows of {row}, phase {phase} and {escapes} escapes")
    if not (0 < floor < math.inf if is_second else struct.pack("<f", floor) == bytes(4)):
        raise MalformedError(f"a lossy payload has the floor {floor}")
    if not 1 <= stream_count <= STREAM_COUNT_MAX or first + last > 255:
        raise MalformedError(f"a lossy payload has {stream_count} streams of {last + 1} symbols from {first} on")
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
            raise MalformedError("a sum of classes has a stream that is not there")
    streams = tuple(_read_stream(reader, first, first + last) for _ in range(stream_count))
    grid = Grid(count, row, phase)
    layout = Layout(
        *(grid, floor, row_exponent, row_bits, col_exponent, col_bits, first, codebook),
        *(rows, cols, classes, streams, escapes),
    )
    return layout, reader.rest


def _read_stream(reader: _Reader, first: int, last: int) -> Stream:
    lowest, more, per_byte = _STREAM.unpack(reader.take(_STREAM.size))
    alphabet = more + 1
    if lowest < first or lowest + more > last:
        raise MalformedError(f"a stream has symbols {lowest} to {lowest + more} without a value")
    if not 1 <= per_byte <= _PER_BYTE_MAX or alphabet**per_byte > 256 or (alphabet == 1 and per_byte != 1):
        raise MalformedError(f"a stream has {per_byte} symbols of {alphabet} in a byte")
    return Stream(lowest, alphabet, per_byte, reader.section())


def _packed(section: Section) -> bytes:
    return _SECTION.pack(section.mode, section.stored_nbytes)
