"""Plan a restore: which frames to read, in which order, and where every byte goes. Pure: no files, no clock.

A frame with a base is decoded in place: the base is decoded to the destination of the chunk, and the frame is decoded
on top of it. So a frame is read before the frames that need it, and is decoded to the destinations of all of them.

``narrowed`` prepares a restore with ``only=``. Some trainers keep all parameters in one flat buffer. If the selection
views only a part of such a storage, the returned manifest has a storage for this part alone.

Invariants:
- In the order of the plan, a read comes after the read that it needs.
- Two reads in progress never write to the same destination, and never to one that holds another read's base.
- A chunk without a destination for all its bytes, for example one shared by several storages, is a ``BufferedRead``.
- Narrowed: selected tensors that share bytes still share them. Everything else in the manifest is unchanged, so that
  errors and losses name the right tensors.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckstore.config import KIB
from ckstore.errors import MalformedError
from ckstore.format.frame import FRAME_ALIGN
from ckstore.format.manifest import FrameRef, Manifest, PackRef
from ckstore.format.narrowing import narrow
from ckstore.format.tree import Selection, tensors_of
from ckstore.format.wire import align_up
from ckstore.hashing import NO_BASE, ChunkId

GAP_NBYTES_MAX = 64 * KIB
"""Reading a gap of this length costs less than a separate read on every measured device."""

WASTE_MAX = 1 / 8
"""Largest ratio of unneeded to needed bytes in one read from a remote tier, where many requests run in parallel."""

PLACES_MAX = 8
"""Most destinations that one read of a base fills. A chunk of zeros may be the base of very many chunks."""

ROUNDING_NBYTES = 1
"""Stored bytes of a rounding frame. A plan reads no headers, so a delta of this size (a constant difference of width 1)
is planned as a rounding, too: its base stays at its own destination, or the chunk is read with its whole chain."""


class Target(NamedTuple):
    """Destination of the bytes ``[chunk_offset, chunk_offset + nbytes)`` of a decoded chunk."""

    storage: int
    storage_offset: int
    chunk_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FrameRead:
    """One frame to read and decode.

    Args:
        index: Position in the plan.
        frame: Index into the manifest's frames.
        ref: The manifest's entry for the frame.
        chunk: The chunk of the state in this frame, or the first chunk that needs it as base.
        nbytes: Plain bytes of the chunk.
        places: Destinations of the whole chunk: its own, and those of the frames that need it. The frame is decoded to
            the first and copied to the others. Empty: it is decoded to a scratch buffer.
        targets: The parts of the state that this read completes; empty for a frame that is only a base.
        needs: Index of the read that must be done before; -1: no such read.
        master: Destination that holds the base, unless it is the first of ``places``.
    """

    index: int
    frame: int
    ref: FrameRef
    chunk: int
    nbytes: int
    places: tuple[Target, ...]
    targets: tuple[Target, ...]
    needs: int = -1
    master: Target | None = None


@dataclass(frozen=True, slots=True)
class FrameGroup:
    """Frames that are close together in one pack and are fetched with one read."""

    pack: int
    offset: int
    nbytes: int
    reads: tuple[FrameRead, ...]


@dataclass(frozen=True, slots=True)
class BufferedRead:
    """A chunk that is decoded with its whole chain in a scratch buffer and then copied to its targets."""

    frame: int
    chunk: int
    nbytes: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Groups in the order in which they are fetched, and the buffered reads that follow them."""

    groups: tuple[FrameGroup, ...]
    buffered_reads: tuple[BufferedRead, ...]

    @property
    def reads(self) -> list[FrameRead]:
        """All frame reads of the groups, in order."""
        return [read for group in self.groups for read in group.reads]


def plan_restore(
    manifest: Manifest,
    storages: Iterable[int],
    *,
    group_nbytes_max: int,
    wave_nbytes: int | None = None,
    distant: Container[int] = (),
    chunks: Container[int] | None = None,
) -> RestorePlan:
    """Plan the reads for some storages of a manifest.

    Args:
        manifest: The manifest of the checkpoint.
        storages: Indices of the storages, in the order in which their memory is allocated.
        group_nbytes_max: The longest range of one read.
        wave_nbytes: Complete the state in waves of about this many bytes, because the buffer of a storage is freed
            when it is complete; None: process the whole state level by level.
        distant: Indices of packs in remote tiers, of which few unneeded bytes are read.
        chunks: Only read these chunks; None: all that the storages need.

    Raises:
        MalformedError: Chunks of different lengths are deltas of one base.
    """
    planner = _Planner(manifest)
    planner.want(storages, wave_nbytes, chunks)
    drafts = sorted(planner.drafts(), key=lambda draft: draft.key)
    index_of = {id(draft): index for index, draft in enumerate(drafts)}
    reads = [draft.frozen(index_of) for draft in drafts]
    groups = _group(reads, [draft.key[:2] for draft in drafts], group_nbytes_max, distant)
    return RestorePlan(tuple(groups), tuple(planner.buffered_reads))


def chain_of(manifest: Manifest, frame: int) -> list[tuple[PackRef, FrameRef]]:
    """Return a frame and its bases, deepest base first, each with its pack."""
    chain: list[tuple[PackRef, FrameRef]] = []
    while frame >= 0:
        ref = manifest.frames[frame]
        chain.append((manifest.packs[ref.pack], ref))
        frame = ref.base
    return chain[::-1]


def targets_of(manifest: Manifest, storages: Iterable[int], chunks: Container[int]) -> dict[int, list[Target]]:
    """Return the targets that some chunks have in some storages, by chunk."""
    found: dict[int, list[Target]] = {}
    for index in storages:
        position = 0
        for piece in manifest.storages[index].pieces:
            if piece.chunk in chunks:
                target = Target(index, position, piece.offset, piece.nbytes)
                found.setdefault(piece.chunk, []).append(target)
            position += piece.nbytes
    return found


def packs_of(manifest: Manifest, plan: RestorePlan) -> set[int]:
    """Return the indices of all packs that a plan reads from."""
    packs = {group.pack for group in plan.groups}
    for read in plan.buffered_reads:
        frame = read.frame
        while frame >= 0:
            packs.add(manifest.frames[frame].pack)
            frame = manifest.frames[frame].base
    return packs


def base_id_of(manifest: Manifest, frame: int) -> ChunkId:
    """Return the id of a frame's base; NO_BASE if it has no base."""
    base = manifest.frames[frame].base
    return NO_BASE if base < 0 else manifest.frames[base].chunk_id


@dataclass(slots=True)
class _Wanted:
    """A chunk of the state to restore, and its targets.

    Args:
        place: The first target that takes the whole chunk; None: no target does.
    """

    chunk: int
    nbytes: int
    wave: int
    targets: list[Target] = field(default_factory=list)
    place: Target | None = None


@dataclass(slots=True, eq=False)
class _Draft:
    """A frame read under construction. ``key`` orders the plan: wave, depth, pack, offset."""

    frame: int
    ref: FrameRef
    chunk: int
    nbytes: int
    key: tuple[int, int, int, int]
    places: list[Target] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    needs: _Draft | None = None
    master: Target | None = None

    def frozen(self, index_of: dict[int, int]) -> FrameRead:
        needs = -1 if self.needs is None else index_of[id(self.needs)]
        places, targets = tuple(self.places), tuple(self.targets)
        index = index_of[id(self)]
        return FrameRead(index, self.frame, self.ref, self.chunk, self.nbytes, places, targets, needs, self.master)


class _Planner:
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._frames = manifest.frames
        self._wanted: dict[int, _Wanted] = {}
        self.buffered_reads: list[BufferedRead] = []

    def want(self, storages: Iterable[int], wave_nbytes: int | None, chunks: Container[int] | None) -> None:
        """Record the wanted chunks and their targets, by frame."""
        frame_of = {frame.chunk_id: index for index, frame in enumerate(self._frames)}
        by_chunk: dict[int, _Wanted] = {}
        planned_nbytes = 0
        # Very many storages may share a chunk.
        for index in storages:
            position = 0
            for piece in self._manifest.storages[index].pieces:
                nbytes = piece.nbytes
                wanted = by_chunk.get(piece.chunk)
                if wanted is None and chunks is not None and piece.chunk not in chunks:
                    position += nbytes
                    continue
                if wanted is None:
                    spec = self._manifest.chunks[piece.chunk]
                    wave = 0 if wave_nbytes is None else planned_nbytes // wave_nbytes
                    wanted = by_chunk[piece.chunk] = _Wanted(piece.chunk, spec.nbytes, wave)
                    self._wanted[frame_of[ChunkId(spec.chunk_id)]] = wanted
                target = Target(index, position, piece.offset, nbytes)
                wanted.targets.append(target)
                if nbytes == wanted.nbytes and wanted.place is None:
                    wanted.place = target
                position += nbytes
                planned_nbytes += nbytes

    def drafts(self) -> Iterator[_Draft]:
        """Yield a draft of every read; bases after the frames that need them, because they take over their places."""
        needed = self._needed()
        deltas: dict[int, list[_Draft]] = {}
        roundings: dict[int, list[_Draft]] = {}
        for index in sorted(needed, reverse=True):
            made = self._drafts_of(index, deltas.pop(index, []), roundings.pop(index, []))
            base = self._frames[index].base
            if base >= 0:
                (roundings if self._is_rounding(index) else deltas).setdefault(base, []).extend(made)
            yield from made

    def _drafts_of(self, index: int, deltas: list[_Draft], roundings: list[_Draft]) -> list[_Draft]:
        """Return the reads of one frame: one, or several if it has many places."""
        wanted = self._wanted.get(index)
        frame = self._frames[index]
        nbytes = wanted.nbytes if wanted is not None else deltas[0].nbytes
        if any(draft.nbytes != nbytes for draft in deltas):
            raise MalformedError(
                "chunks of different lengths are deltas of one base", where=f"chunk {frame.chunk_id.hex()[:16]}"
            )
        made: list[_Draft] = []
        for users in _batches(deltas):
            is_first = not made
            chunk = wanted.chunk if wanted is not None else users[0].chunk
            waves = [user.key[0] for user in (*users, *(roundings if is_first else ()))]
            if wanted is not None and is_first:
                waves.append(wanted.wave)
            draft = _Draft(index, frame, chunk, nbytes, (min(waves), frame.depth, frame.pack, frame.offset))
            if wanted is not None and is_first:
                draft.targets = wanted.targets
                draft.places = [] if wanted.place is None else [wanted.place]
            for user in users:
                draft.places += user.places
                user.needs = draft
            made.append(draft)
        for user in roundings:
            # The master belongs to the state, so the first of its reads puts it at its destination, where it stays.
            user.needs, user.master = made[0], made[0].places[0]
        return made

    def _needed(self) -> set[int]:
        """Return the frames to decode in place; plan a buffered read for every other wanted chunk."""
        whole = {index for index, wanted in self._wanted.items() if wanted.place is not None}
        is_sound: list[bool] = []
        for index, frame in enumerate(self._frames):
            base = frame.base
            is_sound.append(base < 0 or (is_sound[base] and (base in whole or not self._is_rounding(index))))
        needed = {index for index in whole if is_sound[index]}
        for index in range(len(self._frames) - 1, -1, -1):
            if index in needed and self._frames[index].base >= 0:
                needed.add(self._frames[index].base)
        for index, wanted in self._wanted.items():
            if self._frames[index].base < 0:
                needed.add(index)
            elif index not in needed:
                self.buffered_reads.append(BufferedRead(index, wanted.chunk, wanted.nbytes, tuple(wanted.targets)))
        self.buffered_reads.sort(key=lambda read: (self._frames[read.frame].pack, self._frames[read.frame].offset))
        return needed

    def _is_rounding(self, index: int) -> bool:
        frame = self._frames[index]
        return frame.base >= 0 and frame.stored_nbytes == ROUNDING_NBYTES


def _batches(users: Sequence[_Draft]) -> Iterator[list[_Draft]]:
    """Yield batches of reads that share one read of their base; at least one batch, which may be empty."""
    batch: list[_Draft] = []
    count = 0
    for user in users:
        if batch and count + len(user.places) > PLACES_MAX:
            yield batch
            batch, count = [], 0
        batch.append(user)
        count += len(user.places)
    yield batch


def _group(
    reads: Sequence[FrameRead],
    levels: Sequence[tuple[int, int]],
    group_nbytes_max: int,
    distant: Container[int],
) -> Iterator[FrameGroup]:
    """Group reads that are close together in one pack, wave and depth; a repeated frame starts a new group."""
    first = begin = end = used = 0
    for index, read in enumerate(reads):
        frame = read.ref
        frame_end = frame.offset + frame.frame_nbytes
        last = reads[index - 1].ref if index else frame
        fits = (
            index > first
            and levels[index] == levels[first]
            and frame.pack == last.pack
            and last.offset < frame.offset
            and frame.offset - end <= GAP_NBYTES_MAX
            and max(end, frame_end) - begin <= group_nbytes_max
            and (frame.pack not in distant or frame.offset - begin <= used * (1 + WASTE_MAX))
        )
        if index > first and not fits:
            yield FrameGroup(last.pack, begin, end - begin, tuple(reads[first:index]))
            first = index
        if index == first:
            begin = end = frame.offset
            used = 0
        end = max(end, frame_end)
        # The padding after a frame does not count as waste.
        used += align_up(frame.frame_nbytes, FRAME_ALIGN)
    if reads:
        yield FrameGroup(reads[first].ref.pack, begin, end - begin, tuple(reads[first:]))


def narrowed(manifest: Manifest, only: str | Sequence[str]) -> Manifest:
    """Return a manifest in which the parts of storages that a selection views are storages of their own."""
    chosen = Selection(only, manifest.tree).prune(manifest.tree)
    tensors, storages = narrow(manifest.tensors, manifest.storages, () if chosen is None else tensors_of(chosen))
    return replace(manifest, tensors=tuple(tensors), storages=tuple(storages))
