"""The state of a foreign checkpoint as `Captured` data: captured from objects, backed by files, or joined from shards.

Invariants:
- A leaf is left out only if a glob of ``--skip-leaf`` matches it. Everything else is captured, or an error names it.
- File storages read; they do not map. A file that shrinks while it is read causes an error instead of a signal.
- `FileStorage.read` returns a private copy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ckstore.errors import CorruptError, UnsupportedError, UsageError
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import (
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    Path,
    TensorNode,
    TupleNode,
    encode_tree,
    format_path,
    place_of,
)
from ckstore.state.capture import Captured, capture
from ckstore.state.tensors import HostStorage, LeafAdapter

_BLOCK_NBYTES = 4 << 20
_BAD_MAX = 1000
_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state of one file or one checkpoint.

    Attributes:
        captured: The tensors and values to commit.
        left_out: Dotted path -> reason why it is left out.
    """

    captured: Captured
    left_out: dict[str, str] = field(default_factory=dict)


def find_skip_reason(path: Path, skip: Sequence[str]) -> str | None:
    """Return why ``--skip-leaf`` leaves out a leaf or a container, or None."""
    dotted = format_path(path)
    for pattern in skip:
        if path and (dotted == pattern or fnmatchcase(dotted, pattern)):
            return skip_reason(pattern)
    return None


def skip_reason(pattern: str) -> str:
    """Return the reason that is reported for leaves that a glob matches."""
    return f"as asked for with --skip-leaf {pattern}"


def capture_storable(
    state: Any, adapters: Sequence[LeafAdapter], *, key: str, skip: Sequence[str], where: str
) -> LoadedState:
    """Capture a state without the leaves to skip.

    Args:
        state: The state of one part; it is changed.
        adapters: Adapters of tensor libraries other than numpy.
        key: The key of this part in the whole state; empty if it is the whole state.
        skip: Globs over dotted paths in the whole state.
        where: The file, for messages.

    Raises:
        UnsupportedError: Leaves cannot be stored; the message names them.
    """
    prefix: Path = (key,) if key else ()
    left_out: dict[str, str] = {}
    if skip:
        state = _without(state, prefix, skip, left_out)
    bad: list[tuple[Path, str]] = []
    while True:
        try:
            captured = capture(state, adapters)
        except UsageError as error:
            path = error.facts.get("path")
            if not isinstance(path, tuple) or len(bad) >= _BAD_MAX:
                raise
            path = _reachable(state, path)
            bad.append(((*prefix, *path), _kind_at(state, path) or error.what))
            if not path:
                break
            state = _without_path(state, path)
            continue
        break
    if bad:
        raise _cannot_be_stored(bad, where)
    return LoadedState(captured, left_out)


def _cannot_be_stored(bad: Sequence[tuple[Path, str]], where: str) -> UnsupportedError:
    named = "; ".join(f"{place_of(path)}: {what}" for path, what in bad[:_NAMED_MAX])
    more = f"; and {len(bad) - _NAMED_MAX} more" if len(bad) > _NAMED_MAX else ""
    options = " ".join(f"--skip-leaf {format_path(path)}" for path, _ in bad[:3] if path)
    return UnsupportedError(
        f"the file contains objects that cannot be stored ({named}{more})", where=where,
        todo=f"leave them out with {options}, leave out the file with --exclude, or load the file where you trust it "
        "and save only its state_dicts",
    )  # fmt: skip


def _reachable(state: Any, path: Path) -> Path:
    """Return the part of a path that leads through dicts and lists.

    What is deeper is inside a leaf, and is left out together with it.
    """
    for index, key in enumerate(path):
        exists = isinstance(key, (str, int)) and (
            key in state if isinstance(state, dict) else isinstance(state, (list, tuple))
        )
        if not exists:
            return path[:index]
        state = state[key]
    return path


def _kind_at(state: Any, path: Path) -> str | None:
    """Return the message for an object of a foreign class at a path; None if there is another value."""
    for key in path:
        state = state[key]
    kind = getattr(state, "kind", None)
    if kind is None:
        return None
    name = kind if isinstance(kind, str) else f"{kind.module}.{kind.name}"
    return f"an object of {name}, which only code can create"


def _without(item: Any, path: Path, skip: Sequence[str], left_out: dict[str, str]) -> Any:
    """Return a part of a state without the items that match a glob. In a list, None takes their place."""
    if isinstance(item, tuple):
        return tuple(_without(list(item), path, skip, left_out))
    if not isinstance(item, (dict, list)):
        return item
    for key, child in list(item.items() if isinstance(item, dict) else enumerate(item)):
        why = find_skip_reason((*path, key), skip)
        if why is None:
            item[key] = _without(child, (*path, key), skip, left_out)
            continue
        left_out[format_path((*path, key))] = why
        if isinstance(item, dict):
            del item[key]
        else:
            item[key] = None
    return item


def _without_path(item: Any, path: Path) -> Any:
    """Return a part of a state without the item at a path."""
    key = path[0]
    if isinstance(item, tuple):
        return tuple(_without_path(list(item), path))
    if len(path) > 1:
        item[key] = _without_path(item[key], path[1:])
    elif isinstance(item, dict):
        del item[key]
    else:
        item[key] = None
    return item


class OpenFile:
    """A file that storages read, by its descriptor. It is closed when the last reference is dropped."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self._fd = fd

    @property
    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    @property
    def nbytes(self) -> int:
        """The current length of the file."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a copy of these bytes.

        Raises:
            CorruptError: The file ends before them.
        """
        buffer = memoryview(bytearray(nbytes))
        done = 0
        while done < nbytes:
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise CorruptError("the file ends early, or became shorter while it was read", where=self.name)
            done += count
        return buffer

    def close(self) -> None:
        """Close the descriptor; repeated calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class FileStorage:
    """A storage whose bytes are a range of a file."""

    file: OpenFile
    offset: int
    nbytes: int
    element_width: int
    is_float: bool
    is_host: bool = False
    """False, because reading makes a copy, as it does for device memory."""

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``."""
        assert 0 <= lo <= hi <= self.nbytes, "a storage is read within its bounds"
        return self.file.read(self.offset + lo, hi - lo)


def digest_of(captured: Captured) -> bytes:
    """Return a digest of a state. Two states with the same digest have the same keys, values and bytes."""
    digest = hashlib.sha256(encode_tree(captured.tree))
    for spec in captured.tensors:
        digest.update(repr(spec).encode())
    for storage in captured.storages:
        digest.update(f"{storage.nbytes}:".encode())
        for lo in range(0, storage.nbytes, _BLOCK_NBYTES):
            digest.update(storage.read(lo, min(lo + _BLOCK_NBYTES, storage.nbytes)))
    return digest.digest()


def join_parts(parts: Iterable[tuple[str, Captured]]) -> Captured:
    """Return one state that holds each part under its key."""
    keys: list[Key] = []
    nodes: list[Node] = []
    tensors: list[TensorSpec] = []
    storages: list[HostStorage] = []
    warnings: list[str] = []
    for key, part in parts:
        keys.append(key)
        nodes.append(_renumbered(part.tree, len(tensors)))
        tensors += [replace(spec, storage=spec.storage + len(storages)) for spec in part.tensors]
        storages += part.storages
        warnings += part.warnings
    return Captured(DictNode("dict", tuple(keys), tuple(nodes)), [], tensors, storages, warnings)


def merge_shards(parts: Sequence[Captured], *, where: str) -> Captured:
    """Return one dict with the keys of all shards, in order.

    Raises:
        CorruptError: A shard is not a dict, or two shards have the same key.
    """
    if len(parts) == 1:
        return parts[0]
    whole = join_parts((str(index), part) for index, part in enumerate(parts))
    assert isinstance(whole.tree, DictNode), "join_parts states make a dict"
    keys: list[Key] = []
    children: list[Node] = []
    for shard in whole.tree.children:
        if not isinstance(shard, DictNode):
            raise CorruptError("a shard is not a dict, so its keys cannot be merge_shards", where=where)
        keys += shard.keys
        children += shard.children
    if len(set(keys)) != len(keys):
        raise CorruptError("two shards contain the same key", where=where)
    return replace(whole, tree=DictNode("dict", tuple(keys), tuple(children)))


def _renumbered(node: Node, first: int) -> Node:
    if isinstance(node, TensorNode):
        return replace(node, tensor=node.tensor + first)
    if isinstance(node, ConvertedNode):
        return ConvertedNode(node.name, _renumbered(node.child, first))
    if isinstance(node, (ListNode, TupleNode)):
        return type(node)(tuple(_renumbered(child, first) for child in node.children))
    if isinstance(node, DictNode):
        metadata = None if node.metadata is None else _renumbered(node.metadata, first)
        children = tuple(_renumbered(child, first) for child in node.children)
        return replace(node, children=children, metadata=metadata)
    return node
