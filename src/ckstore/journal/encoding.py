"""A point on its way from the trainer to its record: a draft and arrays, then body and frames.

The trainer makes the draft and stages the arrays. The process that writes the journal chooses a form for each gradient,
encodes everything, and has the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckstore.config import Compression, Limits
from ckstore.errors import MalformedError
from ckstore.format.journal import structure_of
from ckstore.format.logical import tensor_of
from ckstore.format.points import Gradient, OptimizerFacts, Point, PointStorage, Source, Step, encode_point
from ckstore.format.records import Count, RecordPlace, ShortText, TensorRow, decode_inner, encode_inner
from ckstore.format.tree import decode_tree
from ckstore.journal.blobs import BlobWriter, EncodedFrame
from ckstore.journal.gradients import SeenGradient, store_gradient, word_type_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FACTORS_MAX = 8
"""Factors of gradients that are remembered for the next point. Runs have one, or one for each optimizer."""

_SEARCH_EVERY = 16
"""Points until a factor is searched for again, at least, for a parameter whose gradient has none. Gradients that are
sums in float32 never have one, as those of normalizations under autocast, and a search takes as long as coding one
million numbers."""


class ArrayPlace(NamedTuple):
    """Where the bytes of an array are: a staged storage, an offset and a length."""

    storage: Count
    offset: Count
    nbytes: Count


class DraftStorage(NamedTuple):
    """A storage of the state.

    Args:
        nbytes: Its length.
        checksum: xxh3-64 or word sum of its bytes.
        element_width: Bytes of an element.
        is_float: Its elements are floating-point numbers.
        source: Where its bytes are from, as in ``format.points.SOURCES``.
        array: Index of the array with its bytes; None for another source than ``blob``.
        is_word_sum: Which of the two its checksum is.
    """

    nbytes: Count
    checksum: int
    element_width: Count
    is_float: bool
    source: Source
    array: Count | None
    is_word_sum: bool = False


class DraftGradient(NamedTuple):
    """A gradient: its parameter, torch's name of its type, its shape, its arrays, its number of sparse dimensions."""

    parameter: Count
    dtype: ShortText
    shape: tuple[Count, ...]
    values: Count
    indices: Count | None
    sparse_dims: Count = 0


class DraftStep(NamedTuple):
    """A step: its optimizer, the encoded tree of its hyper-parameters, and its gradients."""

    optimizer: Count
    groups: bytes
    gradients: list[DraftGradient]


class DraftOptimizer(NamedTuple):
    """An optimizer; see ``format.points.OptimizerFacts``. ``defaults`` is an encoded tree."""

    kind: ShortText
    defaults: bytes
    groups: list[list[Count]]
    state: list[dict[ShortText, Count]]


class PointDraft(NamedTuple):
    """A point without the bytes of its arrays.

    Args:
        metrics: Numbers to find it by.
        tree: The encoded tree of the state.
        tensors: Its tensors.
        storages: Its storages.
        steps: The steps since the point before.
        optimizers: The optimizers; None: those of the point before.
        factors: Factors that gradients may be multiplied by, as float32, little-endian: those that the trainer knows.
        environment: Texts for people, for the header of a new segment.
        arrays: Where the bytes of each array are staged.
        begins_chain: Nothing before it belongs to it: the state of a keyframe, or of a process that has none.
        begins_segment: It goes to a new segment of its chain.
        continues: The record of another process that it continues.
        late: Storages whose checksum is not in their row but in the last array, 8 bytes each.
    """

    metrics: dict[str, float]
    tree: bytes
    tensors: list[TensorRow]
    storages: list[DraftStorage]
    steps: list[DraftStep]
    optimizers: list[DraftOptimizer] | None
    factors: list[bytes]
    environment: dict[ShortText, ShortText]
    arrays: list[ArrayPlace]
    begins_chain: bool = False
    begins_segment: bool = False
    continues: RecordPlace | None = None
    late: tuple[Count, ...] = ()

    def encode(self) -> bytes:
        """Return the draft as bytes."""
        return encode_inner(self)

    @classmethod
    def decode(cls, content: bytes) -> PointDraft:
        """Return the draft of bytes.

        Raises:
            MalformedError: They are not those of a draft.
        """
        return decode_inner(content, cls, where="a point that the trainer has staged")


class EncodedPoint(NamedTuple):
    """A record without its place: its body, its frames, and the structure of its state."""

    body: bytes
    frames: list[EncodedFrame]
    structure: bytes


class PointEncoder:
    """Encodes the points of one journal, one after the other. It remembers the factors of gradients.

    Args:
        limits: Limits of the store.
        compression: How much time coding may take.
    """

    def __init__(self, limits: Limits, compression: Compression) -> None:
        self._limits = limits
        self._compression = compression
        self._factors: list[np.float32] = []
        self._point_count = 0
        self._next_searches: dict[tuple[int, int], int] = {}
        """For an optimizer and a parameter whose gradient has no factor: the point that searches for one again."""

    def encode(self, draft: PointDraft, arrays: Sequence[NDArray[np.uint8]], *, thread_count: int) -> EncodedPoint:
        """Return the record of a point.

        Args:
            draft: The point.
            arrays: The bytes of its arrays. They must not change meanwhile.
            thread_count: Threads that may encode.

        Raises:
            MalformedError: The draft contradicts itself.
        """
        writer = BlobWriter(self._limits)
        self._point_count += 1
        known = [np.frombuffer(factor, np.float32)[0] for factor in draft.factors]
        steps = [
            Step(
                step.optimizer,
                decode_tree(step.groups, tensor_count=0),
                tuple(self._stored(step.optimizer, each, arrays, writer, known) for each in step.gradients),
            )
            for step in draft.steps
        ]
        storages = [_stored_storage(storage, arrays, writer) for storage in _with_checksums(draft, arrays)]
        blobs, frames = writer.encode(self._compression, thread_count=thread_count)
        tensors = tuple(map(tensor_of, draft.tensors))
        rows = draft.optimizers
        optimizers = None if rows is None else tuple(_facts_of(each, len(tensors)) for each in rows)
        tree = decode_tree(draft.tree, tensor_count=len(tensors))
        point = Point(draft.metrics, tree, tensors, tuple(storages), blobs, tuple(steps), optimizers)
        structure = structure_of(draft.tree, encode_inner(draft.tensors))
        return EncodedPoint(encode_point(point, limits=self._limits), frames, structure)

    def _stored(
        self,
        optimizer: int,
        gradient: DraftGradient,
        arrays: Sequence[NDArray[np.uint8]],
        writer: BlobWriter,
        known: Sequence[np.float32],
    ) -> Gradient:
        values = _array(arrays, gradient.values).view(word_type_of(gradient.dtype))
        indices = None
        if gradient.indices is not None:
            if not 0 < gradient.sparse_dims <= len(gradient.shape):
                raise MalformedError("a staged gradient has impossible sparse dimensions")
            indices = _array(arrays, gradient.indices).view(np.int64).reshape(gradient.sparse_dims, -1)
        elif values.size != int(np.prod(gradient.shape, dtype=np.int64)):
            raise MalformedError("a staged gradient has another number of elements than its shape")
        seen = SeenGradient(gradient.parameter, gradient.dtype, gradient.shape, values, indices)
        place, count = (optimizer, gradient.parameter), self._point_count
        searches = count >= self._next_searches.get(place, 0)
        stored = store_gradient(seen, writer, (*known, *self._factors), searches=searches)
        if stored.kind == "plain" and searches:
            # Not all of them in the same point.
            self._next_searches[place] = count + _SEARCH_EVERY + gradient.parameter % _SEARCH_EVERY
        if stored.factor is not None:
            found = np.frombuffer(stored.factor, np.float32)[0]
            # The last one first: all gradients of a step usually have the same.
            self._factors = [found, *(factor for factor in self._factors if factor != found)][:_FACTORS_MAX]
        return stored


def _array(arrays: Sequence[NDArray[np.uint8]], index: int) -> NDArray[np.uint8]:
    if index >= len(arrays):
        raise MalformedError("a point needs an array that was not staged")
    return arrays[index]


def _with_checksums(draft: PointDraft, arrays: Sequence[NDArray[np.uint8]]) -> Sequence[DraftStorage]:
    if not draft.late:
        return draft.storages
    checksums = _array(arrays, len(draft.arrays) - 1).view(np.uint64).tolist()
    if len(checksums) != len(draft.late) or max(draft.late) >= len(draft.storages):
        raise MalformedError("a point was staged without the checksums of all its storages")
    storages = list(draft.storages)
    for index, checksum in zip(draft.late, checksums, strict=True):
        storages[index] = storages[index]._replace(checksum=checksum)
    return storages


def _stored_storage(storage: DraftStorage, arrays: Sequence[NDArray[np.uint8]], writer: BlobWriter) -> PointStorage:
    width, is_float = storage.element_width, storage.is_float
    span = None
    if storage.array is not None:
        plain = _array(arrays, storage.array)
        if plain.size != storage.nbytes:
            raise MalformedError("a staged storage has another length than its row")
        span = writer.add(plain, element_width=width, is_float=is_float)
    return PointStorage(storage.nbytes, storage.checksum, width, is_float, storage.source, span, storage.is_word_sum)


def _facts_of(draft: DraftOptimizer, tensor_count: int) -> OptimizerFacts:
    defaults = decode_tree(draft.defaults, tensor_count=tensor_count)
    return OptimizerFacts(draft.kind, defaults, tuple(map(tuple, draft.groups)), tuple(draft.state))
