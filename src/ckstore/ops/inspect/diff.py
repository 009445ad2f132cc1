"""Compare two checkpoints, tensor by tensor. Tensors are read piece by piece.

Invariants:
- Tensors with the same chunk ids are equal, and are not read.
- A tensor whose bits differ is never reported as equal, whatever its elements are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ckstore.config import MIB
from ckstore.display import repr_of_summary
from ckstore.errors import NotFoundError
from ckstore.format.logical import itemsize_of
from ckstore.format.manifest import Manifest
from ckstore.format.many_ranks import plain_manifest
from ckstore.format.tensors import TensorSpec, byte_strides_of, count_of, extent_of
from ckstore.format.tiles import Box, views_of
from ckstore.format.tree import Node, Selection, TensorNode, ValueNode, format_path, leaves_of
from ckstore.ops.stored_checkpoint import StoredState, stored_state
from ckstore.quant.error_stats import Distance, distance_of, floats_of
from ckstore.results import Info
from ckstore.state.tensors import HostStorage
from ckstore.state.values import decode_plain
from ckstore.store.replay_bases import require_stored
from ckstore.store.repository import Repository

Status = Literal["equal", "changed", "added", "removed", "other kind"]

PIECE_NBYTES = 2 * MIB
"""Bytes of each side that are compared at a time."""

_DTYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "complex64": "<c8",
    "complex128": "<c16",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "<i1",
    "uint8": "<u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "<u1",
}
"""The numpy dtype for each torch dtype. Others are compared bit by bit, without a distance."""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How one tensor differs.

    Attributes:
        path: Its dotted path.
        status: ``"equal"`` bit for bit, ``"changed"``, ``"added"`` (only in the second), ``"removed"``, or ``"other
            kind"``: dtype, shape or library differ.
        dtype: Its element type; both, with an arrow, if they differ.
        shape: Its shape in the first checkpoint, or in the second if only that has it.
        elements: Number of elements.
        changed_count: Elements whose bits differ.
        relative: RMS of the difference relative to the RMS of the first; None if the elements have no distance.
        rms: RMS of the difference.
        max_abs: Largest absolute difference of an element.
    """

    path: str
    status: Status
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed_count: int = 0
    relative: float | None = None
    rms: float | None = None
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How one plain value differs. Equal values are not listed."""

    path: str
    status: Status
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Diff:
    """How the second of two checkpoints differs from the first.

    Attributes:
        first: The first checkpoint.
        second: The second checkpoint.
        tensors: Every tensor of both, in the order of the first.
        values: Plain values that differ.
        value_count: Number of plain values in either.
        bytes_read: Plain bytes that were compared.
    """

    first: Info
    second: Info
    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]
    value_count: int
    bytes_read: int

    __repr__ = repr_of_summary

    @property
    def is_equal(self) -> bool:
        """Whether both are equal, bit for bit."""
        return not self.values and all(tensor.status == "equal" for tensor in self.tensors)


def diff_of(
    repository: Repository,
    manifests: tuple[Manifest, Manifest],
    infos: tuple[Info, Info],
    *,
    only: str | Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Diff:
    """Compare two checkpoints.

    Args:
        repository: The store.
        manifests: The two checkpoints.
        infos: Facts about them.
        only: Globs over dotted paths; None: everything.
        on_progress: Called with plain bytes done and the total.

    Raises:
        NotFoundError: Nothing matches ``only``.
        CorruptError: Part of them is damaged.
    """
    for manifest in manifests:
        require_stored(manifest, repository.backend.root, what="compared")
    plain = plain_manifest(manifests[0]), plain_manifest(manifests[1])
    selection = None if only is None else Selection(only, *(manifest.tree for manifest in plain))
    chosen = [_leaves(manifest, selection) for manifest in plain]
    if only is not None and not any(chosen):
        raise NotFoundError(
            "no leaf of either checkpoint matches", where=repr(only), todo="list paths with `ckstore show`"
        )
    pairs = {path: (chosen[0].get(path), chosen[1].get(path)) for path in (*chosen[0], *chosen[1])}
    with stored_state(repository, plain[0]) as one, stored_state(repository, plain[1]) as other:
        comparison = _Comparison(one, other)
        total = sum(comparison.nbytes(pair) for pair in pairs.values())
        tensors: list[TensorDiff] = []
        values: list[ValueDiff] = []
        done = 0
        for path, pair in pairs.items():
            if any(isinstance(leaf, TensorNode) for leaf in pair):
                tensors.append(comparison.tensor(format_path(path), *pair))
            elif pair[0] != pair[1]:
                values.append(_value(format_path(path), *pair))
            done += comparison.nbytes(pair)
            if on_progress is not None:
                on_progress(done, total)
    value_count = len(pairs) - len(tensors)
    return Diff(*infos, tuple(tensors), tuple(values), value_count, comparison.bytes_read)


Leaf = ValueNode | TensorNode
Pair = tuple["Leaf | None", "Leaf | None"]


def _leaves(manifest: Manifest, selection: Selection | None) -> dict[Any, Leaf]:
    tree: Node | None = manifest.tree if selection is None else selection.prune(manifest.tree)
    # Keys keep their type: 1 and True are equal to Python, but are different keys of a checkpoint.
    return {} if tree is None else dict(leaves_of(tree))


def _value(path: str, one: Leaf | None, other: Leaf | None) -> ValueDiff:
    status: Status = "added" if one is None else "removed" if other is None else "changed"
    return ValueDiff(path, status, _text_of(one), _text_of(other))


def _text_of(leaf: Leaf | None) -> str:
    if leaf is None:
        return ""
    assert isinstance(leaf, ValueNode)
    try:
        return repr(decode_plain(leaf))[:200]
    except Exception:
        # A value of a library that is not installed: show its stored form.
        return f"{leaf.type} {leaf.value!r}"[:200]


class _Comparison:
    """Two stored states to compare."""

    def __init__(self, one: StoredState, other: StoredState) -> None:
        self.bytes_read = 0
        self._states = one, other

    def nbytes(self, pair: Pair) -> int:
        """Return the plain bytes of a pair of leaves, for progress."""
        for leaf, state in zip(pair, self._states, strict=True):
            if isinstance(leaf, TensorNode):
                return state.manifest.storages[state.manifest.tensors[leaf.tensor].storage].nbytes
        return 0

    def tensor(self, path: str, one: Leaf | None, other: Leaf | None) -> TensorDiff:
        """Compare one tensor."""
        specs = [
            state.manifest.tensors[leaf.tensor] if isinstance(leaf, TensorNode) else None
            for leaf, state in zip((one, other), self._states, strict=True)
        ]
        first, second = specs
        shown = first if first is not None else second
        assert shown is not None
        elements = count_of(shown.shape)
        if first is None or second is None:
            status: Status = "added" if one is None else "removed" if other is None else "other kind"
            return TensorDiff(path, status, shown.dtype, shown.shape, elements)
        if (first.library, first.dtype, first.shape) != (second.library, second.dtype, second.shape):
            dtype = first.dtype if first.dtype == second.dtype else f"{first.dtype} -> {second.dtype}"
            return TensorDiff(path, "other kind", dtype, first.shape, elements)
        if self._is_same(first, second):
            distance, is_measured = Distance(count=elements), True
        else:
            distance, is_measured = self._distance(first, second)
        status = "changed" if distance.changed_count else "equal"
        if not is_measured:
            return TensorDiff(path, status, shown.dtype, shown.shape, elements, distance.changed_count)
        measures = (distance.changed_count, distance.relative, distance.rms, distance.max_abs)
        return TensorDiff(path, status, shown.dtype, shown.shape, elements, *measures)

    def _is_same(self, first: TensorSpec, second: TensorSpec) -> bool:
        """Return whether both have the same chunk ids."""
        if (first.strides, first.offset, first.cuts) != (second.strides, second.offset, second.cuts):
            return False
        pieces = [
            [
                (state.manifest.chunks[piece.chunk].chunk_id, piece.offset, piece.nbytes)
                for piece in state.manifest.storages[spec.storage].pieces
            ]
            for spec, state in zip((first, second), self._states, strict=True)
        ]
        return pieces[0] == pieces[1]

    def _distance(self, first: TensorSpec, second: TensorSpec) -> tuple[Distance, bool]:
        """Return the distance, and whether the elements are numbers that have one."""
        total, is_measured = Distance(), True
        for one, other in zip(self._values(0, first), self._values(1, second), strict=True):
            is_measured = is_measured and one.dtype.kind != "V"
            total += distance_of(one, other) if one.dtype.kind != "V" else _bits_apart(one, other)
        return total, is_measured

    def _values(self, side: int, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        """Yield the elements of a tensor in order. Both sides yield pieces of the same length."""
        state = self._states[side]
        storage = state.storages[spec.storage]
        itemsize = _itemsize(spec, storage.nbytes)
        strides = byte_strides_of(spec.library, spec.strides, itemsize)
        if 0 in spec.shape:
            return
        if spec.cuts:
            yield from self._values_in_tiles(storage, spec, itemsize)
            return
        if _is_contiguous(spec.shape, strides, itemsize):
            end = spec.offset + count_of(spec.shape) * itemsize
            step = max(1, PIECE_NBYTES // itemsize) * itemsize
            for begin in range(spec.offset, end, step):
                plain = storage.read(begin, min(end, begin + step))
                self.bytes_read += len(plain)
                yield _elements(plain, spec, itemsize)
            return
        low, high = extent_of(spec.shape, strides, itemsize)
        plain = storage.read(spec.offset + low, spec.offset + high)
        self.bytes_read += len(plain)
        raw = np.ndarray(spec.shape, f"V{itemsize}", plain, -low, strides)
        yield from _pieces_of(raw, spec, itemsize)

    def _values_in_tiles(self, storage: HostStorage, spec: TensorSpec, itemsize: int) -> Iterator[NDArray[Any]]:
        """Yield the elements of a tensor in tiles, which is read whole."""
        plain = storage.read(spec.offset, spec.offset + count_of(spec.shape) * itemsize)
        self.bytes_read += len(plain)
        whole = np.empty(spec.shape, f"V{itemsize}")
        for view in views_of(spec.shape, itemsize, spec.cuts, Box((0,) * len(spec.shape), spec.shape)):
            steps = tuple(step * itemsize for step in view.strides)
            block = tuple(slice(begin, begin + count) for begin, count in zip(*view.box, strict=True))
            whole[block] = np.ndarray(view.box.sizes, whole.dtype, plain, view.offset, steps)
        yield from _pieces_of(whole, spec, itemsize)


def _pieces_of(raw: NDArray[np.void], spec: TensorSpec, itemsize: int) -> Iterator[NDArray[Any]]:
    flat = np.ascontiguousarray(raw).reshape(-1)
    count = max(1, PIECE_NBYTES // itemsize)
    for begin in range(0, len(flat), count):
        yield _elements(memoryview(flat[begin : begin + count].tobytes()), spec, itemsize)


def _itemsize(spec: TensorSpec, storage_nbytes: int) -> int:
    found = itemsize_of(spec.library, spec.dtype)
    if found:
        return found
    # The dtype of a numpy record array is a description. Derive the size from the storage that it fills.
    return max(1, storage_nbytes // max(1, count_of(spec.shape)))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    reach = itemsize
    for length, step in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and step != reach:
            return False
        reach *= length
    return True


def _elements(plain: memoryview, spec: TensorSpec, itemsize: int) -> NDArray[Any]:
    if spec.library == "torch" and spec.dtype == "bfloat16":
        return floats_of(plain, "bfloat16")
    name = _DTYPES.get(spec.dtype) if spec.library == "torch" else spec.dtype
    try:
        dtype = np.dtype(name) if name else np.dtype(f"V{itemsize}")
    except (TypeError, ValueError):
        dtype = np.dtype(f"V{itemsize}")
    if dtype.kind not in "biufc" or dtype.itemsize != itemsize:
        dtype = np.dtype(f"V{itemsize}")
    values = np.frombuffer(plain, dtype)
    return values.view(np.uint8) if dtype.kind == "b" else values


def _bits_apart(one: NDArray[Any], other: NDArray[Any]) -> Distance:
    width = one.dtype.itemsize
    bits = one.view(np.uint8).reshape(-1, width) != other.view(np.uint8).reshape(-1, width)
    return Distance(count=len(one), changed_count=int(np.count_nonzero(bits.any(axis=1))))
