"""Of long storages that a selection views in part, only that part: the manifest as if it were stored alone.

Trainers keep all parameters in one flat buffer and every tensor as a view of it. Who wants one of them back wants
neither to read nor to hold the others.

Invariants:
- Tensors of the selection that share a byte share it again.
- Everything else in the manifest stays as it is, so that errors and losses are told of the right places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckstore.config import KIB
from ckstore.format.logical import itemsize_of
from ckstore.format.manifest import Manifest
from ckstore.tensor import Piece, StorageSpec, TensorSpec, byte_strides_of, extent_of
from ckstore.tree import Selection, tensors_of

_GAP_NBYTES = 64 * KIB
"""Views with a gap no wider than this between them stay in one storage."""

_ALIGN_NBYTES = 64
"""A part begins at a multiple of this, so that elements of every size lie as they lay."""

Window = tuple[int, int]


def narrowed(manifest: Manifest, only: str | Sequence[str]) -> Manifest:
    """Return the manifest with storages of their own for what a selection views of longer ones."""
    chosen = Selection(only, manifest.tree).prune(manifest.tree)
    views: dict[int, dict[int, Window]] = {}
    for index in () if chosen is None else tensors_of(chosen):
        spec = manifest.tensors[index]
        views.setdefault(spec.storage, {})[index] = _extent(spec, manifest.storages[spec.storage])
    tensors, storages = list(manifest.tensors), list(manifest.storages)
    for number, extents in views.items():
        whole = manifest.storages[number]
        for lo, hi in _windows(extents.values()):
            if hi - lo == whole.nbytes:
                break
            for index, (begin, _) in extents.items():
                if lo <= begin < hi:
                    tensors[index] = replace(tensors[index], storage=len(storages), offset=tensors[index].offset - lo)
            storages.append(replace(whole, nbytes=hi - lo, pieces=tuple(_cut(whole.pieces, lo, hi))))
    return replace(manifest, tensors=tuple(tensors), storages=tuple(storages))


def _extent(spec: TensorSpec, storage: StorageSpec) -> Window:
    """Return the bytes of its storage that a tensor views; all of them where only its library can tell."""
    itemsize = itemsize_of(spec.library, spec.dtype)
    if not itemsize:
        return 0, storage.nbytes
    lo, hi = extent_of(spec.shape, byte_strides_of(spec.library, spec.strides, itemsize), itemsize)
    return spec.offset + lo, spec.offset + hi


def _windows(extents: Iterable[Window]) -> Iterator[Window]:
    """Yield the parts of a storage that some views need, joined where they lie close together."""
    begin, end = -1, -1
    for lo, hi in sorted(extents):
        if begin >= 0 and lo <= end + _GAP_NBYTES:
            end = max(end, hi)
            continue
        if begin >= 0:
            yield begin, end
        begin, end = lo - lo % _ALIGN_NBYTES, hi
    if begin >= 0:
        yield begin, end


def _cut(pieces: Sequence[Piece], lo: int, hi: int) -> Iterator[Piece]:
    """Yield the pieces of bytes ``lo`` to ``hi``."""
    at = 0
    for piece in pieces:
        begin, end = max(lo, at), min(hi, at + piece.nbytes)
        if begin < end:
            yield Piece(piece.chunk, piece.offset + begin - at, end - begin)
        at += piece.nbytes
