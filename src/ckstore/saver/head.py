"""The head of a staged state: all that a commit wants to know of it, but for the bytes of its storages.

It lies in the slot that the state is staged in, because tree and tensors may be long; places are offsets in the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckstore.capture import Captured
from ckstore.config import Policy
from ckstore.errors import MalformedError
from ckstore.format.nodes import decode_tree, encode_tree
from ckstore.format.records import Count, TensorRow, decode_inner, encode_inner
from ckstore.policies import policy_of, policy_row
from ckstore.tensor import TensorSpec
from ckstore.tree import Node


class StorageRow(NamedTuple):
    """A storage: where its bytes lie in the slot, and what they are."""

    place: Count
    nbytes: Count
    element_width: Count
    is_float: bool


class SampleRow(NamedTuple):
    """Bytes of a storage that are staged apart, before the storage itself, so that coding can begin early.

    ``bytes [offset, offset + nbytes)`` of the storage are told of. Where ``width`` is 0, they lie at ``place`` as they
    are; else ``place`` holds the sample that ``forms.sample_of`` takes of them for that width, ``sample_nbytes`` long.
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


@dataclass(frozen=True, slots=True)
class Head:
    """What a staged state is, but for the bytes of its storages; places are offsets in the slot."""

    step: int
    metrics: Mapping[str, float]
    tags: Sequence[str]
    policy: Policy
    warnings: Sequence[str]
    tree: Node
    tensors: Sequence[TensorSpec]
    storages: Sequence[StorageRow]
    samples: Sequence[SampleRow] = ()

    @classmethod
    def of(
        cls,
        captured: Captured,
        places: Sequence[int],
        *,
        step: int,
        metrics: Mapping[str, float],
        tags: Sequence[str],
        policy: Policy,
        samples: Sequence[SampleRow] = (),
    ) -> Head:
        """Describe a captured state whose storages are staged at these places."""
        rows = [
            StorageRow(place, storage.nbytes, storage.element_width, storage.is_float)
            for place, storage in zip(places, captured.storages, strict=True)
        ]
        return cls(step, metrics, tags, policy, captured.warnings, captured.tree, captured.tensors, rows, samples)


def encode_head(head: Head) -> bytes:
    """Return a head as it lies in the slot."""
    return encode_inner(
        _HeadRow(
            step=head.step,
            metrics=dict(head.metrics),
            tags=list(head.tags),
            policy=policy_row(head.policy),
            warnings=list(head.warnings),
            tree=encode_tree(head.tree),
            tensors=[_row_of(tensor) for tensor in head.tensors],
            storages=list(head.storages),
            samples=list(head.samples),
        )
    )


def decode_head(content: bytes | memoryview, *, slot_nbytes: int) -> Head:
    """Read a head whose places must lie within the slot.

    Raises:
        MalformedError: No trainer of ours wrote it.
    """
    where = "the head of a staged state"
    row = decode_inner(content, _HeadRow, where=where)
    for storage in row.storages:
        if storage.place + storage.nbytes > slot_nbytes:
            raise MalformedError("a staged storage reaches beyond the slot", where=where)
    for sample in row.samples:
        if (
            sample.place + sample.sample_nbytes > slot_nbytes
            or sample.storage >= len(row.storages)
            or sample.offset + sample.nbytes > row.storages[sample.storage].nbytes
            or (sample.width == 0 and sample.sample_nbytes != sample.nbytes)
        ):
            raise MalformedError("a staged sample reaches beyond the slot, or its storage", where=where)
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
