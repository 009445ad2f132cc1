"""The possible bases of the next commit: the chunks of the last acknowledged checkpoint, and the roots of their chains.

Both kinds of base come from one manifest. At each position of the state it has the *previous* chunk, and at the root
of that chunk's delta chain the *keyframe* chunk. No other manifest is needed, so deleting checkpoints changes nothing.

Invariants:
- A base is always a chunk that an acknowledged manifest locates in the local tier.
- Bytes held in memory were hashed in this memory, and their checksum is compared before each use. A base that changed
  in memory would make frames that cannot be decoded.
- When a commit has ended, bytes in an arena are held for at most one ticket, so that all other slots can be reused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckstore.delta.cost_model import BaseKind
from ckstore.format.location import Decisions, StorageDecision
from ckstore.format.manifest import Manifest
from ckstore.format.many_ranks import is_many, plain_manifest
from ckstore.format.piece_rows import chunk_starts
from ckstore.format.tree import Node, Path, TensorNode, leaves_of
from ckstore.format.wire import xxh3_64
from ckstore.hashing import ChunkId, chunk_id_of
from ckstore.store.chunk_index import ChunkIndex, LocatedFrame

ChunkPosition = tuple[Path, int]
"""A storage, named by the path of the first tensor that views it, and a byte offset in it."""


@dataclass(frozen=True, slots=True)
class BaseChunk:
    """A chunk that may serve as base for a chunk of the same length with the same kind of elements."""

    chunk_id: ChunkId
    nbytes: int
    element_width: int
    is_float: bool


@dataclass(frozen=True, slots=True)
class _Held:
    plain: memoryview
    xxh3: int
    ticket: int | None = None
    """The arena slot that contains the bytes; None for bytes on the heap, which count against the bound."""

    @property
    def heap_nbytes(self) -> int:
        """Bytes on the heap."""
        return len(self.plain) if self.ticket is None else 0


class BaseCache:
    """What one handle keeps from one commit for the next: chunks, samples, checksums and plain bytes.

    Holding and reading plain bytes, ``is_familiar``, and the methods for checksums are thread-safe, for the threads of
    one commit. Everything else is called by one thread, before or after these.

    Attributes:
        seq: The checkpoint that the bases belong to; None if there is none.
        decisions: How that checkpoint was stored.
        held_nbytes_peak: Most bytes that were held on the heap at one time since the last commit began.
    """

    def __init__(self) -> None:
        self.seq: int | None = None
        self.decisions: Decisions | None = None
        self._previous: dict[ChunkPosition, BaseChunk] = {}
        self._decision_at: dict[Path, StorageDecision] = {}
        self._lossy_depth_at: dict[Path, int] = {}
        self._samples: dict[ChunkId, bytes] = {}
        self._roots: dict[ChunkId, ChunkId] = {}
        self._checksums: dict[ChunkId, int] = {}
        self._openings: set[int] = set()
        self._openings_before: set[int] = set()
        self._held: dict[ChunkId, _Held] = {}
        self._drafts: dict[ChunkId, _Held] = {}
        self._lock = threading.Lock()
        self._nbytes_max: int | None = None
        self._drafts_nbytes = self._held_nbytes = 0
        self.held_nbytes_peak = 0

    def begin(self, nbytes_max: int | None) -> None:
        """Begin a commit, and set the bound on bytes held on the heap; None for no bound."""
        with self._lock:
            self._nbytes_max = nbytes_max
            on_heap = [chunk_id for chunk_id, held in self._held.items() if held.heap_nbytes]
            for chunk_id in on_heap if nbytes_max is not None else ():
                if self._held_nbytes <= (nbytes_max or 0):
                    break
                self._held_nbytes -= self._held.pop(chunk_id).heap_nbytes
            self.held_nbytes_peak = self._held_nbytes + self._drafts_nbytes

    @property
    def keyframe_seq(self) -> int | None:
        """The seq of the keyframe that the last checkpoint is based on; its own seq if it is a keyframe."""
        is_keyframe = self.decisions is None or self.decisions.keyframe_seq is None
        return self.seq if is_keyframe or self.decisions is None else self.decisions.keyframe_seq

    @property
    def held_nbytes(self) -> int:
        """Bytes of bases held on the heap."""
        return self._held_nbytes + self._drafts_nbytes

    @property
    def staged_nbytes(self) -> int:
        """Bytes of bases held in an arena."""
        return sum(len(held.plain) for held in self._held.values() if held.ticket is not None)

    @property
    def samples_nbytes(self) -> int:
        """Bytes of samples held in memory."""
        return sum(len(sample) for sample in self._samples.values())

    def follow(self, manifest: Manifest, paths: Mapping[int, Path] | None = None, starts: Sequence[int] = ()) -> None:
        """Make an acknowledged checkpoint the source of bases, and drop what its chunks do not need.

        Args:
            manifest: The checkpoint, or the part of it that this rank wrote.
            paths: Its ``first_paths``, if they are known.
            starts: Where each storage of the part begins in the storage of the checkpoint; empty: at 0.
        """
        self.seq, self.decisions = manifest.header.seq, manifest.decisions
        self._openings_before, self._openings = self._openings, set()
        if paths is None:
            tree = plain_manifest(manifest).tree if is_many(manifest.tree) else manifest.tree
            paths = first_paths(tree, [tensor.storage for tensor in manifest.tensors])
        self._previous = dict(_chunks_at(manifest, paths, starts))
        storages = manifest.decisions.storages if manifest.decisions is not None else ()
        self._decision_at = {paths[index]: choice for index, choice in enumerate(storages) if index in paths}
        self._lossy_depth_at = {paths[loss.storage]: loss.hops for loss in manifest.losses if loss.storage in paths}
        self._roots = dict(_roots(manifest))
        needed = {chunk.chunk_id for chunk in self._previous.values()} | set(self._roots.values())
        self._samples = {chunk_id: sample for chunk_id, sample in self._samples.items() if chunk_id in needed}
        self._keep_checksums(needed)
        with self._lock:
            self._held = self._held_from(needed)
            self._held_nbytes = sum(held.heap_nbytes for held in self._held.values())
            self._drafts, self._drafts_nbytes = {}, 0

    def _keep_checksums(self, needed: set[ChunkId]) -> None:
        self._checksums = {chunk_id: xxh3 for chunk_id, xxh3 in self._checksums.items() if chunk_id in needed}

    def _held_from(self, needed: set[ChunkId]) -> dict[ChunkId, _Held]:
        """Return the bytes to hold from now on: for each position the previous chunk's, else its keyframe's."""
        both = {**self._held, **self._drafts}
        chosen: dict[ChunkId, _Held] = {}
        for chunk in self._previous.values():
            for chunk_id in (chunk.chunk_id, self._roots.get(chunk.chunk_id)):
                if chunk_id is not None and chunk_id in both and chunk_id in needed:
                    chosen[chunk_id] = both[chunk_id]
                    break
        return chosen

    def previous_at(self, position: ChunkPosition, nbytes: int, element_width: int, is_float: bool) -> ChunkId | None:
        """Return the previous checkpoint's chunk at a position, if it has this length and these elements."""
        chunk = self._previous.get(position)
        if chunk is None or (chunk.nbytes, chunk.element_width, chunk.is_float) != (nbytes, element_width, is_float):
            return None
        return chunk.chunk_id

    def root_of(self, chunk_id: ChunkId) -> ChunkId | None:
        """Return the chunk at the root of a previous chunk's chain; the chunk itself if it has no base."""
        return self._roots.get(chunk_id)

    def decision_at(self, path: Path) -> StorageDecision | None:
        """Return how the storage at a path was stored last time."""
        return self._decision_at.get(path)

    def lossy_depth_at(self, path: Path | None) -> int:
        """Return how many lossy commits the storage at a path has been through since it was exact."""
        return 0 if path is None else self._lossy_depth_at.get(path, 0)

    @property
    def lossy_depth_max(self) -> int:
        """The largest ``lossy_depth_at`` of all storages; 0 if the last checkpoint was exact."""
        return max(self._lossy_depth_at.values(), default=0)

    def sample_of(self, chunk_id: ChunkId) -> bytes | None:
        """Return the sample of a chunk, if it is in memory."""
        return self._samples.get(chunk_id)

    def keep_sample(self, chunk_id: ChunkId, sample: bytes) -> None:
        """Keep the sample of a chunk that was just committed."""
        self._samples[chunk_id] = sample

    def checksum_of(self, chunk_id: ChunkId) -> int | None:
        """Return the xxh3 of a chunk's plain bytes, if this handle computed it together with the chunk id."""
        return self._checksums.get(chunk_id)

    def forget_checksum(self, chunk_id: ChunkId) -> None:
        """Drop a checksum that the stored bytes do not match, so that BLAKE3 decides next time."""
        self._checksums.pop(chunk_id, None)

    def is_familiar(self, opening: int) -> bool:
        """Say whether a chunk of this or the previous commit began with these bytes; note them for the next one.

        Args:
            opening: The xxh3 of the first bytes of a chunk.
        """
        is_known = opening in self._openings or opening in self._openings_before
        self._openings.add(opening)
        return is_known

    def keep_checksum(self, chunk_id: ChunkId, xxh3: int) -> None:
        """Keep the xxh3 of a chunk, computed together with its id. It checks a base in less time than BLAKE3."""
        self._checksums[chunk_id] = xxh3

    def hold(
        self, chunk_id: ChunkId, plain: memoryview, *, checksum: int | None = None, ticket: int | None = None
    ) -> None:
        """Hold the plain bytes of a chunk. They were hashed in this memory, and nothing else can write to it.

        They are a draft until ``follow`` makes them bases; ``discard_drafts`` drops them. Bytes that would exceed the
        bound are not held and are read from the store when they are needed.

        Args:
            chunk_id: The chunk.
            plain: Its bytes.
            checksum: Their xxh3, if it was computed.
            ticket: The arena slot that contains the bytes; None for memory on the heap.
        """
        held = _Held(plain, xxh3_64(plain) if checksum is None else checksum, ticket)
        with self._lock:
            former = self._drafts.get(chunk_id)
            drafts_nbytes = self._drafts_nbytes + held.heap_nbytes - (former.heap_nbytes if former is not None else 0)
            is_over = self._nbytes_max is not None and self._held_nbytes + drafts_nbytes > self._nbytes_max
            if not (is_over and held.heap_nbytes):
                self._drafts[chunk_id], self._drafts_nbytes = held, drafts_nbytes
                self.held_nbytes_peak = max(self.held_nbytes_peak, self._held_nbytes + drafts_nbytes)

    def hold_read(self, chunk_id: ChunkId, plain: memoryview) -> None:
        """Hold a copy of a base that was read from the store, if the bound and the memory allow it."""
        with self._lock:
            needed = self._held_nbytes + self._drafts_nbytes + len(plain)
            if chunk_id in self._drafts or (self._nbytes_max is not None and needed > self._nbytes_max):
                return
        copy = _copy_of(plain)
        if copy is not None and chunk_id_of(copy) == chunk_id:
            self.hold(chunk_id, copy)

    def is_staged(self, chunk_id: ChunkId) -> bool:
        """Return True if a chunk of the last checkpoint is held in an arena."""
        held = self._held.get(chunk_id)
        return held is not None and held.ticket is not None

    @property
    def tickets(self) -> frozenset[int]:
        """The arena slots that contain bases of the next commit."""
        return frozenset(held.ticket for held in self._held.values() if held.ticket is not None)

    def keep_only_slot(self, ticket: int | None) -> None:
        """Hold bases in at most one arena slot, so that part of a state does not occupy the memory of two.

        If the last commit's slot contains bases, those in older slots are copied to the heap, as far as the bound
        allows. If it contains none, the older slot is kept.

        Args:
            ticket: The last commit's slot; None if it must not be kept. Then no slot is kept.
        """
        with self._lock:
            staged = {chunk_id: held for chunk_id, held in self._held.items() if held.ticket is not None}
            is_newer = ticket is not None and any(held.ticket == ticket for held in staged.values())
            for chunk_id, held in staged.items():
                if ticket is None:
                    # Memory was short, or the saver must not hold it any longer.
                    del self._held[chunk_id]
                elif is_newer and held.ticket != ticket:
                    self._move_to_heap(chunk_id, held)

    def release(self) -> None:
        """Drop all held bytes. Bases are read from the store from now on."""
        with self._lock:
            self._held.clear()
            self._held_nbytes = 0

    def _move_to_heap(self, chunk_id: ChunkId, held: _Held) -> None:
        del self._held[chunk_id]
        nbytes = self._held_nbytes + len(held.plain)
        is_over = self._nbytes_max is not None and nbytes > self._nbytes_max
        copy = None if is_over else _copy_of(held.plain)
        if copy is not None:
            self._held[chunk_id] = _Held(copy, held.xxh3)
            self._held_nbytes = nbytes
            self.held_nbytes_peak = max(self.held_nbytes_peak, nbytes + self._drafts_nbytes)

    def discard_drafts(self) -> None:
        """Drop what an unfinished commit has held."""
        self._keep_checksums({chunk.chunk_id for chunk in self._previous.values()} | set(self._roots.values()))
        with self._lock:
            self._drafts.clear()
            self._drafts_nbytes = 0

    def held(self, chunk_id: ChunkId) -> memoryview | None:
        """Return the held bytes of a chunk if their checksum still matches; else None."""
        with self._lock:
            held = self._held.get(chunk_id) or self._drafts.get(chunk_id)
        if held is None or xxh3_64(held.plain) != held.xxh3:
            return None
        return held.plain


def _copy_of(plain: memoryview) -> memoryview | None:
    """Return a copy on the heap, or None if there is no memory for it."""
    try:
        return memoryview(bytes(plain))
    except MemoryError:
        return None


def base_frame(chunk_index: ChunkIndex, bases: BaseCache, previous: ChunkId, kind: BaseKind) -> LocatedFrame | None:
    """Return the frame of one kind of base of a previous chunk, if the store still has it."""
    chunk_id = previous if kind == "previous" else bases.root_of(previous)
    return None if chunk_id is None else chunk_index.find(chunk_id)


def read_nbytes(frame: LocatedFrame) -> int:
    """Return the stored bytes of a frame and of all its bases."""
    return sum(link.frame.frame_nbytes for link in frame.closure())


def first_paths(tree: Node, storage_of: list[int]) -> dict[int, Path]:
    """Return the path of the first tensor that views each storage."""
    found: dict[int, Path] = {}
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, TensorNode):
            found.setdefault(storage_of[leaf.tensor], path)
    return found


def _chunks_at(
    manifest: Manifest, paths: Mapping[int, Path], starts: Sequence[int]
) -> Iterator[tuple[ChunkPosition, BaseChunk]]:
    """Yield each position of the state at which a chunk begins, with the chunk."""
    # Quantized moments are left out: they are not coded as differences, and their exact differences are noise.
    moments = {loss.storage for loss in manifest.losses if loss.role in ("first", "second")}
    for index, storage in enumerate(manifest.storages):
        if index in moments or index not in paths:
            continue
        begin = starts[index] if starts else 0
        # The position of a shared chunk is that of its first storage.
        for position, number in chunk_starts(storage.pieces):
            spec = manifest.chunks[number]
            chunk = BaseChunk(ChunkId(spec.chunk_id), spec.nbytes, spec.element_width, spec.is_float)
            yield (paths[index], begin + position), chunk


def _roots(manifest: Manifest) -> Iterator[tuple[ChunkId, ChunkId]]:
    """Yield each chunk with the root of its chain, if both are equally long. The master of a rounding is longer."""
    nbytes_of = {chunk.chunk_id: chunk.nbytes for chunk in manifest.chunks}
    # A base's length follows from the frame on top: a rounding is half as long as its base, a difference as long.
    nbytes = [nbytes_of.get(frame.chunk_id, 0) for frame in manifest.frames]
    for index in range(len(manifest.frames) - 1, -1, -1):
        frame = manifest.frames[index]
        if frame.base >= 0:
            nbytes[frame.base] = nbytes[frame.base] or nbytes[index] * (2 if frame.stored_nbytes == 1 else 1)
    roots: list[int] = []
    for index, frame in enumerate(manifest.frames):
        roots.append(index if frame.base < 0 else roots[frame.base])
        if nbytes[roots[index]] == nbytes[index]:
            yield frame.chunk_id, manifest.frames[roots[index]].chunk_id
