"""Decide, without moving a byte, what a restore has to read, in which order, and where every byte goes.

Pure: no files, no clock, no randomness.

A frame that needs a base is decoded onto it: the base lies where the chunk is to lie, because it was decoded there.
So every frame is read before those that need it, and goes to the places of all of them.

Invariants:
- A read comes after the one that it needs, in the order in which reads are begun.
- No two reads that are under way write to the same place, and none writes where another one's base stands.
- What has no whole place of its own, such as tensors that share a chunk with others, is read aside, chain by chain.

Of long storages that a selection views in part, only that part: the manifest as if it were stored alone.

Trainers keep all parameters in one flat buffer and every tensor as a view of it. Who wants one of them back wants
neither to read nor to hold the others.

Invariants:
- Tensors of the selection that share a byte share it again.
- Everything else in the manifest stays as it is, so that errors and losses are told of the right places.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ckstore.config import KIB
from ckstore.errors import MalformedError
from ckstore.format.frame import FRAME_ALIGN
from ckstore.format.logical import itemsize_of
from ckstore.format.manifest import FrameRef, Manifest, PackRef
from ckstore.format.tensors import Piece, StorageSpec, TensorSpec, byte_strides_of, extent_of
from ckstore.format.tree import Selection, tensors_of
from ckstore.format.wire import align_up
from ckstore.hashing import NO_BASE, ChunkId

GAP_NBYTES_MAX = 64 * KIB
"""Reading this much for nothing costs less than a read of its own on every device we measured."""

WASTE_MAX = 1 / 8
"""Of what is read from afar, bytes for nothing to bytes that are needed: there requests are many at a time."""

PLACES_MAX = 8
"""Places that one read of a base may fill: zeros may be the base of everything, and nothing waits long for one read."""

ROUNDING_NBYTES = 1
"""Stored bytes of a rounding, by which it is told from a residual before its header is read."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a part of a decoded chunk goes: bytes ``[chunk_offset, chunk_offset + nbytes)``."""

    storage: int
    storage_offset: int
    chunk_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FrameRead:
    """One frame to be decoded.

    Args:
        index: Its place in the order of the plan.
        frame: Index into the manifest's frames.
        ref: What stands there.
        chunk: The chunk of the state that it holds, or the first one that needs it as base.
        nbytes: Plain bytes of its chunk.
        places: Decoded to the first, copied to the others: its own place, and those of frames that need it. None:
            it is decoded aside.
        targets: Where bytes of the state lie then; empty for a frame that is only a base.
        needs: Index of the read that must be done before; -1 for none.
        master: Where the base stands, if that is not the first of the places.
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
    """Frames that lie close together in one pack and are fetched by one read."""

    pack: int
    offset: int
    nbytes: int
    reads: tuple[FrameRead, ...]


@dataclass(frozen=True, slots=True)
class BufferedRead:
    """A chunk that is read through all of its chain, beside the state, and then copied to where it goes."""

    frame: int
    chunk: int
    nbytes: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Groups in the order in which they are fetched, and what is read aside after them."""

    groups: tuple[FrameGroup, ...]
    asides: tuple[BufferedRead, ...]

    @property
    def reads(self) -> list[FrameRead]:
        """Every frame read of the groups, in order."""
        return [read for group in self.groups for read in group.reads]


def plan_restore(
    manifest: Manifest,
    storages: Iterable[int],
    *,
    group_nbytes_max: int,
    wave_nbytes: int | None = None,
    distant: Container[int] = (),
) -> RestorePlan:
    """List what must be read for these storages.

    Args:
        manifest: Where everything lies.
        storages: What is wanted, in the order in which memory for it is taken.
        group_nbytes_max: The longest range of one read.
        wave_nbytes: Bring the state to its end in waves of about so many bytes, one after another, because the
            memory of a storage is given back when it is complete; None: all of it level by level.
        distant: Packs that are far away, by their index: of these, little is read that is not needed.

    Raises:
        MalformedError: Chunks of different lengths are residuals of one.
    """
    planner = _Planner(manifest)
    planner.want(storages, wave_nbytes)
    drafts = sorted(planner.drafts(), key=lambda draft: draft.key)
    index_of = {id(draft): index for index, draft in enumerate(drafts)}
    reads = [draft.frozen(index_of) for draft in drafts]
    groups = _group(reads, [draft.key[:2] for draft in drafts], group_nbytes_max, distant)
    return RestorePlan(tuple(groups), tuple(planner.asides))


def chain_of(manifest: Manifest, frame: int) -> list[tuple[PackRef, FrameRef]]:
    """Return a frame and the bases it needs, deepest base first, each with its pack."""
    chain: list[tuple[PackRef, FrameRef]] = []
    while frame >= 0:
        ref = manifest.frames[frame]
        chain.append((manifest.packs[ref.pack], ref))
        frame = ref.base
    return chain[::-1]


def packs_of(manifest: Manifest, plan: RestorePlan) -> set[int]:
    """Return the indices of all packs that a plan reads from."""
    packs = {group.pack for group in plan.groups}
    for aside in plan.asides:
        frame = aside.frame
        while frame >= 0:
            packs.add(manifest.frames[frame].pack)
            frame = manifest.frames[frame].base
    return packs


def base_id_of(manifest: Manifest, frame: int) -> ChunkId:
    """Return the chunk that a frame needs as its base; NO_BASE for none."""
    base = manifest.frames[frame].base
    return NO_BASE if base < 0 else manifest.frames[base].chunk_id


@dataclass(slots=True)
class _Wanted:
    """A chunk of the state that is wanted, and where it goes."""

    chunk: int
    nbytes: int
    wave: int
    targets: list[Target] = field(default_factory=list)

    @property
    def place(self) -> Target | None:
        """The first place that takes the whole chunk."""
        return next((t for t in self.targets if t.chunk_offset == 0 and t.nbytes == self.nbytes), None)


@dataclass(slots=True, eq=False)
class _Draft:
    """A frame read being made; ``key`` is its place in the order: wave, depth, pack, offset."""

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
        self.asides: list[BufferedRead] = []

    def want(self, storages: Iterable[int], wave_nbytes: int | None) -> None:
        """Note by frame which chunks are wanted, and where they go."""
        frame_of = {frame.chunk_id: index for index, frame in enumerate(self._frames)}
        begun = 0
        for index in storages:
            position = 0
            for piece in self._manifest.storages[index].pieces:
                spec = self._manifest.chunks[piece.chunk]
                wave = 0 if wave_nbytes is None else begun // wave_nbytes
                frame = frame_of[ChunkId(spec.chunk_id)]
                wanted = self._wanted.setdefault(frame, _Wanted(piece.chunk, spec.nbytes, wave))
                wanted.targets.append(Target(index, position, piece.offset, piece.nbytes))
                position += piece.nbytes
                begun += piece.nbytes

    def drafts(self) -> Iterator[_Draft]:
        """Yield a draft of every read; bases after what needs them, because they take over its places."""
        needed = self._needed()
        onto: dict[int, list[_Draft]] = {}
        beside: dict[int, list[_Draft]] = {}
        for index in sorted(needed, reverse=True):
            made = self._drafts_of(index, onto.pop(index, []), beside.pop(index, []))
            base = self._frames[index].base
            if base >= 0:
                (beside if self._is_rounding(index) else onto).setdefault(base, []).extend(made)
            yield from made

    def _drafts_of(self, index: int, onto: list[_Draft], beside: list[_Draft]) -> list[_Draft]:
        """Make the reads of one frame: one, or several where many places want it."""
        wanted = self._wanted.get(index)
        frame = self._frames[index]
        nbytes = wanted.nbytes if wanted is not None else onto[0].nbytes
        if any(draft.nbytes != nbytes for draft in onto):
            raise MalformedError(
                "chunks of different lengths are residuals of one", where=f"chunk {frame.chunk_id.hex()[:16]}"
            )
        made: list[_Draft] = []
        for users in _batches(onto):
            is_first = not made
            chunk = wanted.chunk if wanted is not None else users[0].chunk
            waves = [user.key[0] for user in (*users, *(beside if is_first else ()))]
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
        for user in beside:
            # The master is wanted, so the first of its reads leaves it where it belongs, and there it stays.
            user.needs, user.master = made[0], made[0].places[0]
        return made

    def _needed(self) -> set[int]:
        """Return the frames that are decoded in place; put what is not among them aside."""
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
                self.asides.append(BufferedRead(index, wanted.chunk, wanted.nbytes, tuple(wanted.targets)))
        self.asides.sort(key=lambda aside: (self._frames[aside.frame].pack, self._frames[aside.frame].offset))
        return needed

    def _is_rounding(self, index: int) -> bool:
        frame = self._frames[index]
        return frame.base >= 0 and frame.stored_nbytes == ROUNDING_NBYTES


def _batches(users: Sequence[_Draft]) -> Iterator[list[_Draft]]:
    """Yield the reads that one read of their base serves; at least one batch, which may be empty."""
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
    """Join what lies close together, within one wave and depth; a frame that is read again is not joined."""
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
        # Behind a frame there is padding anyway.
        used += align_up(frame.frame_nbytes, FRAME_ALIGN)
    if reads:
        yield FrameGroup(reads[first].ref.pack, begin, end - begin, tuple(reads[first:]))


_GAP_NBYTES = 64 * KIB
"""Views with a gap no wider than this between them stay in one storage."""

_ALIGN_NBYTES = 64
"""A part begins at a multiple of this, so that elements of every size lie as they lay."""

Window = tuple[int, int]


def narrowed(manifest: Manifest, only: str | Sequence[str]) -> Manifest:
    """Return the manifest with storages of their own for what a selection views of longer ones."""
    chosen = Selection(only, manifest.tree).prune(manifest.tree)
    views: dict[int, dict[int, Window]] = {}
    for index in () if chosen is None else tensors_of(chosen):
        spec = manifest.tensors[index]
        views.setdefault(spec.storage, {})[index] = _extent(spec, manifest.storages[spec.storage])
    tensors, storages = list(manifest.tensors), list(manifest.storages)
    for number, extents in views.items():
        whole = manifest.storages[number]
        for lo, hi in _windows(extents.values()):
            if hi - lo == whole.nbytes:
                break
            for index, (begin, _) in extents.items():
                if lo <= begin < hi:
                    tensors[index] = replace(tensors[index], storage=len(storages), offset=tensors[index].offset - lo)
            storages.append(replace(whole, nbytes=hi - lo, pieces=tuple(_cut(whole.pieces, lo, hi))))
    return replace(manifest, tensors=tuple(tensors), storages=tuple(storages))


def _extent(spec: TensorSpec, storage: StorageSpec) -> Window:
    """Return the bytes of its storage that a tensor views; all of them where only its library can tell."""
    itemsize = itemsize_of(spec.library, spec.dtype)
    if not itemsize:
        return 0, storage.nbytes
    lo, hi = extent_of(spec.shape, byte_strides_of(spec.library, spec.strides, itemsize), itemsize)
    return spec.offset + lo, spec.offset + hi


def _windows(extents: Iterable[Window]) -> Iterator[Window]:
    """Yield the parts of a storage that some views need, joined where they lie close together."""
    begin, end = -1, -1
    for lo, hi in sorted(extents):
        if begin >= 0 and lo <= end + _GAP_NBYTES:
            end = max(end, hi)
            continue
        if begin >= 0:
            yield begin, end
        begin, end = lo - lo % _ALIGN_NBYTES, hi
    if begin >= 0:
        yield begin, end


def _cut(pieces: Sequence[Piece], lo: int, hi: int) -> Iterator[Piece]:
    """Yield the pieces of bytes ``lo`` to ``hi``."""
    at = 0
    for piece in pieces:
        begin, end = max(lo, at), min(hi, at + piece.nbytes)
        if begin < end:
            yield Piece(piece.chunk, piece.offset + begin - at, end - begin)
        at += piece.nbytes
