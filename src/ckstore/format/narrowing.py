"""Narrow storages to the bytes that some tensors view, so that a restore reads no others.

Invariants:
- Tensors that share bytes still share them. Everything else stays unchanged: new storages are appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckstore.config import KIB
from ckstore.format.logical import itemsize_of
from ckstore.format.piece_rows import PieceRows
from ckstore.format.tensors import Piece, StorageSpec, TensorSpec, byte_strides_of, extent_of

_GAP_NBYTES = 64 * KIB
"""Views with a gap of at most this length between them stay in one storage."""

_ALIGN_NBYTES = 64
"""The part starts at a multiple of this, which preserves the alignment of elements."""

Window = tuple[int, int]


def narrow(
    tensors: Sequence[TensorSpec], storages: Sequence[StorageSpec], chosen: Iterable[int], *, is_exact: bool = False
) -> tuple[list[TensorSpec], list[StorageSpec]]:
    """Return tensors and storages in which the parts of storages that some tensors view are storages of their own.

    Args:
        tensors: The tensors of a checkpoint.
        storages: Its storages.
        chosen: Indices of the tensors that are needed.
        is_exact: Begin each part with the first byte that is viewed, and join only parts that overlap, so that a live
            tensor can be its destination.
    """
    views: dict[int, dict[int, Window]] = {}
    for index in chosen:
        spec = tensors[index]
        views.setdefault(spec.storage, {})[index] = _extent(spec, storages[spec.storage])
    made, parts = list(tensors), list(storages)
    for number, extents in views.items():
        whole = storages[number]
        for lo, hi in _windows(extents.values(), *((-1, 1) if is_exact else (_GAP_NBYTES, _ALIGN_NBYTES))):
            if hi - lo == whole.nbytes:
                break
            for index, (begin, _) in extents.items():
                if lo <= begin < hi:
                    made[index] = replace(made[index], storage=len(parts), offset=made[index].offset - lo)
            parts.append(replace(whole, nbytes=hi - lo, pieces=tuple(pieces_between(whole.pieces, lo, hi))))
    return made, parts


def _extent(spec: TensorSpec, storage: StorageSpec) -> Window:
    """Return the byte range of its storage that a tensor views; all bytes if only its library knows the itemsize."""
    itemsize = itemsize_of(spec.library, spec.dtype)
    if not itemsize:
        return 0, storage.nbytes
    lo, hi = extent_of(spec.shape, byte_strides_of(spec.library, spec.strides, itemsize), itemsize)
    return spec.offset + lo, spec.offset + hi


def _windows(extents: Iterable[Window], gap_nbytes: int, align_nbytes: int) -> Iterator[Window]:
    """Yield the parts of a storage that some views need; parts that are close together are joined."""
    begin, end = -1, -1
    for lo, hi in sorted(extents):
        if begin >= 0 and lo <= end + gap_nbytes:
            end = max(end, hi)
            continue
        if begin >= 0:
            yield begin, end
        begin, end = lo - lo % align_nbytes, hi
    if begin >= 0:
        yield begin, end


def pieces_between(pieces: Sequence[Piece], lo: int, hi: int) -> Iterator[Piece]:
    """Yield the pieces of bytes ``lo`` to ``hi``."""
    if isinstance(pieces, PieceRows):
        yield from pieces.between(lo, hi)
        return
    at = 0
    for piece in pieces:
        begin, end = max(lo, at), min(hi, at + piece.nbytes)
        if begin < end:
            yield Piece(piece.chunk, piece.offset + begin - at, end - begin)
        at += piece.nbytes
