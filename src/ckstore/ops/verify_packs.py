"""Check packs and their frames against what manifests say. ``verify`` runs these audits.

``Audit`` is what the audits of one verify share. ``PackAudit`` checks one pack: its ends, its directory, and every byte
of its frames. ``ChainAudit`` then decodes the frames that need a base, each once:

Bases and the frames that need them form trees. A tree is walked from its root, decoding each frame with its base. If
several frames need one base, the base is copied for all but the one with the deepest subtree. If that would need too
many copies, the base is decoded again from the root. So memory is bounded, and the work grows linearly with the number
of frames.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.config import Policy
from ckstore.errors import (
    BackendError,
    ChecksumError,
    CorruptError,
    MalformedError,
    MissingChunkError,
    UnsupportedError,
    is_refused,
)
from ckstore.format import paths
from ckstore.format.frame import FRAME_ALIGN, FRAME_HEADER_NBYTES, FrameHeader, check_payload, decode_frame_header
from ckstore.format.pack import (
    SUPERHEADER_NBYTES,
    TAIL_NBYTES,
    DirectoryEntry,
    PackDirectory,
    PackTail,
    check_entry,
    decode_directory,
    decode_superheader,
    decode_tail,
)
from ckstore.format.wire import BLOCK_NBYTES, is_zero
from ckstore.hashing import NO_BASE, PackId
from ckstore.io.backend import Backend, ReadFile, ReadRequest, ReadResult
from ckstore.io.block_writer import copy_plain
from ckstore.io.buffers import BufferPool, map_zeros
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.damage import AffectedTensors, Damage, FramePosition, PackUses, Report, Uses, label_of
from ckstore.store.memory_budget import CHECKSUM, DECODE, REREAD, read_buffer_nbytes
from ckstore.store.pack_reader import open_pack, read_frame, read_ranges, readable_from
from ckstore.store.repository import Repository


@dataclass(slots=True)
class Stop:
    """Ends an audit early. ``error`` is the first failure of the checking itself."""

    error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Record an error, unless there is one already."""
        self.error = self.error or error


@dataclass(slots=True, eq=False)
class Audit:
    """The shared state of one verify.

    Args:
        repository: The store.
        uses: What the manifests need.
        report: Receives the damage found.
        policy: Number of threads, and memory for them and for read buffers.
        tell: Called after each read and each pack.
        is_partial: Only some checkpoints are checked. Damage that affects none of them is not reported.
        is_remote: Also read packs that are only in other tiers.
    """

    repository: Repository
    uses: Uses
    report: Report
    policy: Policy
    tell: Callable[[], None]
    is_partial: bool
    is_remote: bool = False
    stop: Stop = field(default_factory=Stop)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _damaged: set[tuple[PackId, FramePosition]] = field(default_factory=set)
    _affected: AffectedTensors = field(init=False)

    def __post_init__(self) -> None:
        self._affected = AffectedTensors(self.repository)

    def add(
        self,
        pack_id: PackId,
        what: str,
        offset: int | None = None,
        place: FramePosition | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Report damage of a frame, or of a whole pack, with the checkpoints that need it."""
        uses = self.uses.packs[pack_id]
        hit = list(uses.refs) if place is None else uses.places.get(place, [])
        if self.is_partial and not hit:
            # Only checkpoints that were not selected need this frame.
            return
        where = self.home_of(pack_id).location_of(paths.pack_name(pack_id))
        if offset is not None:
            where = f"{where}, offset {offset}"
        checkpoints = tuple(label_of(self.uses.names[index]) for index in hit)
        with self.lock:
            if place is not None:
                self._damaged.add((pack_id, place))
            tensors = self._tensors_of(hit, pack_id, place)
            self.report.add(Damage(what, where, checkpoints, tensors), error)

    def home_of(self, pack_id: PackId) -> Backend:
        """Return the backend of a pack according to manifests: the store itself if one of them says so."""
        tiers = {ref.tier for ref in self.uses.packs[pack_id].refs.values()}
        if tiers & {LOCAL_TIER, LOST_TIER}:
            return self.repository.backend
        return self.repository.tiers.open(min(tiers))

    def is_damaged(self, pack_id: PackId, place: FramePosition) -> bool:
        """Return whether damage of this frame was already reported."""
        return (pack_id, place) in self._damaged

    def _tensors_of(self, hit: list[int], pack_id: PackId, place: FramePosition | None) -> tuple[str, ...]:
        if not hit:
            return ()
        name = self.uses.names[hit[0]]
        if place is None:
            return self._affected.of_pack(name, pack_id)
        return self._affected.of_frame(name, place[0])


@dataclass(slots=True)
class _Span:
    """Consecutive frames covered by one read, including the padding after the last."""

    offset: int
    nbytes: int
    entries: tuple[DirectoryEntry, ...]


class PackAudit:
    """Check one pack.

    Args:
        audit: The verify that this belongs to.
        pack_id: The pack.
    """

    def __init__(self, audit: Audit, pack_id: PackId) -> None:
        self._audit = audit
        self._repository = audit.repository
        self._pack_id = pack_id
        self._uses: PackUses = audit.uses.packs[pack_id]
        self._report = audit.report

    def run(self) -> None:
        """Check the pack, and report its damage."""
        self._report.pack_count += 1
        try:
            file = self._open()
        except BackendError as error:
            if not is_refused(error):
                raise
            self._audit.add(self._pack_id, error.what, error=error)
            return
        if file is None:
            is_lost = all(ref.tier == LOST_TIER for ref in self._uses.refs.values())
            self._report.files_torn += not is_lost
            self._add("chunks are lost (recorded by a repair)" if is_lost else "the pack is missing")
            return
        try:
            self.check(file)
        except (CorruptError, UnsupportedError, BackendError) as error:
            self._report.files_torn += isinstance(error, CorruptError)
            self._audit.add(self._pack_id, error.what, error=error)
        finally:
            file.close()

    def check(self, file: ReadFile) -> None:
        """Check any file that should be this pack, and report damaged frames.

        Raises:
            CorruptError: Its ends are damaged, so its frames cannot be located.
            UnsupportedError: A newer ckstore wrote it.
            BackendError: The storage cannot read it.
        """
        tail, directory = self._check_ends(file)
        self._check_uses(directory)
        if self._report.level != "quick":
            self._check_frames(file, tail, directory)

    def _open(self) -> ReadFile | None:
        for name in self._repository.trash.paths_of(self._pack_id):
            try:
                return self._repository.backend.open_read(name)
            except FileNotFoundError:
                continue
        home = self._audit.home_of(self._pack_id)
        if home is not self._repository.backend:
            with contextlib.suppress(FileNotFoundError):
                return readable_from(self._repository.backend, home, home.open_read(paths.pack_name(self._pack_id)))
        return None

    def _check_ends(self, file: ReadFile) -> tuple[PackTail, PackDirectory]:
        store_id, limits = self._repository.store_id, self._repository.limits
        decode_superheader(file.read_at(0, SUPERHEADER_NBYTES), store_id=store_id, pack_id=self._pack_id)
        tail = decode_tail(
            file.read_at(max(0, file.nbytes - TAIL_NBYTES), TAIL_NBYTES),
            pack_nbytes=file.nbytes,
            store_id=store_id,
            pack_id=self._pack_id,
            limits=limits,
        )
        end = file.nbytes - TAIL_NBYTES
        stored = file.read_at(tail.directory_offset, end - tail.directory_offset)
        directory = decode_directory(stored[: tail.directory_nbytes], tail, limits=limits)
        if not is_zero(memoryview(stored)[tail.directory_nbytes :]):
            raise MalformedError("the padding after the directory is not zero")
        self._report.bytes_read += SUPERHEADER_NBYTES + len(stored) + TAIL_NBYTES
        for index, ref in self._uses.refs.items():
            if (ref.nbytes, ref.directory_digest) != (file.nbytes, tail.directory_digest):
                checkpoint = label_of(self._audit.uses.names[index])
                raise MalformedError(f"size or directory differs from what the manifest of {checkpoint} says")
        return tail, directory

    def _check_uses(self, directory: PackDirectory) -> None:
        there = {_place_of(entry): entry.base_id for entry in directory.entries}
        for place in self._uses.places:
            chunk_id, offset, _ = place
            base = self._uses.bases.get(place)
            if place not in there:
                self._add(f"chunk {chunk_id.hex()[:16]} is not where the manifest says", offset, place)
            elif place in self._uses.disputed or there[place] != (NO_BASE if base is None else base[1][0]):
                self._add(f"chunk {chunk_id.hex()[:16]} has another base than the manifest says", offset, place)

    def _check_frames(self, file: ReadFile, tail: PackTail, directory: PackDirectory) -> None:
        spans = list(self._spans(tail, directory))
        nbytes = max((span.nbytes for span in spans), default=0) + 2 * BLOCK_NBYTES
        nbytes = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        budget = DECODE if self._decodes else CHECKSUM
        thread_count, buffer_count = budget.fit_reading(
            self._audit.policy, self._repository.limits, buffer_nbytes=nbytes
        )
        inbox: queue.SimpleQueue[ReadResult | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._work, args=(inbox, spans), name="ckstore-verify", daemon=True)
            for _ in range(min(thread_count, len(spans)))
        ]
        with BufferPool(nbytes, min(buffer_count, len(spans) + 1)) as pool:
            for thread in threads:
                thread.start()
            requests = (ReadRequest(file, span.offset, span.nbytes, tag) for tag, span in enumerate(spans))
            try:
                for result in read_ranges(self._repository.backend, requests, pool):
                    self._report.bytes_read += len(result.view)
                    inbox.put(result)
                    self._audit.tell()
                    if self._audit.stop.error is not None:
                        break
            finally:
                for _ in threads:
                    inbox.put(None)
                for thread in threads:
                    thread.join()
        if self._audit.stop.error is not None:
            raise self._audit.stop.error

    def _spans(self, tail: PackTail, directory: PackDirectory) -> Iterator[_Span]:
        """Group frames into reads. Each read ends where the next begins, so that no byte is skipped."""
        span_nbytes_max = self._repository.limits.chunk_nbytes_max + BLOCK_NBYTES
        begins = [entry.offset for entry in directory.entries]
        ends = [*begins[1:], tail.directory_offset]
        group: list[DirectoryEntry] = []
        behind = SUPERHEADER_NBYTES
        for entry, end in zip(directory.entries, ends, strict=True):
            gap = entry.offset - behind
            if gap >= FRAME_ALIGN:
                raise MalformedError(f"{gap} bytes before offset {entry.offset} belong to no frame")
            behind = entry.end
            if group and end - group[0].offset > span_nbytes_max:
                yield _Span(group[0].offset, entry.offset - group[0].offset, tuple(group))
                group = []
            group.append(entry)
        if tail.directory_offset - behind >= BLOCK_NBYTES:
            raise MalformedError(f"{tail.directory_offset - behind} bytes before the directory belong to no frame")
        if group:
            yield _Span(group[0].offset, tail.directory_offset - group[0].offset, tuple(group))

    def _work(self, inbox: queue.SimpleQueue[ReadResult | None], spans: Sequence[_Span]) -> None:
        decoder = FrameDecoder(self._repository.limits.chunk_nbytes_max) if self._decodes else None
        while (result := inbox.get()) is not None:
            try:
                # After a failure, only release the buffers, so that the reader does not wait for them.
                if self._audit.stop.error is None:
                    self._check_span(spans[result.tag], result.view, decoder)
            except BaseException as error:
                self._audit.stop.note(error)
            finally:
                result.release()

    def _check_span(self, span: _Span, view: memoryview, decoder: FrameDecoder | None) -> None:
        if len(view) != span.nbytes:
            self._add("the pack ends early", span.offset + len(view))
            return
        ends = [*(entry.offset for entry in span.entries[1:]), span.offset + span.nbytes]
        for entry, end in zip(span.entries, ends, strict=True):
            begin = entry.offset - span.offset
            frame = view[begin : begin + FRAME_HEADER_NBYTES + entry.stored_nbytes]
            try:
                header = decode_frame_header(frame[:FRAME_HEADER_NBYTES], limits=self._repository.limits)
                check_entry(entry, header)
                payload = frame[FRAME_HEADER_NBYTES:]
                check_payload(header, payload)
                if not is_zero(view[entry.end - span.offset : end - span.offset]):
                    raise MalformedError("the padding after a frame is not zero")
                # Frames that need a base are decoded after all packs were read.
                if decoder is not None and not header.has_base:
                    decoder.check_frame(header, payload)
            except (CorruptError, UnsupportedError) as error:
                self._add(error.what, entry.offset, _place_of(entry))
            with self._audit.lock:
                self._report.frame_count += 1

    @property
    def _decodes(self) -> bool:
        return self._report.level == "decode"

    def _add(self, what: str, offset: int | None = None, place: FramePosition | None = None) -> None:
        self._audit.add(self._pack_id, what, offset, place)


def _place_of(entry: DirectoryEntry) -> FramePosition:
    return entry.chunk_id, entry.offset, entry.stored_nbytes


COPIES_MAX = 2
"""Copies of bases per thread, in addition to the frame being decoded. ``REREAD`` counts them."""

NESTED_MAX = 64
"""Depth to which one walk recurses with copies kept on the way."""

OPEN_MAX = 16
"""Packs that one thread keeps open."""

Node = tuple[PackId, FramePosition]
"""A frame, by pack and location."""


class ChainAudit:
    """Decode all frames that need a base.

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
        """Estimated bytes to read."""
        nodes = (*self.roots, *self.base_of)
        return sum(FRAME_HEADER_NBYTES + stored_nbytes for _, (_, _, stored_nbytes) in nodes)

    def run(self, audit: Audit) -> None:
        """Decode every frame of every tree, and report damage."""
        thread_count = REREAD.fit_threads(audit.policy, audit.repository.limits)
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
        """Sort the frames on each base by the height of their subtrees, highest last."""
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
    """A frame to decode with its base, the memory to decode into, and the depth since the last full decode."""

    node: Node
    base: memoryview | None
    room: memoryview
    depth: int


class _Walk:
    """Walk trees. Used by one thread."""

    def __init__(self, chains: ChainAudit, audit: Audit, pool: BufferPool) -> None:
        self._chains = chains
        self._audit = audit
        self._pool = pool
        self._chunk_nbytes_max = audit.repository.limits.chunk_nbytes_max
        self._decoder = FrameDecoder(self._chunk_nbytes_max)
        self._room = self._new_room()
        self._copies: list[memoryview] | None = None
        self._files: dict[PackId, ReadFile] = {}

    def close(self) -> None:
        """Close packs."""
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
            # Frames on a damaged base are skipped: their checkpoints need the damaged frame as well, and are already
            # reported.
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
        """Decode a frame again, starting from the root."""
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
        """Return the plain bytes of a frame in ``room``; None, after reporting it, if it is damaged."""
        pack_id, place = node
        if self._audit.is_damaged(pack_id, place):
            return None
        try:
            plain = self._read(node, base)
        except MissingChunkError:
            # The whole pack was already reported.
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
            plain = self._decoder.check_frame(header, result.view[FRAME_HEADER_NBYTES:], base)
        finally:
            result.release()
        with self._audit.lock:
            self._audit.report.bytes_read += nbytes
        self._audit.tell()
        return plain

    def _check_ids(self, header: FrameHeader, node: Node) -> None:
        base = self._chains.base_of.get(node)
        if (header.chunk_id, header.base_id) != (node[1][0], NO_BASE if base is None else base[1][0]):
            raise ChecksumError("another frame is where the manifest locates this one")

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
