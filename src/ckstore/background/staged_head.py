"""The head of a staged state: everything a commit needs except the bytes of the storages.

The head is in the slot of its state, because tree and tensors may be too long for a message. The trainer writes it
with ``HeadWriter``; the saver reads it with ``decode_head``. Places are offsets in the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, cast

from ckstore.commit.base_selection import sampled_of, units_of
from ckstore.commit.chunking import StorageShape, plan_commit
from ckstore.config import Limits, Policy, policy_of, policy_row
from ckstore.errors import MalformedError
from ckstore.format.records import Count, TensorRow, decode_inner, encode_inner, encoded
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import Node, TreeWriter, decode_tree
from ckstore.state.capture import Captured


class StorageRow(NamedTuple):
    """A storage: the offset of its bytes in the slot, and their type."""

    place: Count
    nbytes: Count
    element_width: Count
    is_float: bool


class SampleRow(NamedTuple):
    """Bytes of a storage that are staged separately, before the storage itself, so that coding can begin early.

    They belong to bytes ``[offset, offset + nbytes)`` of the storage. With ``width`` 0, ``place`` holds these bytes
    unchanged. Else it holds the ``sample_nbytes`` bytes that a commit would sample of them for this element width.
    """

    storage: Count
    offset: Count
    nbytes: Count
    width: Count
    place: Count
    sample_nbytes: Count


class _HeadRow(NamedTuple):
    step: Count
    metrics: dict[str, float]
    tags: list[str]
    policy: dict[str, Any]
    warnings: list[str]
    tree: bytes
    tensors: list[TensorRow]
    storages: list[StorageRow]
    samples: list[SampleRow]
    structure: Count
    share: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """A staged state without the bytes of its storages. Places are offsets in the slot.

    Heads with the same ``structure`` number differ in values, places and samples only.
    """

    step: int
    metrics: Mapping[str, float]
    tags: Sequence[str]
    policy: Policy
    warnings: Sequence[str]
    tree: Node
    tensors: Sequence[TensorSpec]
    storages: Sequence[StorageRow]
    samples: Sequence[SampleRow] = ()
    structure: int = 0
    share: bytes = b""
    """In a job of many ranks: what this rank holds (``ranks/arrays.py``)."""


class HeadWriter:
    """Builds and encodes the heads of captured states, one after the other.

    Parts that are the same objects as in the last head are not encoded again.
    """

    def __init__(self) -> None:
        self._trees = TreeWriter()
        self._placed: tuple[object, object] = None, None
        self._storages: list[StorageRow] = []
        self._last_parts: tuple[object, ...] = ()
        self._rows: tuple[object, ...] = ()

    def head_of(
        self,
        captured: Captured,
        places: Sequence[int],
        *,
        step: int,
        metrics: Mapping[str, float],
        tags: Sequence[str],
        policy: Policy,
        samples: Sequence[SampleRow] = (),
        share: bytes = b"",
    ) -> Head:
        """Return the head of a captured state whose storages are staged at these places."""
        if self._placed[0] is not captured.tensors or self._placed[1] is not places:
            self._storages = [
                StorageRow(place, storage.nbytes, storage.element_width, storage.is_float)
                for place, storage in zip(places, captured.storages, strict=True)
            ]
            self._placed = captured.tensors, places
        parts = captured.warnings, captured.tree, captured.tensors, self._storages
        return Head(step, metrics, tags, policy, *parts, samples, captured.structure.number, share)

    def encode(self, head: Head) -> bytes:
        """Return the bytes of a head."""
        parts = head.tensors, head.storages, head.samples
        if len(self._last_parts) != len(parts) or not all(map(is_, parts, self._last_parts)):
            tensors = [_row_of(tensor) for tensor in head.tensors]
            self._rows = encoded(tensors), encoded(head.storages), encoded(head.samples)
            self._last_parts = parts
        tensor_rows, storage_rows, sample_rows = self._rows
        return encode_inner(
            _HeadRow(
                step=head.step,
                metrics=dict(head.metrics),
                tags=list(head.tags),
                policy=policy_row(head.policy),
                warnings=list(head.warnings),
                tree=self._trees.encode(head.tree),
                tensors=cast("list[TensorRow]", tensor_rows),
                storages=cast("list[StorageRow]", storage_rows),
                samples=cast("list[SampleRow]", sample_rows),
                structure=head.structure,
                share=head.share,
            )
        )


def decode_head(content: bytes | memoryview, *, slot_nbytes: int) -> Head:
    """Decode a head and check that all its places lie within the slot.

    Raises:
        MalformedError: The head is invalid.
    """
    where = "the head of a staged state"
    row = decode_inner(content, _HeadRow, where=where)
    for storage in row.storages:
        if storage.place + storage.nbytes > slot_nbytes:
            raise MalformedError("a staged storage extends beyond the slot", where=where)
    for sample in row.samples:
        if (
            sample.place + sample.sample_nbytes > slot_nbytes
            or sample.storage >= len(row.storages)
            or sample.offset + sample.nbytes > row.storages[sample.storage].nbytes
            or (sample.width == 0 and sample.sample_nbytes != sample.nbytes)
        ):
            raise MalformedError("a staged sample extends beyond the slot or its storage", where=where)
    return Head(
        step=row.step,
        metrics=row.metrics,
        tags=row.tags,
        policy=policy_of(row.policy, where=where),
        warnings=row.warnings,
        tree=decode_tree(row.tree, tensor_count=len(row.tensors), where=where),
        tensors=[_tensor_of(tensor) for tensor in row.tensors],
        storages=row.storages,
        samples=row.samples,
        structure=row.structure,
        share=row.share,
    )


def _row_of(spec: TensorSpec) -> TensorRow:
    return TensorRow(
        library=spec.library,
        dtype=spec.dtype,
        shape=spec.shape,
        strides=spec.strides,
        storage=spec.storage,
        offset=spec.offset,
        is_parameter=spec.is_parameter,
        requires_grad=spec.requires_grad,
    )


def _tensor_of(row: TensorRow) -> TensorSpec:
    return TensorSpec(
        row.library, row.dtype, row.shape, row.strides, row.storage, row.offset, row.is_parameter, row.requires_grad
    )


def places_to_sample(storages: Sequence[StorageShape], limits: Limits) -> list[tuple[int, int, int, int]]:
    """Return the chunks that a commit samples before it encodes: storage, offset, length and element width of each."""
    plan = plan_commit(storages, limits)
    found = []
    for unit in units_of(plan):
        for index in sampled_of(unit):
            chunk = plan.chunks[index]
            if len(chunk.sources) == 1:
                source = chunk.sources[0]
                found.append((source.storage, source.offset, source.nbytes, chunk.element_width))
    return found
