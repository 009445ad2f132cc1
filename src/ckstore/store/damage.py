"""Damage reports, and which checkpoints and tensors need a damaged or lost frame.

Of every manifest only locations are kept, each once however many manifests share it. The affected tensors are looked up
only if there is damage, by reading the manifest again.

Lost chunks: ``repair`` replaces the manifest of a checkpoint that cannot be recovered completely by a generation that
puts its lost chunks into the tier ``lost``, which does not exist. So the other tensors can be restored, and the
checkpoint keeps its id. If the bytes are found or committed again, another repair completes it.

Invariants:
- Nothing reads from the tier ``lost``. Code that needs a chunk in it raises an error that names the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ckstore.display import repr_of_summary
from ckstore.errors import CkstoreError, MissingChunkError, is_refused
from ckstore.format.frame import frame_extent
from ckstore.format.manifest import FrameRef, Manifest, PackRef, tensor_paths
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.paths import ManifestName
from ckstore.format.tree import TensorNode, format_path, leaves_of
from ckstore.format.wire import align_up
from ckstore.hashing import DIGEST_NBYTES, ChunkId, PackId, new_pack_id
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER, LocatedFrame
from ckstore.store.repository import Repository

TENSORS_SHOWN_MAX = 3
CHECKPOINTS_SHOWN_MAX = 8
LOST_TENSORS_SHOWN_MAX = 8
CHECKPOINTS_READ_MAX = 64
"""Manifests of a run that are read to find those that need a damaged frame. Bounds the work for an error."""

_LOST_STORED_NBYTES = 1

FramePosition = tuple[ChunkId, int, int]
"""Where a manifest locates a frame in a pack: chunk id, offset, length of the payload."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file, frame or record.

    Attributes:
        what: What is wrong.
        where: Path, and offset if known.
        checkpoints: ``run/seq (step N)`` of every checkpoint that needs it.
        tensors: Dotted paths of the first affected tensors of the first of these checkpoints; empty if unknown.
    """

    what: str
    where: str
    checkpoints: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """What a verify checked and found."""

    level: str
    damage: list[Damage] = field(default_factory=list)
    refused: list[Damage] = field(default_factory=list)
    """What this user, or these credentials, may not read. It may be undamaged."""
    checkpoint_count: int = 0
    pack_count: int = 0
    frame_count: int = 0
    bytes_read: int = 0
    packs_elsewhere: int = 0
    """Packs in tiers, which were not checked."""
    files_torn: int = 0
    """Packs that are missing or have damaged ends, and missing claims: typical of a copy of a store in use."""
    copied_ns: int | None = None
    """When the store was copied here, if packs are torn and file times show that it is a copy."""
    unreachable: list[Damage] = field(default_factory=list)
    """Tiers that checkpoints need and that cannot be reached. Their content is unknown."""
    replayed: str = ""
    """What training has made again, in a sentence; empty if no training code was given."""
    segment_count: int = 0
    """Segments of journals."""
    point_count: int = 0
    """Whole records in them."""
    notes: list[str] = field(default_factory=list)
    """What was found that is no damage: torn ends of journals."""

    __repr__ = repr_of_summary

    @property
    def is_clean(self) -> bool:
        """Whether everything was read, nothing is damaged, and all needed tiers were reachable."""
        return not self.damage and not self.refused and not self.unreachable

    def add(self, found: Damage, error: BaseException | None = None) -> None:
        """Add a finding: as refused if ``error`` says that it may not be read, else as damage."""
        (self.refused if error is not None and is_refused(error) else self.damage).append(found)


@dataclass(slots=True)
class PackUses:
    """A pack as manifests name it.

    Attributes:
        refs: For every manifest that names the pack, by its index: its entry for the pack.
        places: For every frame position: the indices of the manifests that list it, ascending.
        bases: For every position of a frame with a base: pack and position of the base.
        disputed: Positions of frames for which manifests disagree about the base.
    """

    refs: dict[int, PackRef] = field(default_factory=dict)
    places: dict[FramePosition, list[int]] = field(default_factory=dict)
    bases: dict[FramePosition, tuple[PackId, FramePosition]] = field(default_factory=dict)
    disputed: set[FramePosition] = field(default_factory=set)

    def add(self, index: int, place: FramePosition, base: tuple[PackId, FramePosition] | None) -> None:
        """Add a frame position that a manifest lists."""
        users = self.places.setdefault(place, [])
        if not users and base is not None:
            self.bases[place] = base
        elif users:
            other = self.bases.get(place)
            if (other and other[1][0]) != (base and base[1][0]):
                self.disputed.add(place)
        users.append(index)


class Uses:
    """The packs and frames that manifests need.

    Args:
        reaches: Whether a tier can be read. Packs only in unreachable tiers are counted as elsewhere.
        is_remote: Include packs in tiers. If False, only packs that a manifest says are local count, and of those only
            frames whose whole chain of bases is local. A pack that one checkpoint needs locally may also contain frames
            of others, whose bases are in a tier.
    """

    def __init__(self, *, is_remote: bool = True, reaches: Callable[[str], bool] = lambda tier: True) -> None:
        self.names: list[ManifestName] = []
        self.in_tiers: dict[str, list[int]] = {}
        """For every tier: the indices of the manifests that name it, ascending."""
        self._reaches = reaches
        self.packs: dict[PackId, PackUses] = {}
        self._is_remote = is_remote
        self._elsewhere: set[PackId] = set()

    @property
    def elsewhere_count(self) -> int:
        """How many packs were left out because they are only in tiers."""
        return len(self._elsewhere - self.packs.keys())

    def add(self, name: ManifestName, manifest: Manifest) -> None:
        """Add what one manifest needs."""
        index = len(self.names)
        self.names.append(name)
        for tier in sorted({ref.tier for ref in manifest.packs} - {LOCAL_TIER, LOST_TIER}):
            self.in_tiers.setdefault(tier, []).append(index)
        packs = [self._pack_of(ref) for ref in manifest.packs]
        for uses, ref in zip(packs, manifest.packs, strict=True):
            if uses is not None:
                uses.refs[index] = ref
        located: list[tuple[PackId, FramePosition] | None] = []
        for frame in manifest.frames:
            uses, base = packs[frame.pack], located[frame.base] if frame.base >= 0 else None
            if uses is None or (frame.base >= 0 and base is None):
                located.append(None)
                continue
            place = (frame.chunk_id, frame.offset, frame.stored_nbytes)
            located.append((manifest.packs[frame.pack].pack_id, place))
            uses.add(index, place, base)

    def _pack_of(self, ref: PackRef) -> PackUses | None:
        if ref.tier not in (LOCAL_TIER, LOST_TIER) and not (self._reaches(ref.tier) and self._is_remote):
            self._elsewhere.add(ref.pack_id)
            return None
        return self.packs.setdefault(ref.pack_id, PackUses())


def label_of(name: ManifestName) -> str:
    """Return the checkpoint of a manifest as reports name it."""
    return f"{name.run}/{name.seq} (step {name.step})"


def checkpoints_with(repository: Repository, pack_id: PackId, frame: FrameRef) -> tuple[str, ...]:
    """Return the checkpoints of the run that need a frame, newest first. Only the newest manifests are read."""
    try:
        names = repository.manifests.listing().names[-CHECKPOINTS_READ_MAX:]
        return tuple(label_of(name) for name in reversed(names) if _needs(repository, name, pack_id, frame))
    except (CkstoreError, OSError):
        # The original error matters more than the list of other affected checkpoints.
        return ()


def _needs(repository: Repository, name: ManifestName, pack_id: PackId, frame: FrameRef) -> bool:
    try:
        manifest = repository.manifests.load(name)
    except (CkstoreError, FileNotFoundError):
        return False
    numbers = [number for number, pack in enumerate(manifest.packs) if pack.pack_id == pack_id]
    return any(other.pack in numbers and other.offset == frame.offset for other in manifest.frames)


def shortened(checkpoints: Sequence[str]) -> str:
    """Join the first names of a list, and say how many more there are."""
    rest = len(checkpoints) - CHECKPOINTS_SHOWN_MAX
    return ", ".join(checkpoints[:CHECKPOINTS_SHOWN_MAX]) + (f" and {rest} more" if rest > 0 else "")


class AffectedTensors:
    """Finds the tensors affected by damage. Keeps an index of one manifest: the last one that was asked for."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._name: ManifestName | None = None
        self._by_chunk: dict[ChunkId, list[str]] = {}
        self._by_pack: dict[PackId, tuple[str, ...]] = {}

    def of_frame(self, name: ManifestName, chunk_id: ChunkId) -> tuple[str, ...]:
        """Return the first tensors of a checkpoint that have bytes in a chunk."""
        self._index(name)
        return tuple(self._by_chunk.get(chunk_id, ()))

    def of_pack(self, name: ManifestName, pack_id: PackId) -> tuple[str, ...]:
        """Return the first tensors of a checkpoint that have bytes in a pack."""
        self._index(name)
        return self._by_pack.get(pack_id, ())

    def _index(self, name: ManifestName) -> None:
        if name == self._name:
            return
        self._name, self._by_chunk, self._by_pack = name, {}, {}
        try:
            manifest = self._repository.manifests_of(name.run).load(name)
        except (CkstoreError, FileNotFoundError):
            # It was dropped or damaged meanwhile, so the affected tensors stay unknown.
            return
        self._by_chunk = _paths_by_chunk(manifest)
        chunks = _chunks_by_pack(manifest)
        self._by_pack = {
            ref.pack_id: tensor_paths(manifest, chunks.get(index, ()), count_max=TENSORS_SHOWN_MAX)
            for index, ref in enumerate(manifest.packs)
        }


def _chunks_by_pack(manifest: Manifest) -> dict[int, set[int]]:
    """Return, for every pack, the chunks of the state that need it, including as a base."""
    chunk_of = {ChunkId(chunk.chunk_id): index for index, chunk in enumerate(manifest.chunks)}
    chunks: dict[int, set[int]] = {}
    packs_needed: list[frozenset[int]] = []
    for frame in manifest.frames:
        of_base = packs_needed[frame.base] if frame.base >= 0 else frozenset[int]()
        packs_needed.append(of_base if frame.pack in of_base else of_base | {frame.pack})
        if frame.chunk_id in chunk_of:
            for pack in packs_needed[-1]:
                chunks.setdefault(pack, set()).add(chunk_of[frame.chunk_id])
    return chunks


def _paths_by_chunk(manifest: Manifest) -> dict[ChunkId, list[str]]:
    found: dict[ChunkId, list[str]] = {}
    for path, leaf in leaves_of(manifest.tree):
        if not isinstance(leaf, TensorNode):
            continue
        shown = format_path(path)
        for chunk in {piece.chunk for piece in manifest.storages[manifest.tensors[leaf.tensor].storage].pieces}:
            paths = found.setdefault(ChunkId(manifest.chunks[chunk].chunk_id), [])
            if len(paths) < TENSORS_SHOWN_MAX:
                paths.append(shown)
    _add_bases(found, manifest)
    return found


def _add_bases(found: dict[ChunkId, list[str]], manifest: Manifest) -> None:
    """Give every chunk that others need as a base the first paths of those others, too."""
    needed_by: dict[int, list[int]] = {}
    for index in range(len(manifest.frames) - 1, -1, -1):
        frame = manifest.frames[index]
        if frame.base >= 0:
            needed_by.setdefault(frame.base, []).append(index)
        for other in reversed(needed_by.get(index, ())):
            paths = found.setdefault(frame.chunk_id, [])
            if len(paths) >= TENSORS_SHOWN_MAX:
                break
            more = (path for path in found[manifest.frames[other].chunk_id] if path not in paths)
            paths.extend(islice(more, TENSORS_SHOWN_MAX - len(paths)))


def lost_frames(chunk_ids: Sequence[ChunkId]) -> list[LocatedFrame]:
    """Return the frames that a manifest lists for lost chunks: positions in a pack that does not exist."""
    extent = frame_extent(_LOST_STORED_NBYTES)
    directory_nbytes = align_up(DIRECTORY_ENTRY_NBYTES * len(chunk_ids), PACK_ALIGN)
    frames_end = align_up(SUPERHEADER_NBYTES + extent * len(chunk_ids), PACK_ALIGN)
    pack = PackRef(new_pack_id(), frames_end + directory_nbytes + TAIL_NBYTES, bytes(DIGEST_NBYTES), LOST_TIER)
    return [
        LocatedFrame(FrameRef(chunk_id, 0, SUPERHEADER_NBYTES + extent * index, _LOST_STORED_NBYTES), pack, None)
        for index, chunk_id in enumerate(chunk_ids)
    ]


def lost_chunks(manifest: Manifest) -> set[int]:
    """Return the chunks of a manifest that are lost."""
    packs = {index for index, pack in enumerate(manifest.packs) if pack.tier == LOST_TIER}
    if not packs:
        return set()
    ids = {frame.chunk_id for frame in manifest.frames if frame.pack in packs}
    return {index for index, chunk in enumerate(manifest.chunks) if chunk.chunk_id in ids}


def lost_tensors(manifest: Manifest) -> tuple[str, ...]:
    """Return the dotted paths of all tensors that have lost bytes."""
    chunks = lost_chunks(manifest)
    return tensor_paths(manifest, chunks, count_max=len(manifest.tensors) + 1) if chunks else ()


def lost_error(manifest: Manifest) -> MissingChunkError:
    """Return the error for a caller that needs lost chunks of a partial checkpoint."""
    header, tensors = manifest.header, lost_tensors(manifest)
    shown = ", ".join(tensors[:LOST_TENSORS_SHOWN_MAX])
    more = len(tensors) - LOST_TENSORS_SHOWN_MAX
    return MissingChunkError(
        f"{len(tensors)} of {header.tensor_count} tensors of seq {header.seq} (step {header.step}) are lost: "
        + shown
        + (f" and {more} more" if more > 0 else ""),
        todo="restore the other tensors with only=, restore another checkpoint, or run `ckstore repair`",
        tensors=tensors,
    )


def require_complete(manifest: Manifest, storages: Iterable[int]) -> None:
    """Raise if any of these storages has lost bytes.

    Raises:
        MissingChunkError: One has. The message names all affected tensors.
    """
    chunks = lost_chunks(manifest)
    if chunks and any(piece.chunk in chunks for index in storages for piece in manifest.storages[index].pieces):
        raise lost_error(manifest)
