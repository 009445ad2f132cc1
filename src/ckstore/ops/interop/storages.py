"""Bytes of foreign tensors, read from a file as they are needed, and states put together from parts.

Invariants:
- Nothing is mapped: a file that shrinks while it is read is an error, and no signal ends the process.
- What is handed out is a copy that nobody else can change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckstore.errors import CorruptError
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import ConvertedNode, DictNode, Key, ListNode, Node, TensorNode, TupleNode, encode_tree
from ckstore.state.capture import Captured
from ckstore.state.tensors import HostStorage

_BLOCK_NBYTES = 4 << 20


class OpenFile:
    """A file that storages read from, by its descriptor; closed when it is let go of."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self._fd = fd

    @property
    def fileno(self) -> int:
        """Its descriptor."""
        return self._fd

    @property
    def nbytes(self) -> int:
        """How long it is now."""
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
                raise CorruptError("the file ends early, or was cut while it was read", where=self.name)
            done += count
        return buffer

    def close(self) -> None:
        """Let go of the descriptor; repeated calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class FileStorage:
    """A storage whose bytes lie in a file."""

    file: OpenFile
    offset: int
    nbytes: int
    element_width: int
    is_float: bool
    is_host: bool = False
    """Reading makes a copy, as of a device's memory."""

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``."""
        assert 0 <= lo <= hi <= self.nbytes, "a storage is read within its bounds"
        return self.file.read(self.offset + lo, hi - lo)


def digest_of(captured: Captured) -> bytes:
    """Return a digest of a state: two with the same one hold the same keys, values and bytes."""
    digest = hashlib.sha256(encode_tree(captured.tree))
    for spec in captured.tensors:
        digest.update(repr(spec).encode())
    for storage in captured.storages:
        digest.update(f"{storage.nbytes}:".encode())
        for lo in range(0, storage.nbytes, _BLOCK_NBYTES):
            digest.update(storage.read(lo, min(lo + _BLOCK_NBYTES, storage.nbytes)))
    return digest.digest()


def joined(parts: Iterable[tuple[str, Captured]]) -> Captured:
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


def merged(parts: Sequence[Captured], *, where: str) -> Captured:
    """Return one state of the shards of a dict: all of their keys, in order.

    Raises:
        CorruptError: A shard is no dict, or a key stands in two of them.
    """
    if len(parts) == 1:
        return parts[0]
    whole = joined((str(index), part) for index, part in enumerate(parts))
    assert isinstance(whole.tree, DictNode), "joined states make a dict"
    keys: list[Key] = []
    children: list[Node] = []
    for shard in whole.tree.children:
        if not isinstance(shard, DictNode):
            raise CorruptError("a shard of a state holds no dict", where=where)
        keys += shard.keys
        children += shard.children
    if len(set(keys)) != len(keys):
        raise CorruptError("two shards of a state have one key", where=where)
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
