"""Write the tensors of a checkpoint to a safetensors file, of which few are in memory at a time.

Everything else in the state is restored first, with a ``StoredTensor`` in place of each tensor. Then tensors are read
and written in groups of about 64 MiB; a larger tensor is a group of its own. Shards of several ranks are gathered in
the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckstore.config import MIB, Policy
from ckstore.format.manifest import Manifest
from ckstore.format.many_ranks import plain_manifest
from ckstore.format.tree import (
    PER_RANK,
    ConvertedNode,
    DictNode,
    ListNode,
    Node,
    Selection,
    TensorNode,
    TupleNode,
    ValueNode,
    parts_of,
    tensors_of,
)
from ckstore.ops.interop.export import Exported, StoredTensor, TensorItem, export_safetensors, item_of
from ckstore.ops.interop.weights import weight_of
from ckstore.restore.restore import RestoreRequest, restore_manifest
from ckstore.results import Info
from ckstore.store.replay_bases import require_stored
from ckstore.store.repository import Repository

GROUP_NBYTES = 64 * MIB
"""Tensors that are read together: many small tensors are read with few calls."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class FileRequest:
    """What to export; the fields are arguments of ``Store.export_safetensors``."""

    file: Path
    only: str | Sequence[str] | None = None
    strip_prefix: str = ""
    force: bool = False
    on_progress: Callable[[int, int], None] | None = None


def export_file(
    repository: Repository, policy: Policy, manifest: Manifest, info: Info, request: FileRequest
) -> Exported:
    """Write every selected tensor of a checkpoint to a safetensors file, under its dotted path.

    Raises:
        NotFoundError: Nothing is selected, or no tensor that the format supports.
        UsageError: Two tensors have the same name, one lacks the prefix, or the file exists.
        CapacityError: The disk is full. The file is unchanged.
        CkstoreError: As for ``Store.restore``.
    """
    require_stored(manifest, repository.backend.root, what="exported")
    reader = TensorReader(repository, policy, plain_manifest(manifest))
    origin = {"checkpoint_id": info.checkpoint_id, "run": info.run, "step": str(info.step)}
    exported = export_safetensors(
        reader.state_of(request.only),
        request.file,
        force=request.force,
        metadata={f"ckstore.{name}": text for name, text in origin.items()},
        strip_prefix=request.strip_prefix,
        on_progress=request.on_progress,
        contents=reader.contents,
    )
    return replace(exported, info=info)


class TensorReader:
    """Reads tensors of a checkpoint.

    Args:
        repository: The store.
        policy: Threads, memory and checks.
        manifest: The checkpoint; see ``plain_manifest``.
    """

    def __init__(self, repository: Repository, policy: Policy, manifest: Manifest) -> None:
        self._repository = repository
        self._policy = policy
        self._manifest = manifest

    def restore(self, only: str | Sequence[str] | None, tree: Node | None = None) -> Any:
        """Return the state, or a part of it; ``tree`` replaces the tree of the checkpoint."""
        manifest = self._manifest if tree is None else replace(self._manifest, tree=tree)
        request = RestoreRequest(into=None, only=only, device=None, exact=False, on_progress=None)
        return restore_manifest(self._repository, self._policy, manifest, (), request).state

    def read(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        """Return tensors by name; ``numbers`` are those in the manifest."""
        tree = DictNode("dict", tuple(numbers), tuple(map(TensorNode, numbers.values())))
        found: dict[str, Any] = self.restore("*", tree)
        return found

    def contents(self, items: Sequence[TensorItem]) -> Iterator[memoryview]:
        """Yield the bytes of each item, in order."""
        for group in groups_of(items, lambda item: item.nbytes):
            numbers = {str(item.number): item.number for item in group if item.number is not None}
            read = self.read(numbers) if numbers else {}
            for item in group:
                yield item.content() if item.number is None else _content_of(read.pop(str(item.number)))

    def state_of(self, only: str | Sequence[str] | None) -> Any:
        """Return the state with a ``StoredTensor`` in place of each tensor that ``contents`` can read.

        In it, mappings are dicts, and tuples are lists.
        """
        tree, tensors = self._manifest.tree, self._manifest.tensors
        # Objects are made from the tensors below them, which keep sharing memory with others.
        inside = {tensors[number].storage for number in _tensors_of_objects(tree)}
        stored = {
            number: StoredTensor(item)
            for number in tensors_of(tree)
            if tensors[number].storage not in inside and (item := self._item_of(number)) is not None
        }
        state = self.restore(only, _without(tree, stored))
        chosen = tree if only is None else Selection(only, tree).prune(tree)
        assert chosen is not None, "the restore found a leaf"
        return _filled(chosen, state, stored)

    def _item_of(self, number: int) -> TensorItem | None:
        """Return how to write a tensor; None if safetensors has no such dtype."""
        weight = weight_of(self._manifest, number)
        if weight is None:
            return None
        return TensorItem(
            weight.dtype,
            weight.shape,
            weight.itemsize,
            weight.nbytes,
            partial(self._content_of, number),
            weight.identity,
            self._manifest.tensors[number].library,
            number,
        )

    def _content_of(self, number: int) -> memoryview:
        return _content_of(self.read({"": number})[""])


def _content_of(tensor: Any) -> memoryview:
    item = item_of(tensor)
    assert isinstance(item, TensorItem), "the dtype of a stored tensor was checked"
    return item.content()


def _children_of(node: Node) -> tuple[Node, ...] | None:
    """Return what a plain container contains, in the order of the restored one; None: it is another node."""
    if isinstance(node, ConvertedNode) and node.name == PER_RANK:
        return _children_of(node.child)
    return node.children if isinstance(node, DictNode | ListNode | TupleNode) else None


def _tensors_of_objects(node: Node) -> Iterator[int]:
    """Yield the tensors of everything that is neither a plain container nor a tensor in one."""
    children = _children_of(node)
    for part in parts_of(node) if children is None else children:
        if children is None:
            yield from tensors_of(part)
        else:
            yield from _tensors_of_objects(part)


def _without(node: Node, stored: Mapping[int, StoredTensor]) -> Node:
    """Return a node with a number in place of each stored tensor."""
    if isinstance(node, TensorNode):
        return ValueNode("int", 0) if node.tensor in stored else node
    if isinstance(node, ConvertedNode):
        return replace(node, child=_without(node.child, stored)) if node.name == PER_RANK else node
    if isinstance(node, DictNode | ListNode | TupleNode):
        return replace(node, children=tuple([_without(child, stored) for child in node.children]))
    return node


def _filled(node: Node, state: Any, stored: Mapping[int, StoredTensor]) -> Any:
    """Return what was restored of a node ``_without`` its stored tensors, with these in their places."""
    if isinstance(node, TensorNode):
        return stored.get(node.tensor, state)
    children = _children_of(node)
    if children is None:
        return state
    if isinstance(state, dict):
        return {key: _filled(child, part, stored) for child, (key, part) in zip(children, state.items(), strict=True)}
    return [_filled(child, part, stored) for child, part in zip(children, state, strict=True)]


def groups_of(items: Iterable[Item], nbytes_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield items in groups that are read together."""
    group: list[Item] = []
    nbytes = 0
    for item in items:
        if group and nbytes + nbytes_of(item) > GROUP_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(item)
        nbytes += nbytes_of(item)
    if group:
        yield group
