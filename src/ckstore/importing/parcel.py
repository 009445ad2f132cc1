"""What the child that loads foreign files hands back: a state in a file of memory, and the words around it.

The state's storages lie one after the other in a file without a name, then the head: tree, tensors and where the
storages lie. What comes from the child is not trusted: it read what others wrote.

Invariants:
- Every place and every tensor is checked against the file's length before a byte is read by it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ckstore.capture import Captured
from ckstore.errors import MalformedError
from ckstore.format.nodes import decode_tree, encode_tree
from ckstore.format.records import Count, TensorRow, decode_inner, encode_inner
from ckstore.importing.storable import Loaded
from ckstore.importing.storages import FileStorage, OpenFile
from ckstore.tensor import HostStorage, TensorSpec

BLOCK_NBYTES = 4 << 20
_WHERE = "what the loading process handed back"


class StorageRow(NamedTuple):
    """A storage: where its bytes lie in the file, and what they are."""

    place: Count
    nbytes: Count
    element_width: Count
    is_float: bool


class _Head(NamedTuple):
    tree: bytes
    tensors: list[TensorRow]
    storages: list[StorageRow]
    warnings: list[str]
    left_out: list[tuple[str, str]]


class Job(NamedTuple):
    """Asks the child to load one part of a checkpoint.

    Attributes:
        kind: How it is read.
        path: Where it is; a path may be no text.
        is_peek: Only its plain values are wanted, and no tensor.
        nbytes_max: How long it is.
        key: The key that it gets in the state; empty: it is the whole state.
        skip: Globs of leaves that are left out.
    """

    kind: str
    path: bytes
    is_peek: bool
    nbytes_max: Count
    key: str
    skip: list[str]

    @property
    def where(self) -> str:
        """The path as Python writes it."""
        return os.fsdecode(self.path)


class Answer(NamedTuple):
    """Says where the head of the state lies in the file, or what went wrong."""

    head_place: Count
    head_nbytes: Count
    error: tuple[str, str, str | None, str | None] | None


def write_parcel(loaded: Loaded, fd: int) -> tuple[int, int]:
    """Write a state into a file; return place and length of its head."""
    captured = loaded.captured
    place, rows = 0, []
    for storage in captured.storages:
        rows.append(StorageRow(place, storage.nbytes, storage.element_width, storage.is_float))
        for lo in range(0, storage.nbytes, BLOCK_NBYTES):
            place += _write_all(fd, storage.read(lo, min(lo + BLOCK_NBYTES, storage.nbytes)), place)
    head = _Head(
        tree=encode_tree(captured.tree),
        tensors=[
            TensorRow(
                library=spec.library,
                dtype=spec.dtype,
                shape=spec.shape,
                strides=spec.strides,
                storage=spec.storage,
                offset=spec.offset,
                is_parameter=spec.is_parameter,
                requires_grad=spec.requires_grad,
            )
            for spec in captured.tensors
        ],
        storages=rows,
        warnings=list(captured.warnings),
        left_out=list(loaded.left_out.items()),
    )
    return place, _write_all(fd, memoryview(encode_inner(head)), place)


def _write_all(fd: int, content: memoryview, place: int) -> int:
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], place + done)
    return done


def read_parcel(file: OpenFile, answer: Answer) -> Loaded:
    """Return the state that a child wrote into a file; its bytes are read when they are asked for.

    Raises:
        MalformedError: The child did not write it, or it was tampered with.
    """
    nbytes = file.nbytes
    if answer.head_place + answer.head_nbytes > nbytes:
        raise MalformedError("the head of a state lies beyond its file", where=_WHERE)
    head = decode_inner(file.read(answer.head_place, answer.head_nbytes), _Head, where=_WHERE)
    storages: list[HostStorage] = []
    for row in head.storages:
        if row.place + row.nbytes > nbytes or row.element_width not in (1, 2, 4, 8):
            raise MalformedError("a storage lies beyond its file, or has elements of an impossible width", where=_WHERE)
        storages.append(FileStorage(file, row.place, row.nbytes, row.element_width, row.is_float))
    tensors = [_spec_of(row) for row in head.tensors]
    if any(spec.storage >= len(storages) for spec in tensors):
        raise MalformedError("a tensor lies in a storage that is not there", where=_WHERE)
    # Whether tensors lie within their storages is checked when the manifest is written, as for every commit.
    tree = decode_tree(head.tree, tensor_count=len(tensors), where=_WHERE)
    return Loaded(Captured(tree, [], tensors, storages, list(head.warnings)), dict(head.left_out))


def _spec_of(row: TensorRow) -> TensorSpec:
    return TensorSpec(
        row.library, row.dtype, row.shape, row.strides, row.storage, row.offset, row.is_parameter, row.requires_grad
    )
