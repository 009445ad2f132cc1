"""The logical section of a manifest: the content of the checkpoint, independent of where and how it is stored.

Its BLAKE3 is the checkpoint id. The section starts with the lengths of its parts: a record of scalars, the state tree,
tensors, storages, pieces and chunks. The losses of a lossy checkpoint follow at the end. Locations of frames are not
included, so a repack does not change the id. An exact checkpoint has the same id in every format version.

Losses describe the content, so the checkpoint id covers them: the method and the errors of each storage that was stored
lossily. An exact checkpoint has no such table.

Invariants:
- A storage without a row in the table of losses is bit for bit what was committed.
- The header's fidelity is ``exact`` if and only if there are no rows.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckstore.config import Limits, Residual
from ckstore.errors import MalformedError
from ckstore.format.frame import ELEMENT_WIDTHS
from ckstore.format.piece_rows import ROW as PIECE
from ckstore.format.piece_rows import PieceRows, pieces_of_rows, rows_of_pieces
from ckstore.format.records import FORMAT_VERSION, LossRow, TensorRow, decode_stored, encode_inner
from ckstore.format.tensors import ChunkSpec, Piece, Row, StorageSpec, Table, TensorSpec, check_layout
from ckstore.format.tree import Node, decode_tree, encode_tree
from ckstore.format.wire import Reader, xxh3_64
from ckstore.hashing import NO_BASE

if TYPE_CHECKING:
    from typing_extensions import Buffer

EXACT_FIDELITY = "exact"

ROLES = ("weight", "first", "second", "rounded")
"""Roles of lossy storages: a weight, a first or second moment, or the rounding of another storage."""

HOPS_MAX = 0xFFFF
NUMBERS_MAX = 16
"""Most parameters of one method."""

_WORD = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}", re.ASCII)
_SLACK = 1 + 1e-6
"""Tolerance for the rule that an RMS is at most the maximum, because the sum is rounded."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one lossy storage; errors are those of this commit alone.

    Args:
        storage: Index of the storage.
        role: Its role: ``"weight"``, ``"first"`` or ``"second"`` moment, ``"rounded"``.
        method: Name of the quantization method: ``"grid"``, ``"rank1"``, ``"log"``, ``"ternary"``, ...
        numbers: The method's parameters.
        bits: Stored bits per element.
        max_abs: Largest absolute error of an element.
        rms_error: Root mean square of the errors.
        rms_value: Root mean square of the committed values.
        kept: Share of the elements whose code is not zero.
        hops: Lossy commits since the storage was last exact, including this one.
        spike: Largest |update| / lr of the next Adam step, over all possible gradients; None for weights, and if the
            optimizer's constants are unknown.
    """

    storage: int
    role: str
    method: str
    bits: float
    max_abs: float
    rms_error: float
    rms_value: float
    kept: float
    hops: int = 1
    spike: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def rel_rms(self) -> float:
        """RMS error divided by RMS value; infinite if only the value is zero."""
        if self.rms_error == 0:
            return 0.0
        return self.rms_error / self.rms_value if self.rms_value else math.inf


def fidelity_of(residual: Residual | None, losses: Sequence[Loss]) -> str:
    """Return the fidelity for a manifest's header: ``exact``, or the name of the residual policy.

    Characters that a header does not allow become hyphens. A policy named ``exact`` is stored as ``own``.
    """
    if residual is None or not losses:
        return EXACT_FIDELITY
    word = re.sub(r"[^a-z0-9_.-]+", "-", residual.name.lower()).strip("-_.")[:32]
    return word if word and word != EXACT_FIDELITY else "own"


def encode_losses(losses: Sequence[Loss]) -> bytes:
    """Return the table; empty for an exact checkpoint."""
    if not losses:
        return b""
    return encode_inner(
        [
            LossRow(
                storage=loss.storage,
                role=loss.role,
                method=loss.method,
                bits=float(loss.bits),
                max_abs=float(loss.max_abs),
                rms_error=float(loss.rms_error),
                rms_value=float(loss.rms_value),
                kept=float(loss.kept),
                hops=min(loss.hops, HOPS_MAX),
                spike=None if loss.spike is None else float(loss.spike),
                numbers={name: float(value) for name, value in sorted(loss.numbers.items())},
            )
            for loss in losses
        ]
    )


def decode_losses(table: memoryview, *, where: object = None) -> tuple[Loss, ...]:
    """Decode the table, which may be missing but not without rows.

    Raises:
        MalformedError: Wrong fields or types, or a table without rows.
    """
    if not len(table):
        return ()
    rows = decode_stored(table, list[LossRow], where=where)
    if not rows:
        raise MalformedError("the table of losses of a manifest has no rows", where=where)
    return tuple(
        Loss(
            storage=row.storage,
            role=row.role,
            method=row.method,
            bits=row.bits,
            max_abs=row.max_abs,
            rms_error=row.rms_error,
            rms_value=row.rms_value,
            kept=row.kept,
            hops=row.hops,
            spike=row.spike,
            numbers=row.numbers,
        )
        for row in rows
    )


def check_losses(losses: Sequence[Loss], storages: Sequence[StorageSpec], where: object) -> None:
    """Check the losses, before writing and after reading.

    Raises:
        MalformedError: A storage is missing, not float, empty or repeated, or a number is out of range.
    """
    last = -1
    for loss in losses:
        if not last < loss.storage < len(storages):
            raise MalformedError(
                "losses name a storage that does not exist, name one twice, or are out of order", where=where
            )
        last = loss.storage
        spec = storages[loss.storage]
        if not spec.is_float or spec.element_width not in (2, 4) or not spec.nbytes:
            raise MalformedError("a loss belongs to a storage that is empty or not float", where=where)
        numbers = (loss.bits, loss.max_abs, loss.rms_error, loss.rms_value, loss.spike or 0.0)
        if (
            loss.role not in ROLES
            or not _WORD.fullmatch(loss.method)
            or not all(math.isfinite(number) and number >= 0 for number in numbers)
            or loss.rms_error > loss.max_abs * _SLACK
            or not 0 <= loss.kept <= 1
            or not 1 <= loss.hops <= HOPS_MAX
            or len(loss.numbers) > NUMBERS_MAX
            or not all(_WORD.fullmatch(name) and math.isfinite(value) for name, value in loss.numbers.items())
        ):
            raise MalformedError("a loss has fields out of range", where=where)


def check_fidelity(fidelity: str, losses: Sequence[Loss], where: object) -> None:
    """Check that the fidelity is ``exact`` if and only if there are no losses.

    Raises:
        MalformedError: It is not, or the fidelity is not a valid word.
    """
    if not _WORD.fullmatch(fidelity) or (fidelity == EXACT_FIDELITY) != (not losses):
        raise MalformedError("the fidelity of a manifest contradicts its losses", where=where)


_HEAD = struct.Struct("<QQQQQQ")
_STORAGE = struct.Struct("<QIB3s")
_CHUNK = struct.Struct("<32sIB3s")
_ELEMENTS = (("element_width", "u1"), ("is_float", "u1"), ("zero", "<u2"))
STORAGE_ROW = (("nbytes", "<u8"), ("pieces", "<u4"), *_ELEMENTS)
PIECE_ROW = (("chunk", "<u4"), ("offset", "<u4"), ("nbytes", "<u4"))
CHUNK_ROW = (("chunk_id", "V32"), ("nbytes", "<u4"), *_ELEMENTS)
"""The fields of the rows of storages, pieces and chunks, as numpy dtypes."""

_IS_FLOAT = {b"\0\0\0": False, b"\1\0\0": True}
"""Valid values of the last three bytes of a storage or chunk; all others are reserved."""

LOSSY_VERSION = 3
"""The first format version with losses."""

_NUMPY_DTYPE = re.compile(r"[<>|=]([biufcSVmM])([0-9]{1,9})(?:\[[0-9a-zA-Z]+\])?", re.ASCII)
_NUMPY_TEXT = re.compile(r"[<>|=]U([0-9]{1,9})", re.ASCII)

TORCH_ITEMSIZES = {
    name: nbytes
    for nbytes, names in {
        1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
        " float4_e2m1fn_x2 bits8 bits1x8 bits2x4 bits4x2",
        2: "uint16 int16 float16 bfloat16 bits16",
        4: "uint32 int32 float32 complex32",
        8: "uint64 int64 float64 complex64",
        16: "complex128",
    }.items()
    for name in names.split()
}
"""Bytes of one element, for the names that version 1 lists; other dtypes are checked by a restore."""


@dataclass(frozen=True, slots=True)
class Logical:
    """The logical section without the record of scalars, which the header repeats."""

    tree: Node
    tensors: tuple[TensorSpec, ...]
    storages: tuple[StorageSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    losses: tuple[Loss, ...] = ()


def encode_logical(record: bytes, logical: Logical) -> bytes:
    """Return the section; ``record`` is the encoded LogicalRecord."""
    storages = _encoded(logical.storages, _encode_storages)
    piece_count = (len(storages) - _STORAGE.size * len(logical.storages)) // PIECE.size
    counts = (len(logical.storages), piece_count, len(logical.chunks))
    chunks = [_CHUNK.pack(chunk.chunk_id, chunk.nbytes, chunk.element_width, _flag(chunk)) for chunk in logical.chunks]
    tree, tensors = encode_tree(logical.tree), encoded_tensors(logical.tensors)
    return join_logical(record, tree, tensors, counts, (storages, *chunks), logical.losses)


def join_logical(
    record: bytes,
    tree: bytes,
    tensors: bytes,
    counts: tuple[int, int, int],
    tables: Iterable[Buffer],
    losses: Sequence[Loss],
) -> bytes:
    """Return the section with these encoded parts.

    Args:
        record: The encoded LogicalRecord.
        tree: The encoded tree.
        tensors: The encoded tensors.
        counts: Numbers of storages, pieces and chunks.
        tables: The rows of storages, pieces and chunks, in this order.
        losses: The losses.
    """
    head = _HEAD.pack(len(record), len(tree), len(tensors), *counts)
    return b"".join((head, record, tree, tensors, *tables, encode_losses(losses)))


def encoded_tensors(tensors: tuple[TensorSpec, ...]) -> bytes:
    """Return the encoded table of tensors."""
    return _encoded(tensors, _encode_tensors)


def _encoded(rows: tuple[Row, ...], encode: Callable[[tuple[Row, ...]], bytes]) -> bytes:
    if not isinstance(rows, Table):
        return encode(rows)
    if rows.encoded is None:
        rows.encoded = encode(rows)
    return rows.encoded


def _encode_tensors(tensors: tuple[TensorSpec, ...]) -> bytes:
    return encode_inner([row_of(tensor) for tensor in tensors])


def _encode_storages(storages: tuple[StorageSpec, ...]) -> bytes:
    """Return the rows of all storages, then those of all their pieces."""
    rows = [
        _STORAGE.pack(storage.nbytes, len(storage.pieces), storage.element_width, _flag(storage))
        for storage in storages
    ]
    return b"".join((*rows, *(rows_of_pieces(storage.pieces) for storage in storages)))


def _flag(spec: StorageSpec | ChunkSpec) -> bytes:
    return b"\1\0\0" if spec.is_float else b"\0\0\0"


def row_of(tensor: TensorSpec) -> TensorRow:
    """Return a tensor as a row of the table."""
    return TensorRow(
        library=tensor.library,
        dtype=tensor.dtype,
        shape=tensor.shape,
        strides=tensor.strides,
        storage=tensor.storage,
        offset=tensor.offset,
        is_parameter=tensor.is_parameter,
        requires_grad=tensor.requires_grad,
    )


def decode_logical(
    section: memoryview,
    *,
    limits: Limits,
    version: int = FORMAT_VERSION,
    written: Logical | None = None,
    where: object = None,
) -> tuple[memoryview, Logical]:
    """Decode the section of a manifest; return its encoded record and the rest.

    Args:
        section: The section.
        limits: Bounds on chunks.
        version: Format version of the manifest.
        written: What was encoded, if this is a check that readers accept it. Those of its tables that were decoded
            before, from the same bytes, are not decoded again.
        where: The manifest, for errors.

    Raises:
        MalformedError: Lengths, indexes or sums contradict each other.
    """
    reader = Reader(section, "a manifest's logical section", where)
    record_nbytes, tree_nbytes, tensors_nbytes, storage_count, piece_count, chunk_count = _HEAD.unpack(
        reader.take(_HEAD.size)
    )
    record = reader.take(record_nbytes)
    tree_bytes = reader.take(tree_nbytes)
    tensor_rows = reader.take(tensors_nbytes)
    storage_rows = reader.take(_STORAGE.size * storage_count + PIECE.size * piece_count)
    chunk_rows = reader.take(_CHUNK.size * chunk_count)
    losses = reader.take(reader.remaining) if version >= LOSSY_VERSION else memoryview(b"")
    reader.done()
    tensors = _decoded(tensor_rows, partial(_tensors, where=where), None if written is None else written.tensors)
    tree = decode_tree(tree_bytes, tensor_count=len(tensors), where=where)
    split = partial(_storages, count=storage_count, where=where)
    try:
        storages = _decoded(storage_rows, split, None if written is None else written.storages)
        chunks = tuple(
            [
                ChunkSpec(chunk_id, nbytes, width, _IS_FLOAT[flag])
                for chunk_id, nbytes, width, flag in _CHUNK.iter_unpack(chunk_rows)
            ]
        )
    except KeyError:
        raise MalformedError("reserved fields of a storage or chunk are set", where=where) from None
    logical = Logical(tree, tensors, storages, chunks, decode_losses(losses, where=where))
    check_logical(logical, limits, where)
    return record, logical


def _decoded(
    content: memoryview, decode: Callable[[memoryview], Iterable[Row]], written: tuple[Row, ...] | None
) -> tuple[Row, ...]:
    """Return the rows of a table; those that were written, if a reader has decoded them from the same bytes before.

    Raises:
        MalformedError: They are not those that were written.
    """
    if not isinstance(written, Table):
        return tuple(decode(content))
    checksum = xxh3_64(content)
    if checksum != written.decoded_xxh3:
        if tuple(decode(content)) != written:
            # The next commit encodes them again.
            written.encoded = None
            raise MalformedError(
                "a table of a manifest does not decode to the rows that were encoded", todo="test this machine's memory"
            )
        written.decoded_xxh3 = checksum
    return written


def _tensors(content: memoryview, where: object) -> Iterator[TensorSpec]:
    return map(tensor_of, decode_stored(content, list[TensorRow], where=where))


def tensor_of(row: TensorRow) -> TensorSpec:
    """Return the tensor of a row of the table."""
    return TensorSpec(
        row.library, row.dtype, row.shape, row.strides, row.storage, row.offset, row.is_parameter, row.requires_grad
    )


def _storages(content: memoryview, count: int, where: object) -> Iterator[StorageSpec]:
    storage_rows, piece_rows = content[: _STORAGE.size * count], content[_STORAGE.size * count :]
    begin = 0
    for nbytes, piece_count, width, flag in _STORAGE.iter_unpack(storage_rows):
        end = begin + PIECE.size * piece_count
        if end > len(piece_rows):
            raise MalformedError("the storages of a manifest need more pieces than it lists", where=where)
        yield StorageSpec(nbytes, width, _IS_FLOAT[flag], pieces_of_rows(piece_rows[begin:end]))
        begin = end
    if begin != len(piece_rows):
        raise MalformedError("a manifest lists a piece without a storage", where=where)


def check_logical(logical: Logical, limits: Limits, where: object) -> None:
    """Check the section, before writing and after reading.

    Raises:
        MalformedError: The pieces of a storage do not add up to it, or a tensor does not fit into its storage.
    """
    _check_chunks(logical.chunks, limits, where)
    _check_storages(logical.storages, logical.chunks, where)
    _check_tensors(logical, where)
    check_losses(logical.losses, logical.storages, where)


def _check_tensors(logical: Logical, where: object) -> None:
    table = logical.tensors if isinstance(logical.tensors, Table) else None
    if table is not None and table.fits is logical.storages:
        return
    check_tensors(logical.tensors, [storage.nbytes for storage in logical.storages], where)
    if table is not None:
        table.fits = logical.storages


def check_tensors(tensors: Iterable[TensorSpec], storages: Sequence[int], where: object) -> None:
    """Check that every tensor is within its storage; ``storages`` are the lengths of all storages.

    Raises:
        MalformedError: It is not, or its storage does not exist.
    """
    # A model has few distinct layouts, each repeated by many tensors.
    checked: set[tuple[object, ...]] = set()
    for tensor in tensors:
        if not 0 <= tensor.storage < len(storages):
            raise MalformedError("a tensor refers to a storage that does not exist", where=where)
        nbytes = storages[tensor.storage]
        layout = (tensor.library, tensor.dtype, tensor.shape, tensor.strides, tensor.offset, nbytes)
        if layout not in checked:
            check_layout(tensor, itemsize_of(tensor.library, tensor.dtype) or 0, nbytes)
            checked.add(layout)


def _check_chunks(chunks: Sequence[ChunkSpec], limits: Limits, where: object) -> None:
    nbytes_max = limits.chunk_nbytes_max
    for chunk in chunks:
        if not 0 < chunk.nbytes <= nbytes_max or chunk.element_width not in ELEMENT_WIDTHS:
            raise MalformedError(
                "a chunk is over the size limit, is empty, or has an invalid element width", where=where
            )
    ids = {chunk.chunk_id for chunk in chunks}
    if len(ids) != len(chunks) or NO_BASE in ids:
        raise MalformedError("a manifest lists a chunk twice", where=where)


def _check_storages(storages: Sequence[StorageSpec], chunks: Sequence[ChunkSpec], where: object) -> None:
    lengths = [chunk.nbytes for chunk in chunks]
    if isinstance(storages, Table) and storages.fits == lengths:
        return
    is_used = bytearray(len(chunks))
    has_rows = any(isinstance(storage.pieces, PieceRows) for storage in storages)
    check_rows = _rows_checker(lengths, is_used, where) if has_rows else None
    for storage in storages:
        if check_rows is not None and isinstance(storage.pieces, PieceRows):
            total = check_rows(storage.pieces)
        else:
            total = 0
            for piece in storage.pieces:
                index = piece.chunk
                if not 0 <= index < len(lengths) or not 0 < piece.nbytes <= lengths[index] - piece.offset:
                    raise MalformedError("a piece of a storage reaches beyond its chunk", where=where)
                is_used[index] = 1
                total += piece.nbytes
        if total != storage.nbytes or storage.element_width not in ELEMENT_WIDTHS:
            raise MalformedError("the pieces of a storage do not add up to it", where=where)
    if not all(is_used):
        raise MalformedError("a manifest lists a chunk that no storage needs", where=where)
    if isinstance(storages, Table):
        storages.fits = lengths


def _rows_checker(lengths: Sequence[int], is_used: bytearray, where: object) -> Callable[[PieceRows], int]:
    import numpy as np

    table, marks = np.array(lengths, np.uint64), np.frombuffer(is_used, np.uint8)
    return lambda pieces: pieces.checked_nbytes(table, marks, where)


def itemsize_of(library: str, dtype: str) -> int | None:
    """Return the bytes of one element; None if only the library knows."""
    if library == "torch":
        return TORCH_ITEMSIZES.get(dtype)
    if library == "bytes":
        return 1
    if found := _NUMPY_DTYPE.fullmatch(dtype):
        return int(found[2])
    if found := _NUMPY_TEXT.fullmatch(dtype):
        return 4 * int(found[1])
    return None


def distinct_chunks(
    chunks: Sequence[ChunkSpec], storages: Sequence[StorageSpec]
) -> tuple[tuple[ChunkSpec, ...], tuple[StorageSpec, ...]]:
    """Return the chunks without repetitions, and the storages with renumbered pieces."""
    index_of: dict[bytes, int] = {}
    distinct: list[ChunkSpec] = []
    numbers: list[int] = []
    for chunk in chunks:
        number = index_of.setdefault(chunk.chunk_id, len(distinct))
        if number == len(distinct):
            distinct.append(chunk)
        numbers.append(number)
    if len(distinct) == len(chunks):
        return tuple(chunks), storages if isinstance(storages, Table) else tuple(storages)
    renumbered = [
        StorageSpec(
            storage.nbytes,
            storage.element_width,
            storage.is_float,
            tuple([Piece(numbers[piece.chunk], piece.offset, piece.nbytes) for piece in storage.pieces]),
        )
        for storage in storages
    ]
    return tuple(distinct), tuple(renumbered)
