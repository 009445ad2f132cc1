"""Decode the frames that need bases, each once, along the trees that bases and what rests on them make.

A tree is walked from its root, each frame decoded onto its base. Where several frames rest on one, the base is copied
for all but the one with the most beneath it; where that would take too many copies, it is decoded again from the root.
So memory is bounded, and the work grows with the number of frames, not with the square of it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass

from ckstore.errors import BackendError, ChecksumError, CorruptError, MissingChunkError, UnsupportedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, decode_frame_header
from ckstore.hashing import NO_BASE, PackId
from ckstore.io.backend import ReadFile
from ckstore.io.block_writer import copy_plain
from ckstore.io.buffers import BufferPool, map_zeros
from ckstore.ops.verify_packs import Audit
from ckstore.store.damage import FramePosition, Uses
from ckstore.store.pack_reader import open_pack, read_buffer_nbytes, read_frame

COPIES_MAX = 2
"""Copies of bases that one thread keeps, beside the one that is being worked on."""

NESTED_MAX = 64
"""Frames upon frames that one walk goes down with copies kept on the way."""

OPEN_MAX = 16
"""Packs that one thread keeps open."""

Node = tuple[PackId, FramePosition]
"""A frame: its pack, and its place in it."""


class ChainAudit:
    """All frames that need a base, in trees.

    Args:
        uses: What the manifests need.
    """

    def __init__(self, uses: Uses) -> None:
        self.base_of: dict[Node, Node] = {
            (pack_id, place): base for pack_id, pack in uses.packs.items() for place, base in pack.bases.items()
        }
        self.resting_on: dict[Node, list[Node]] = {}
        for node, base in self.base_of.items():
            self.resting_on.setdefault(base, []).append(node)
        self.roots = sorted(base for base in self.resting_on if base not in self.base_of)
        self._order_by_height()

    @property
    def nbytes(self) -> int:
        """Bytes that will be read, about."""
        nodes = (*self.roots, *self.base_of)
        return sum(FRAME_HEADER_NBYTES + stored_nbytes for _, (_, _, stored_nbytes) in nodes)

    def run(self, audit: Audit) -> None:
        """Decode every frame of every tree, and add what is wrong to the report."""
        limits = audit.repository.limits
        walk_nbytes = audit.check_nbytes + (COPIES_MAX + 1) * limits.chunk_nbytes_max + read_buffer_nbytes(limits)
        thread_count, _ = audit.fit(read_buffer_nbytes(limits), check_nbytes=walk_nbytes)
        inbox: queue.SimpleQueue[Node | None] = queue.SimpleQueue()
        for root in self.roots:
            inbox.put(root)
        threads = [
            threading.Thread(target=self._work, args=(audit, inbox), name="ckstore-verify", daemon=True)
            for _ in range(min(thread_count, len(self.roots)))
        ]
        for thread in threads:
            inbox.put(None)
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, audit: Audit, inbox: queue.SimpleQueue[Node | None]) -> None:
        try:
            with BufferPool(read_buffer_nbytes(audit.repository.limits), 1) as pool:
                walk = _Walk(self, audit, pool)
                try:
                    while audit.stop.error is None and (root := inbox.get()) is not None:
                        walk.run(root)
                finally:
                    walk.close()
        except BaseException as error:
            audit.stop.note(error)

    def _order_by_height(self) -> None:
        """Put what has the most levels beneath it last, everywhere."""
        height: dict[Node, int] = {}
        reached = list(self.roots)
        for node in reached:
            reached.extend(self.resting_on.get(node, ()))
        for node in reversed(reached):
            above = self.resting_on.get(node, [])
            above.sort(key=lambda other: height[other])
            height[node] = 1 + height[above[-1]] if above else 0


@dataclass(slots=True)
class _Visit:
    """A frame to be decoded onto its base: in which memory that lies, and how far from the last full decoding."""

    node: Node
    base: memoryview | None
    room: memoryview
    depth: int


class _Walk:
    """Walks trees; belongs to one thread."""

    def __init__(self, chains: ChainAudit, audit: Audit, pool: BufferPool) -> None:
        self._chains = chains
        self._audit = audit
        self._pool = pool
        self._check = audit.make_check()
        self._chunk_nbytes_max = audit.repository.limits.chunk_nbytes_max
        self._room = self._new_room()
        self._copies: list[memoryview] | None = None
        self._files: dict[PackId, ReadFile] = {}

    def close(self) -> None:
        """Let go of packs."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def run(self, root: Node) -> None:
        """Decode a tree."""
        again: deque[Node] = deque()
        self._visit(_Visit(root, None, self._room, 0), again)
        while again and self._audit.stop.error is None:
            node = again.popleft()
            base = self._decode_chain(self._chains.base_of[node])
            if base is not None:
                self._visit(_Visit(node, base, self._room, 0), again)

    def _visit(self, visit: _Visit, again: deque[Node]) -> None:
        plain = self._decode(visit.node, visit.base, visit.room)
        resting = self._chains.resting_on.get(visit.node, [])
        if plain is None or not resting or self._audit.stop.error is not None:
            # What rests on a damaged frame is not looked at: its checkpoints need the damaged one as well.
            return
        if self._copies is None:
            self._copies = [self._new_room() for _ in range(COPIES_MAX)]
        for node in resting[:-1]:
            if not self._copies or visit.depth >= NESTED_MAX:
                again.append(node)
                continue
            room = self._copies.pop()
            base = room[: len(plain)]
            copy_plain(plain, base)
            self._visit(_Visit(node, base, room, visit.depth + 1), again)
            self._copies.append(room)
        if visit.depth >= NESTED_MAX:
            again.append(resting[-1])
        else:
            self._visit(_Visit(resting[-1], plain, visit.room, visit.depth + 1), again)

    def _decode_chain(self, node: Node) -> memoryview | None:
        """Decode a frame again from the root on."""
        chain = [node]
        while (base := self._chains.base_of.get(chain[-1])) is not None:
            chain.append(base)
        plain: memoryview | None = None
        for link in reversed(chain):
            plain = self._decode(link, plain, self._room)
            if plain is None:
                return None
        return plain

    def _decode(self, node: Node, base: memoryview | None, room: memoryview) -> memoryview | None:
        """Return the plain bytes of a frame in ``room``, or None when they are not to be had: that is reported."""
        pack_id, place = node
        if self._audit.is_damaged(pack_id, place):
            return None
        try:
            plain = self._read(node, base)
        except MissingChunkError:
            # The pack was reported as a whole.
            return None
        except (CorruptError, UnsupportedError, BackendError) as error:
            self._audit.add(pack_id, error.what, place[1], place)
            return None
        if plain is not base:
            copy_plain(plain, room[: len(plain)])
        return room[: len(plain)]

    def _read(self, node: Node, base: memoryview | None) -> memoryview:
        pack_id, (_, offset, stored_nbytes) = node
        repository = self._audit.repository
        nbytes = FRAME_HEADER_NBYTES + stored_nbytes
        result = read_frame(repository.backend, self._file(pack_id), offset, nbytes, self._pool)
        try:
            header = decode_frame_header(result.view[:FRAME_HEADER_NBYTES], limits=repository.limits)
            self._check_ids(header, node)
            plain = self._check(header, result.view[FRAME_HEADER_NBYTES:], base)
        finally:
            result.release()
        with self._audit.lock:
            self._audit.report.bytes_read += nbytes
        self._audit.tell()
        return plain

    def _check_ids(self, header: FrameHeader, node: Node) -> None:
        base = self._chains.base_of.get(node)
        if (header.chunk_id, header.base_id) != (node[1][0], NO_BASE if base is None else base[1][0]):
            raise ChecksumError("another frame lies where the manifest locates this one")

    def _file(self, pack_id: PackId) -> ReadFile:
        file = self._files.get(pack_id)
        if file is None:
            if len(self._files) >= OPEN_MAX:
                self._files.pop(next(iter(self._files))).close()
            ref = next(iter(self._audit.uses.packs[pack_id].refs.values()))
            file = self._files[pack_id] = open_pack(self._audit.repository, ref)
        return file

    def _new_room(self) -> memoryview:
        return map_zeros(self._chunk_nbytes_max)
