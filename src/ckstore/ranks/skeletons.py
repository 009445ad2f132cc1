"""Decode the skeletons of all ranks of a commit quickly: what is equal is decoded once, and is one object.

Ranks differ in a few plain values, such as the position of a data loader. Their tables are equal, and most parts of
their trees. ``union.py`` merges parts that are one object without looking into them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckstore.concurrency import collector_paused
from ckstore.errors import MalformedError
from ckstore.format.records import encode_inner, encoded_items, raw
from ckstore.format.tree import DEPTH_MAX, DictNode, Node, check_tree, decode_tree
from ckstore.hashing import digest_of
from ckstore.ranks.part import Skeleton

if TYPE_CHECKING:
    from typing_extensions import Buffer

_KEY_NBYTES_MAX = 256
"""Longer encodings are remembered by their digest."""

_PLAIN_MAPPING = b"\x96\x00"
"""How the encoding of a mapping begins: an array of six items, of which the first is 0."""


class SkeletonDecoder:
    """Decodes skeletons, and remembers those of the last two commits."""

    def __init__(self) -> None:
        self._tables: dict[bytes, tuple[Skeleton, _Trees]] = {}
        self._before: dict[bytes, tuple[Skeleton, _Trees]] = {}

    def begin(self) -> None:
        """Begin a commit: forget what neither this nor the last one used."""
        self._before, self._tables = self._tables, {}

    def decode(self, content: Buffer, *, where: object = None) -> Skeleton:
        """Decode a skeleton that another rank has sent. Raises as ``Skeleton.decode``."""
        plain, tree_nbytes = Skeleton.opened(content, where=where)
        digest = digest_of(plain[tree_nbytes:])
        with collector_paused():
            known = self._tables.get(digest) or self._before.get(digest)
            if known is None:
                first = Skeleton.decode(content, where=where)
                known = first, _Trees(len(first.tensors))
            if digest not in self._tables:
                known[1].begin()
                self._tables[digest] = known
            tree = known[1].decode(bytes(plain[:tree_nbytes]), where)
            found = replace(known[0], tree=tree)
        # Computing them again would encode everything again.
        found.__dict__.update(digest=digest_of(plain), tables_digest=digest, tables=known[0].tables)
        return found


class _Trees:
    """Decodes trees whose tensor nodes number the tensors of one table."""

    def __init__(self, tensor_count: int) -> None:
        self._tensor_count = tensor_count
        self._known: dict[bytes, Node] = {}
        self._before: dict[bytes, Node] = {}

    def begin(self) -> None:
        """Forget the nodes that the last commit did not use."""
        self._before, self._known = self._known, {}

    def decode(self, content: bytes, where: object) -> Node:
        """Decode and check a tree."""
        return self._node(content, where, 0)

    def _node(self, content: bytes, where: object, depth: int) -> Node:
        key = content if len(content) <= _KEY_NBYTES_MAX else digest_of(content)
        found = self._known.get(key)
        if found is None:
            found = self._before.get(key) or self._decoded(content, where, depth)
            self._known[key] = found
        return found

    def _decoded(self, content: bytes, where: object, depth: int) -> Node:
        if content[:2] != _PLAIN_MAPPING or depth > DEPTH_MAX:
            node = decode_tree(content, tensor_count=self._tensor_count, where=where)
            check_tree(node, self._tensor_count, depth)
            return node
        kind, name, keys, children, metadata, factory = encoded_items(content, where=where)
        parts = encoded_items(children, where=where)
        # The mapping itself is decoded and checked with other children: each is the first tensor.
        bare = encode_inner([raw(kind), raw(name), raw(keys), [0] * len(parts), raw(metadata), raw(factory)])
        count = max(self._tensor_count, 1)
        node = decode_tree(bare, tensor_count=count, where=where)
        check_tree(node, count, depth)
        if not isinstance(node, DictNode):
            raise MalformedError("the state tree has a mapping of unknown form", where=where)
        return replace(node, children=tuple([self._node(part, where, depth + 1) for part in parts]))
