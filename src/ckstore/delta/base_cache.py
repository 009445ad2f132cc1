"""What the next commit may be coded against: the chunks of the last acknowledged checkpoint, and their roots.

Both views come from one manifest: at each place of the state stands the *previous* chunk, and at the root of its
chain the *keyframe* chunk. So no other manifest is needed, and deleting checkpoints changes nothing here.

Invariants:
- Only what an acknowledged manifest locates in the local tier is ever a base.
- Bytes held in memory were hashed as they lie here, and are compared with a checksum before they are used: a base
  that changed in memory would make frames that decode to nothing.
- Bytes that lie in an arena are held for one ticket at most when a commit has ended: the others get their slots back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ckstore.delta.cost_model import BaseKind
from ckstore.format.decisions import Decisions, StorageDecision
from ckstore.format.manifest import Manifest
from ckstore.format.tree import Node, Path, TensorNode, leaves_of
from ckstore.format.wire import xxh3_64
from ckstore.hashing import ChunkId, chunk_id_of
from ckstore.store.chunk_index import ChunkIndex, LocatedFrame

Place = tuple[Path, int]
"""A storage, by the path of the first tensor that views it, and a byte offset in it."""


@dataclass(frozen=True, slots=True)
class BaseChunk:
    """A chunk that may serve as base; its length and elements are those of the chunk that it serves."""

    chunk_id: ChunkId
    nbytes: int
    element_width: int
    is_float: bool


@dataclass(frozen=True, slots=True)
class _Held:
    plain: memoryview
    xxh3: int
    ticket: int | None = None
    """Whose slot of an arena they lie in; None: they lie on the heap, where the bound counts them."""

    @property
    def heap_nbytes(self) -> int:
        """Bytes of the heap."""
        return len(self.plain) if self.ticket is None else 0


class BaseCache:
    """What one handle remembers from one commit to the next; thread-safe where threads of one commit meet."""

    def __init__(self) -> None:
        self.seq: int | None = None
        self.decisions: Decisions | None = None
        self._previous: dict[Place, BaseChunk] = {}
        self._decision_at: dict[Path, StorageDecision] = {}
        self._hops_at: dict[Path, int] = {}
        self._samples: dict[ChunkId, bytes] = {}
        self._roots: dict[ChunkId, ChunkId] = {}
        self._checksums: dict[ChunkId, int] = {}
        self._held: dict[ChunkId, _Held] = {}
        self._drafts: dict[ChunkId, _Held] = {}
        self._lock = threading.Lock()
        self._nbytes_max: int | None = None
        self._drafts_nbytes = self._held_nbytes = 0
        self.held_nbytes_peak = 0
        """Most bytes of bases that were held at once since the last commit began."""

    def begin(self, nbytes_max: int | None) -> None:
        """Begin a commit while which, and after which, no more than these bytes of bases are held; None: no bound."""
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
        """The keyframe that the last checkpoint goes back to, itself where it is one."""
        is_keyframe = self.decisions is None or self.decisions.keyframe_seq is None
        return self.seq if is_keyframe or self.decisions is None else self.decisions.keyframe_seq

    @property
    def held_nbytes(self) -> int:
        """Bytes of bases held on the heap."""
        return self._held_nbytes + self._drafts_nbytes

    @property
    def staged_nbytes(self) -> int:
        """Bytes of bases of the next commit that lie in an arena."""
        return sum(len(held.plain) for held in self._held.values() if held.ticket is not None)

    @property
    def samples_nbytes(self) -> int:
        """Bytes of samples held in memory."""
        return sum(len(sample) for sample in self._samples.values())

    def follow(self, manifest: Manifest) -> None:
        """Take an acknowledged checkpoint as the one that the next commit follows."""
        self.seq, self.decisions = manifest.header.seq, manifest.decisions
        paths = first_paths(manifest.tree, [tensor.storage for tensor in manifest.tensors])
        self._previous = dict(_places(manifest, paths))
        storages = manifest.decisions.storages if manifest.decisions is not None else ()
        self._decision_at = {paths[index]: choice for index, choice in enumerate(storages) if index in paths}
        self._hops_at = {paths[loss.storage]: loss.hops for loss in manifest.losses if loss.storage in paths}
        self._roots = dict(_roots(manifest))
        wanted = {chunk.chunk_id for chunk in self._previous.values()} | set(self._roots.values())
        self._samples = {chunk_id: sample for chunk_id, sample in self._samples.items() if chunk_id in wanted}
        self._keep_checksums(wanted)
        with self._lock:
            self._held = self._held_from(wanted)
            self._held_nbytes = sum(held.heap_nbytes for held in self._held.values())
            self._drafts, self._drafts_nbytes = {}, 0

    def _keep_checksums(self, wanted: set[ChunkId]) -> None:
        self._checksums = {chunk_id: xxh3 for chunk_id, xxh3 in self._checksums.items() if chunk_id in wanted}

    def _held_from(self, wanted: set[ChunkId]) -> dict[ChunkId, _Held]:
        """Return what to go on holding: one chunk for each place, the newer one where both are there."""
        both = {**self._held, **self._drafts}
        chosen: dict[ChunkId, _Held] = {}
        for chunk in self._previous.values():
            for chunk_id in (chunk.chunk_id, self._roots.get(chunk.chunk_id)):
                if chunk_id is not None and chunk_id in both and chunk_id in wanted:
                    chosen[chunk_id] = both[chunk_id]
                    break
        return chosen

    def previous_at(self, place: Place, nbytes: int, element_width: int, is_float: bool) -> ChunkId | None:
        """Return the previous checkpoint's chunk at a place, if it has this length and these elements."""
        chunk = self._previous.get(place)
        if chunk is None or (chunk.nbytes, chunk.element_width, chunk.is_float) != (nbytes, element_width, is_float):
            return None
        return chunk.chunk_id

    def root_of(self, chunk_id: ChunkId) -> ChunkId | None:
        """Return the chunk at the root of a previous chunk's chain, itself where it has no base."""
        return self._roots.get(chunk_id)

    def decision_at(self, path: Path) -> StorageDecision | None:
        """Return what was chosen last time for the storage of a path."""
        return self._decision_at.get(path)

    def hops_at(self, path: Path | None) -> int:
        """Return how many commits with a loss lie between the storage of a path and when it was exact; 0: none."""
        return 0 if path is None else self._hops_at.get(path, 0)

    @property
    def hops_max(self) -> int:
        """How many commits with a loss lie between now and the last one that was exact as a whole; 0: none."""
        return max(self._hops_at.values(), default=0)

    def sample_of(self, chunk_id: ChunkId) -> bytes | None:
        """Return the sample of a chunk, if it was taken."""
        return self._samples.get(chunk_id)

    def keep_sample(self, chunk_id: ChunkId, sample: bytes) -> None:
        """Remember the sample of a chunk that was just committed."""
        self._samples[chunk_id] = sample

    def checksum_of(self, chunk_id: ChunkId) -> int | None:
        """Return the xxh3 of a chunk's plain bytes, if this handle took it together with their identity."""
        return self._checksums.get(chunk_id)

    def forget_checksum(self, chunk_id: ChunkId) -> None:
        """Let BLAKE3 decide next time: what is stored has another checksum."""
        self._checksums.pop(chunk_id, None)

    def keep_checksum(self, chunk_id: ChunkId, xxh3: int) -> None:
        """Remember the xxh3 of bytes whose BLAKE3 was taken with it: as a base they are known again by it, cheaper."""
        self._checksums[chunk_id] = xxh3

    def hold(
        self, chunk_id: ChunkId, plain: memoryview, *, checksum: int | None = None, ticket: int | None = None
    ) -> None:
        """Keep plain bytes whose BLAKE3 was taken here, where nobody else can write to them.

        Until ``follow`` makes them what the next commit is coded against, ``discard_drafts`` lets go of them. What
        would pass the bound is not kept: whoever wants it reads it back from the store.

        Args:
            chunk_id: What they are.
            plain: The bytes.
            checksum: Their xxh3, if it is known.
            ticket: Whose slot of an arena they lie in; None: they take memory of their own.
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
        """Keep a copy of a base that was read back from the store, if the bound and the memory allow it."""
        with self._lock:
            wanted = self._held_nbytes + self._drafts_nbytes + len(plain)
            if chunk_id in self._drafts or (self._nbytes_max is not None and wanted > self._nbytes_max):
                return
        copy = _copy_of(plain)
        if copy is not None and chunk_id_of(copy) == chunk_id:
            self.hold(chunk_id, copy)

    def is_staged(self, chunk_id: ChunkId) -> bool:
        """Whether the bytes of a chunk of the last checkpoint are held in an arena."""
        held = self._held.get(chunk_id)
        return held is not None and held.ticket is not None

    @property
    def tickets(self) -> frozenset[int]:
        """Whose slots of an arena hold bases of the next commit."""
        return frozenset(held.ticket for held in self._held.values() if held.ticket is not None)

    def keep_only_slot(self, ticket: int | None) -> None:
        """Let bases lie in the slot of no more than one ticket.

        What lies in an older slot stays there as long as the newer one holds nothing; else it is copied to the heap,
        as far as the bound allows: a part of a state must not keep the memory of a whole one.

        Args:
            ticket: Of the last commit; None: its slot must not be kept, and so no other is.
        """
        with self._lock:
            staged = {chunk_id: held for chunk_id, held in self._held.items() if held.ticket is not None}
            is_newer = ticket is not None and any(held.ticket == ticket for held in staged.values())
            for chunk_id, held in staged.items():
                if ticket is None:
                    # Memory was short, or is not wanted any more.
                    del self._held[chunk_id]
                elif is_newer and held.ticket != ticket:
                    self._move(chunk_id, held)

    def let_go(self) -> None:
        """Hold none of the bytes any more: what is wanted is read back from the store."""
        with self._lock:
            self._held.clear()
            self._held_nbytes = 0

    def _move(self, chunk_id: ChunkId, held: _Held) -> None:
        del self._held[chunk_id]
        nbytes = self._held_nbytes + len(held.plain)
        is_over = self._nbytes_max is not None and nbytes > self._nbytes_max
        copy = None if is_over else _copy_of(held.plain)
        if copy is not None:
            self._held[chunk_id] = _Held(copy, held.xxh3)
            self._held_nbytes = nbytes
            self.held_nbytes_peak = max(self.held_nbytes_peak, nbytes + self._drafts_nbytes)

    def discard_drafts(self) -> None:
        """Let go of what a commit that failed, or is tried again, has given to be held."""
        self._keep_checksums({chunk.chunk_id for chunk in self._previous.values()} | set(self._roots.values()))
        with self._lock:
            self._drafts.clear()
            self._drafts_nbytes = 0

    def held(self, chunk_id: ChunkId) -> memoryview | None:
        """Return plain bytes that are held and still what they were."""
        with self._lock:
            held = self._held.get(chunk_id) or self._drafts.get(chunk_id)
        if held is None or xxh3_64(held.plain) != held.xxh3:
            return None
        return held.plain


def _copy_of(plain: memoryview) -> memoryview | None:
    """Return a copy on the heap; None where there is no memory for it, and the store has to be read again."""
    try:
        return memoryview(bytes(plain))
    except MemoryError:
        return None


def base_frame(known: ChunkIndex, bases: BaseCache, previous: ChunkId, view: BaseKind) -> LocatedFrame | None:
    """Return the frame that a chunk is coded against in a view, if it is still in place."""
    chunk_id = previous if view == "previous" else bases.root_of(previous)
    return None if chunk_id is None else known.find(chunk_id)


def read_nbytes(known: LocatedFrame) -> int:
    """Return the stored bytes of a frame and of all that it needs."""
    return sum(link.frame.frame_nbytes for link in known.closure())


def first_paths(tree: Node, storage_of: list[int]) -> dict[int, Path]:
    """Return the path of the first tensor that views each storage."""
    found: dict[int, Path] = {}
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, TensorNode):
            found.setdefault(storage_of[leaf.tensor], path)
    return found


def _places(manifest: Manifest, paths: dict[int, Path]) -> Iterator[tuple[Place, BaseChunk]]:
    # Nothing is gained from moments that were quantized: they are not told as differences, and exact ones are noise.
    moments = {loss.storage for loss in manifest.losses if loss.role in ("first", "second")}
    for index, storage in enumerate(manifest.storages):
        if index in moments:
            continue
        position = 0
        for piece in storage.pieces:
            spec = manifest.chunks[piece.chunk]
            # A chunk is found by the storage that it begins with.
            if piece.offset == 0 and index in paths:
                chunk = BaseChunk(ChunkId(spec.chunk_id), spec.nbytes, spec.element_width, spec.is_float)
                yield (paths[index], position), chunk
            position += piece.nbytes


def _roots(manifest: Manifest) -> Iterator[tuple[ChunkId, ChunkId]]:
    """Yield the root of each chunk's chain; none where that has another length, as the master of a rounding has."""
    nbytes_of = {chunk.chunk_id: chunk.nbytes for chunk in manifest.chunks}
    # Lengths go down the chains: a rounding has half of its base's, a difference as many.
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
