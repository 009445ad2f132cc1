"""The body of a journal's record: a state whose parameters are computed by steps, and what these steps need.

What is stored is in blobs: concatenations of chunks of one element type, so that many small tensors share chunks. The
frames of the record are the chunks of all blobs, in order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckstore.config import Limits
from ckstore.errors import MalformedError
from ckstore.format.frame import ELEMENT_WIDTHS
from ckstore.format.logical import TORCH_ITEMSIZES, check_tensors, row_of, tensor_of
from ckstore.format.records import (
    BlobRow,
    GradientRow,
    OptimizerRow,
    PointRecord,
    StepRow,
    decode_inner,
    decode_stored,
    encode_inner,
)
from ckstore.format.tensors import RANK_MAX, TensorSpec
from ckstore.format.tree import DictNode, ListNode, Node, check_tree, decode_tree, encode_tree, tensors_of
from ckstore.hashing import DIGEST_NBYTES, NO_BASE, ChunkId

Source = Literal["steps", "blob", "before"]
SOURCES: tuple[Source, ...] = ("steps", "blob", "before")
"""Where the bytes of a storage are from: the steps compute them, a blob has them, or they are those of the point
before; in the first record of a chain, those of its keyframe. Numbered in this order on disk."""

GradientKind = Literal["plain", "bf16", "fp16", "coo"]
NARROW_KINDS = ("bf16", "fp16")
GRADIENT_KINDS = ("plain", *NARROW_KINDS, "coo")

_STORAGE = struct.Struct("<QQQIBBBB")
_FACTOR_NBYTES = 4
_INDEX_NBYTES = 8
_DEFAULT_LIMITS = Limits()


class Span(NamedTuple):
    """Bytes of a blob."""

    blob: int
    offset: int
    nbytes: int


class PointStorage(NamedTuple):
    """A storage of a point.

    Args:
        nbytes: Its length.
        checksum: Of its bytes: their xxh3-64, or their word sum if a device has computed it.
        element_width: Bytes of an element.
        is_float: Its elements are floating-point numbers.
        source: Where its bytes are from.
        span: Where a blob has them; None for another source.
        is_word_sum: Which of the two its checksum is.
    """

    nbytes: int
    checksum: int
    element_width: int
    is_float: bool
    source: Source
    span: Span | None
    is_word_sum: bool = False


class Blob(NamedTuple):
    """A concatenation of chunks, each an id and a length."""

    element_width: int
    is_float: bool
    chunks: tuple[tuple[ChunkId, int], ...]

    @property
    def nbytes(self) -> int:
        """Its length."""
        return sum(nbytes for _, nbytes in self.chunks)


class Gradient(NamedTuple):
    """What an optimizer saw as the gradient of one parameter.

    Args:
        parameter: Index of the parameter, counted over all groups of the optimizer.
        dtype: torch's name of the element type.
        shape: Its shape.
        kind: How its elements follow from ``values``.
        factor: A float32, little-endian, by which each number of a narrow kind is multiplied; None: by nothing.
        rows: A bit for each index of the first dimension: whether it is stored; None: all are.
        values: The stored numbers.
        indices: Indices of the listed parts of a sparse gradient; None for a dense one.
        sparse_dims: How many dimensions an index has; the others are whole in each part. 0 for a dense gradient.
    """

    parameter: int
    dtype: str
    shape: tuple[int, ...]
    kind: GradientKind
    factor: bytes | None
    rows: Span | None
    values: Span
    indices: Span | None
    sparse_dims: int = 0


class Step(NamedTuple):
    """One step: the optimizer, hyper-parameters as a list of one mapping for each group, and the gradients."""

    optimizer: int
    groups: Node
    gradients: tuple[Gradient, ...]


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """What makes an optimizer again where the user's own is not at hand.

    Args:
        kind: Module and name of its class.
        defaults: The arguments of its constructor, as a mapping. A tensor is one that has its value in the state.
        groups: For each group, the tensors of the state that are its parameters.
        state: For each parameter, counted over all groups, the tensors of its state by name.
    """

    kind: str
    defaults: Node
    groups: tuple[tuple[int, ...], ...]
    state: tuple[Mapping[str, int], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """The content of a record.

    Args:
        metrics: Numbers to find the point by.
        tree: The state.
        tensors: Its tensors.
        storages: Its storages.
        blobs: What the record stores.
        steps: The steps since the record before, in order.
        optimizers: The optimizers; None: those of the record before.
    """

    metrics: Mapping[str, float]
    tree: Node
    tensors: tuple[TensorSpec, ...]
    storages: tuple[PointStorage, ...]
    blobs: tuple[Blob, ...]
    steps: tuple[Step, ...]
    optimizers: tuple[OptimizerFacts, ...] | None

    @property
    def chunks(self) -> Iterator[tuple[ChunkId, int]]:
        """Id and length of the chunk of each frame of the record, in order."""
        for blob in self.blobs:
            yield from blob.chunks


def encode_point(point: Point, *, limits: Limits = _DEFAULT_LIMITS) -> bytes:
    """Return the body of a record.

    Raises:
        MalformedError: A reader would refuse it.
    """
    check_point(point, limits=limits)
    storages = b"".join(
        _STORAGE.pack(
            each.nbytes,
            each.checksum,
            each.span.offset if each.span else 0,
            each.span.blob if each.span else 0,
            SOURCES.index(each.source),
            each.element_width,
            each.is_float,
            each.is_word_sum,
        )
        for each in point.storages
    )
    optimizers = None if point.optimizers is None else [_row_of_optimizer(each) for each in point.optimizers]
    return encode_inner(
        PointRecord(
            metrics={name: float(value) for name, value in point.metrics.items()},
            tree=encode_tree(point.tree),
            tensors=[row_of(tensor) for tensor in point.tensors],
            storages=storages,
            blobs=[BlobRow(blob.element_width, blob.is_float, list(blob.chunks)) for blob in point.blobs],
            steps=[
                StepRow(step.optimizer, encode_tree(step.groups), [GradientRow(*each) for each in step.gradients])
                for step in point.steps
            ],
            optimizers=optimizers,
        )
    )


def _row_of_optimizer(facts: OptimizerFacts) -> OptimizerRow:
    groups = [list(group) for group in facts.groups]
    return OptimizerRow(facts.kind, encode_tree(facts.defaults), groups, [dict(each) for each in facts.state])


def decode_point(body: bytes | memoryview, *, limits: Limits = _DEFAULT_LIMITS, where: object = None) -> Point:
    """Decode the body of a record.

    Raises:
        MalformedError: Its parts contradict each other.
    """
    record = decode_stored(body, PointRecord, where=where)
    if len(record.storages) % _STORAGE.size:
        raise MalformedError("the storages of a point are not whole rows", where=where)
    point = Point(
        metrics=record.metrics,
        tree=decode_tree(record.tree, tensor_count=len(record.tensors), where=where),
        tensors=tuple(map(tensor_of, record.tensors)),
        storages=tuple(_storage_of(*row, where=where) for row in _STORAGE.iter_unpack(record.storages)),
        blobs=tuple(
            Blob(blob.element_width, blob.is_float, tuple((ChunkId(name), nbytes) for name, nbytes in blob.chunks))
            for blob in record.blobs
        ),
        steps=tuple(_step_of(row, where) for row in record.steps),
        optimizers=None
        if record.optimizers is None
        else tuple(_optimizer_of(row, len(record.tensors), where) for row in record.optimizers),
    )
    check_point(point, limits=limits, where=where)
    return point


def metrics_of(body: bytes | memoryview, *, where: object = None) -> dict[str, float]:
    """Return the metrics in the body of a record, without checking that its other fields fit together.

    Raises:
        MalformedError: It is no body.
    """
    return decode_inner(body, PointRecord, where=where).metrics


def _storage_of(
    nbytes: int,
    checksum: int,
    offset: int,
    blob: int,
    source: int,
    width: int,
    is_float: int,
    is_word_sum: int,
    *,
    where: object,
) -> PointStorage:
    is_stored = source == SOURCES.index("blob")
    if max(is_word_sum, is_float) > 1 or source >= len(SOURCES) or (not is_stored and (offset or blob)):
        raise MalformedError("a storage of a point has fields out of range", where=where)
    span = Span(blob, offset, nbytes) if is_stored else None
    return PointStorage(nbytes, checksum, width, bool(is_float), SOURCES[source], span, bool(is_word_sum))


def _step_of(row: StepRow, where: object) -> Step:
    gradients = []
    for each in row.gradients:
        if each.kind not in GRADIENT_KINDS:
            raise MalformedError(f"a gradient of the unknown kind {each.kind[:40]!r}", where=where)
        places = [None if place is None else Span(*place) for place in (each.rows, each.indices)]
        kind: GradientKind = each.kind  # type: ignore[assignment]
        gradients.append(
            Gradient(
                each.parameter,
                each.dtype,
                each.shape,
                kind,
                each.factor,
                places[0],
                Span(*each.values),
                places[1],
                each.sparse_dims,
            )
        )
    return Step(row.optimizer, decode_tree(row.groups, tensor_count=0, where=where), tuple(gradients))


def _optimizer_of(row: OptimizerRow, tensor_count: int, where: object) -> OptimizerFacts:
    defaults = decode_tree(row.defaults, tensor_count=tensor_count, where=where)
    return OptimizerFacts(row.kind, defaults, tuple(map(tuple, row.groups)), tuple(row.state))


def check_point(point: Point, *, limits: Limits = _DEFAULT_LIMITS, where: object = None) -> None:
    """Check a point, before writing and after reading.

    Raises:
        MalformedError: Its parts contradict each other.
    """
    check_tree(point.tree, len(point.tensors))
    check_tensors(point.tensors, [storage.nbytes for storage in point.storages], where)
    for blob in point.blobs:
        _check_blob(blob, limits, where)
    sizes = [blob.nbytes for blob in point.blobs]
    for storage in point.storages:
        if storage.element_width not in ELEMENT_WIDTHS or (storage.span is None) != (storage.source != "blob"):
            raise MalformedError("a storage of a point has fields out of range", where=where)
        _check_span(storage.span, sizes, where)
    for step in point.steps:
        _check_groups(step.groups, where)
        before = -1
        for gradient in step.gradients:
            if gradient.parameter <= before:
                raise MalformedError("the gradients of a step are not in the order of the parameters", where=where)
            before = gradient.parameter
            _check_gradient(gradient, sizes, where)
    for facts in point.optimizers or ():
        _check_optimizer(facts, len(point.tensors), where)


def _check_blob(blob: Blob, limits: Limits, where: object) -> None:
    if blob.element_width not in ELEMENT_WIDTHS or not blob.chunks:
        raise MalformedError("a blob of a point has no chunks, or elements of an impossible width", where=where)
    for chunk_id, nbytes in blob.chunks:
        if len(chunk_id) != DIGEST_NBYTES or chunk_id == NO_BASE or not 0 < nbytes <= limits.chunk_nbytes_max:
            raise MalformedError("a chunk of a point has no valid id, or an impossible length", where=where)


def _check_span(span: Span | None, sizes: Sequence[int], where: object) -> None:
    if span is None or (not span.nbytes and span == Span(0, 0, 0)):
        return
    if not (0 <= span.blob < len(sizes) and 0 <= span.offset <= span.offset + span.nbytes <= sizes[span.blob]):
        raise MalformedError("a point needs bytes that no blob has", where=where)


def _check_groups(groups: Node, where: object) -> None:
    is_list = isinstance(groups, ListNode) and all(isinstance(each, DictNode) for each in groups.children)
    if not is_list or tensors_of(groups):
        raise MalformedError("the hyper-parameters of a step are not one mapping for each group", where=where)


def _check_gradient(gradient: Gradient, sizes: Sequence[int], where: object) -> None:
    for span in (gradient.rows, gradient.values, gradient.indices):
        _check_span(span, sizes, where)
    itemsize = 2 if gradient.kind in NARROW_KINDS else TORCH_ITEMSIZES.get(gradient.dtype)
    is_narrow_float = gradient.kind not in NARROW_KINDS or gradient.dtype == "float32"
    has_factor = gradient.factor is not None
    if (
        itemsize is None
        or not is_narrow_float
        or len(gradient.shape) > RANK_MAX
        or (has_factor and (gradient.kind not in NARROW_KINDS or len(gradient.factor or b"") != _FACTOR_NBYTES))
        or (gradient.indices is not None) != (gradient.kind == "coo")
        or (gradient.indices is not None) != (1 <= gradient.sparse_dims <= len(gradient.shape))
        or (gradient.rows is not None and (not gradient.shape or gradient.kind == "coo"))
        or (gradient.rows is not None and gradient.rows.nbytes != -(-gradient.shape[0] // 8))
    ):
        raise MalformedError("a gradient of a point has fields that contradict each other", where=where)
    assert itemsize is not None
    count = math.prod(gradient.shape)
    nbytes = gradient.values.nbytes
    if gradient.kind == "coo":
        assert gradient.indices is not None
        listed, rest = divmod(gradient.indices.nbytes, _INDEX_NBYTES * gradient.sparse_dims)
        is_right = not rest and nbytes == listed * math.prod(gradient.shape[gradient.sparse_dims :]) * itemsize
    elif gradient.rows is not None:
        # How many rows there are is only known from the bits themselves.
        row_nbytes = count // max(1, gradient.shape[0]) * itemsize
        is_right = nbytes <= count * itemsize and (nbytes % row_nbytes == 0 if row_nbytes else not nbytes)
    else:
        is_right = nbytes == count * itemsize
    if not is_right:
        raise MalformedError("a gradient of a point has another length than its shape", where=where)


def _check_optimizer(facts: OptimizerFacts, tensor_count: int, where: object) -> None:
    used = [index for group in facts.groups for index in group]
    used += [index for names in facts.state for index in names.values()]
    parameter_count = sum(map(len, facts.groups))
    if len(facts.state) != parameter_count or not all(0 <= index < tensor_count for index in used):
        raise MalformedError("an optimizer of a point names tensors that do not exist", where=where)
    if not isinstance(facts.defaults, DictNode):
        raise MalformedError("the arguments of an optimizer are not a mapping", where=where)
