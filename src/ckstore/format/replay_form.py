"""The root of a checkpoint in replay form: what it begins from, and the hashes of what training makes from that.

docs/FORMAT.md, section 15, describes it. Such a manifest has no tables of tensors, storages or frames of its own, so
readers that do not know the name of the root can keep and copy it, and refuse to restore it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckstore.errors import MalformedError
from ckstore.format.frame import ELEMENT_WIDTHS
from ckstore.format.logical import check_tensors, row_of, tensor_of
from ckstore.format.manifest import Manifest, build_manifest
from ckstore.format.records import TensorRow, decode_stored, encode_inner
from ckstore.format.tensors import StorageSpec, TensorSpec
from ckstore.format.tree import (
    REPLAY,
    ConvertedNode,
    DictNode,
    ListNode,
    Node,
    TupleNode,
    ValueNode,
    check_tree,
    decode_tree,
    encode_tree,
    is_in_replay_form,
    items_of,
)
from ckstore.hashing import DIGEST_NBYTES

_STORAGE = struct.Struct("<QBB6s32s")
_ZERO = bytes(6)
_FIELDS = ("base", "environment", "tree", "tensors", "storages", "values")


class ReplayBase(NamedTuple):
    """The checkpoint that training begins from."""

    seq: int
    step: int
    checkpoint_id: bytes


class HashedStorage(NamedTuple):
    """A storage without its bytes.

    Args:
        nbytes: Its length.
        element_width: Bytes of an element.
        is_float: Its elements are floating-point numbers.
        digest: BLAKE3-256 of its bytes.
    """

    nbytes: int
    element_width: int
    is_float: bool
    digest: bytes


@dataclass(frozen=True, slots=True)
class ReplayForm:
    """What a checkpoint in replay form says.

    Args:
        base: What training begins from.
        environment: Facts about the process that proved it.
        tree: The state.
        tensors: Its tensors.
        storages: Its storages.
        values: The bytes of the storages of long plain values, by index, ascending.
    """

    base: ReplayBase
    environment: Mapping[str, str]
    tree: Node
    tensors: tuple[TensorSpec, ...]
    storages: tuple[HashedStorage, ...]
    values: Mapping[int, bytes]

    @property
    def specs(self) -> list[StorageSpec]:
        """The storages, as a restore describes them."""
        return [StorageSpec(each.nbytes, each.element_width, each.is_float, ()) for each in self.storages]


def root_of(form: ReplayForm) -> ConvertedNode:
    """Return the root of a checkpoint in replay form.

    Raises:
        MalformedError: A reader would refuse it.
    """
    _check(form, None)
    rows = b"".join(
        _STORAGE.pack(each.nbytes, each.element_width, each.is_float, _ZERO, each.digest) for each in form.storages
    )
    base = (
        ValueNode("int", form.base.seq),
        ValueNode("int", form.base.step),
        ValueNode("bytes", form.base.checkpoint_id),
    )
    facts = tuple(ValueNode("str", text) for text in form.environment.values())
    values = tuple(
        TupleNode((ValueNode("int", index), ValueNode("bytes", content))) for index, content in form.values.items()
    )
    children: tuple[Node, ...] = (
        DictNode("dict", ReplayBase._fields, base),
        DictNode("dict", tuple(form.environment), facts),
        ValueNode("bytes", encode_tree(form.tree)),
        ValueNode("bytes", encode_inner([row_of(tensor) for tensor in form.tensors])),
        ValueNode("bytes", rows),
        ListNode(values),
    )
    return ConvertedNode(REPLAY, DictNode("dict", _FIELDS, children))


def replay_form_of(manifest: Manifest, where: object = None) -> ReplayForm | None:
    """Return what a checkpoint in replay form says; None: the checkpoint is stored whole.

    Raises:
        MalformedError: The root is malformed, or the manifest contradicts it.
    """
    if not is_in_replay_form(manifest.tree):
        return None
    assert isinstance(manifest.tree, ConvertedNode)
    header = manifest.header
    form = _decoded(manifest.tree.child, where)
    is_bare = not (manifest.tensors or manifest.storages or manifest.frames or manifest.losses)
    if not is_bare or not header.generation or not (form.base.seq < header.seq and form.base.step < header.step):
        raise MalformedError("a manifest in replay form contradicts its root", where=where)
    return form


def _decoded(child: Node, where: object) -> ReplayForm:
    try:
        fields = _row(child)
        if tuple(fields) != _FIELDS:
            raise TypeError
        base, environment = _row(fields["base"]), _row(fields["environment"])
        if tuple(base) != ReplayBase._fields or not isinstance(fields["values"], ListNode):
            raise TypeError
        rows = decode_stored(_value(fields["tensors"], bytes), list[TensorRow], where=where)
        values = [_pair(each) for each in fields["values"].children]
        form = ReplayForm(
            base=ReplayBase(*(_value(node, kind) for node, kind in zip(base.values(), (int, int, bytes), strict=True))),
            environment={name: _value(text, str) for name, text in environment.items()},
            tree=decode_tree(_value(fields["tree"], bytes), tensor_count=len(rows), where=where),
            tensors=tuple(map(tensor_of, rows)),
            storages=tuple(_storages(_value(fields["storages"], bytes))),
            values=dict(values),
        )
    except (TypeError, struct.error):
        raise _malformed(where) from None
    if sorted(form.values) != [index for index, _ in values]:
        raise _malformed(where)
    _check(form, where)
    return form


def _storages(rows: bytes) -> list[HashedStorage]:
    found = []
    for nbytes, width, is_float, zero, digest in _STORAGE.iter_unpack(rows):
        if zero != _ZERO or is_float > 1:
            raise TypeError
        found.append(HashedStorage(nbytes, width, bool(is_float), digest))
    return found


def _check(form: ReplayForm, where: object) -> None:
    check_tree(form.tree, len(form.tensors))
    check_tensors(form.tensors, [storage.nbytes for storage in form.storages], where)
    are_digests = [form.base.checkpoint_id, *(storage.digest for storage in form.storages)]
    if (
        is_in_replay_form(form.tree)
        or min(form.base.seq, form.base.step) < 0
        or any(len(digest) != DIGEST_NBYTES for digest in are_digests)
        or any(storage.element_width not in ELEMENT_WIDTHS for storage in form.storages)
        or any(not 0 <= index < len(form.storages) for index in form.values)
        or any(len(content) != form.storages[index].nbytes for index, content in form.values.items())
    ):
        raise _malformed(where)


def _row(node: Node) -> dict[str, Node]:
    if not isinstance(node, DictNode) or node.kind != "dict" or not all(type(key) is str for key in node.keys):
        raise TypeError
    return {str(key): child for key, child in items_of(node)}


def _pair(node: Node) -> tuple[int, bytes]:
    if not isinstance(node, TupleNode) or len(node.children) != 2:
        raise TypeError
    return _value(node.children[0], int), _value(node.children[1], bytes)


def _value(node: Node, kind: type) -> Any:
    if not isinstance(node, ValueNode) or type(node.value) is not kind or node.type != kind.__name__:
        raise TypeError
    return node.value


def _malformed(where: object) -> MalformedError:
    return MalformedError("the root of a checkpoint in replay form is malformed", where=where)


def in_replay_form(manifest: Manifest, form: ReplayForm) -> Manifest:
    """Return the next generation of an exact checkpoint: the same entry of the run, without bytes of tensors."""
    header = manifest.header
    return build_manifest(
        store_id=header.store_id,
        run=header.run,
        seq=header.seq,
        step=header.step,
        time_ns=header.time_ns,
        parent=header.parent,
        origin_id=header.checkpoint_id,
        is_archival=header.is_archival,
        metrics=header.metrics,
        generation=header.generation + 1,
        tree=root_of(form),
        tensors=(),
        storages=(),
        chunks=(),
        packs=(),
        frames=(),
        bytes_written=0,
        chunks_new=0,
    )


def described(manifest: Manifest, form: ReplayForm) -> Manifest:
    """Return a manifest with the tree, tensors and storages of the state, to list its contents. It has no chunks."""
    return replace(manifest, tree=form.tree, tensors=form.tensors, storages=tuple(form.specs))
