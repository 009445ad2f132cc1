"""The ordering rules of a commit, as functions over the record of a SimFS.

The rules say what must be durable before what: they find a missing sync in one run, without a single crash.
A violation is a sentence; no violation is an empty list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from support.simfs import FOLDER, Op

_REPLACEABLE = re.compile(r"(tags|leases)/|config\.json$")
_KEPT_FOR_EVER = re.compile(r"claims/[^/]+/[0-9]+(\.dropped)?$")
_MANIFEST = re.compile(r"manifests/([^/]+)/([0-9]+)-[0-9]+\.([0-9]+)\.ckm$")


def order_violations(log: Sequence[Op]) -> list[str]:
    """Return every breach of the ordering rules.

    - A manifest is published by a link or a rename that replaces nothing, never written in place.
    - When it is published its bytes, every pack's bytes and names, and the claim of its seq are durable.
    - When a test notes an acknowledgement, the names in all folders of manifests are durable.
    - A pack is not changed after its sync; a file whose sync failed is never synced again.
    - A generation of a manifest is moved away when no higher one is there, or that one, or the drop mark, is durable.
    - Only tags, leases and the configuration are ever replaced; claims and drop marks are never removed.
    """
    walk = _Walk()
    return [f"step {index} ({op.call} {op.path}): {what}" for index, op in enumerate(log) for what in walk.step(op)]


class _Walk:
    """What is in place, and what of it no sync has covered."""

    def __init__(self) -> None:
        self.unsynced_names: dict[str, Op] = {}
        self.unsynced_data: set[int] = set()
        self.synced_data: set[int] = set()
        self.failed: set[int] = set()
        self.nodes: dict[str, int] = {}

    def step(self, op: Op) -> Iterator[str]:
        """Take one step and say what is wrong with it."""
        if op.kind == "entry":
            yield from self._entry(op)
        elif op.kind in ("write", "cut"):
            assert op.node is not None
            if op.node in self.synced_data and op.call.startswith("pack."):
                yield "a pack is changed after its sync"
            self.unsynced_data.add(op.node)
        elif op.kind == "sync data":
            assert op.node is not None
            if op.node in self.failed:
                yield "a file whose sync failed is synced again"
            self.unsynced_data.discard(op.node)
            self.synced_data.add(op.node)
        elif op.kind == "lose data":
            assert op.node is not None
            self.failed.add(op.node)
        elif op.kind == "sync folder":
            self.unsynced_names = {path: e for path, e in self.unsynced_names.items() if e.folder != op.folder}
        elif op.kind == "note":
            for path, entry in self.unsynced_names.items():
                if _MANIFEST.match(path) and entry.node is not None:
                    yield f"acknowledged while the name {path} is not durable"

    def _entry(self, op: Op) -> Iterator[str]:
        path = op.path
        if op.node is None:
            if _KEPT_FOR_EVER.match(path):
                yield "a claim or drop mark is removed"
            if _MANIFEST.match(path) and op.call == "unlink":
                yield "a manifest is unlinked in place instead of moved"
            yield from self._supersede(path)
            self.nodes.pop(path, None)
        else:
            if path in self.nodes and self.nodes[path] != FOLDER and not _REPLACEABLE.match(path):
                yield "a name is replaced"
            if _MANIFEST.match(path):
                yield from self._publish(op)
            self.nodes[path] = op.node
        self.unsynced_names[path] = op

    def _supersede(self, path: str) -> Iterator[str]:
        moved = _MANIFEST.match(path)
        if moved is None:
            return
        run, seq, generation = moved.groups()
        mark = f"claims/{run}/{seq}.dropped"
        if mark in self.nodes and mark not in self.unsynced_names:
            return
        for other in self.nodes:
            found = _MANIFEST.match(other)
            is_higher = found and found.groups()[:2] == (run, seq) and int(found[3]) > int(generation)
            if is_higher and other in self.unsynced_names:
                yield f"moved away while the name {other} is not durable"

    def _publish(self, op: Op) -> Iterator[str]:
        if op.call not in ("link", "rename_new"):
            yield f"a manifest gets its name by {op.call}"
        if op.node in self.unsynced_data:
            yield "published before its bytes are durable"
        claim = f"claims/{op.folder.split('/')[-1]}/{op.name.split('-')[0]}"
        if claim in self.unsynced_names:
            yield f"published before the claim {claim} is durable"
        for path, node in self.nodes.items():
            if path.startswith("packs/") and node != FOLDER:
                if node in self.unsynced_data or (node not in self.synced_data):
                    yield f"published while the bytes of {path} are not durable"
                if path in self.unsynced_names:
                    yield f"published while the name {path} is not durable"
        for path, entry in self.unsynced_names.items():
            if entry.node == FOLDER and (op.folder == path or path.startswith("packs/")):
                yield f"published while the folder {path} is not durable"
