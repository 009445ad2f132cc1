"""Plan a repair: find what can still be read, and decide what happens to each checkpoint and file. Changes nothing.

A checkpoint whose frames are all found, in place or elsewhere, is healed: the next generation of its manifest names
them. If a frame is found nowhere, the checkpoint becomes partial. An unreadable manifest moves to quarantine, and an
earlier generation takes its place if there is one.

``Search`` checks every frame that manifests name, and searches all copies of packs for lost chunks.

Invariants:
- A frame that no manifest names is used only after it was decoded, with all its bases, to its chunk id.
- Found frames contain no cycle: a frame is used only after its base was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.errors import BackendError, CkstoreError, CorruptError, UnsupportedError
from ckstore.format import paths
from ckstore.format.frame import FrameHeader
from ckstore.format.manifest import Manifest, decode_manifest, tensor_paths
from ckstore.format.paths import ManifestName
from ckstore.hashing import NO_BASE, ChunkId, PackId
from ckstore.io.backend import Backend
from ckstore.ops.pack_copies import FoundFrame, PackContents, PackCopies, PackCopy
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.damage import FramePosition, Uses, lost_chunks
from ckstore.store.manifests import quarantined_names
from ckstore.store.repository import Repository

Action = Literal["heal", "partial", "quarantine", "revive", "bring back"]


@dataclass(frozen=True, slots=True)
class Pick:
    """The frame chosen for a chunk, and the frame chosen as its base.

    Attributes:
        chunk_id: The chunk.
        index: The manifest's own frame; -1: the frame that was found elsewhere.
        base: Its base; None: it has none.
        is_plain: Store it again as plain bytes, because its chain would be too deep.
        depth: Number of bases that it needs.
    """

    chunk_id: ChunkId
    index: int
    base: Pick | None
    is_plain: bool = False
    depth: int = 0

    @classmethod
    def upon(cls, base: Pick | None, chunk_id: ChunkId, index: int) -> Pick:
        """Return the pick for a chunk that is coded against ``base``."""
        return cls(chunk_id, index, base, depth=0 if base is None else base.depth + 1)


@dataclass(slots=True)
class Mend:
    """What to do for one checkpoint.

    Attributes:
        name: Its manifest.
        action: What to do.
        reason: Why, in a clause.
        picks: For a replaced manifest, the frame of each chunk that is not lost.
        lost: Lost chunks.
        tensors: Dotted paths of tensors with lost bytes.
        source: Location of an earlier generation or another copy of the manifest: a backend, a path and a name.
    """

    name: ManifestName
    action: Action
    reason: str
    picks: list[Pick] = field(default_factory=list)
    lost: list[ChunkId] = field(default_factory=list)
    tensors: tuple[str, ...] = ()
    source: tuple[Backend, str, ManifestName] | None = None
    is_done: bool = False


@dataclass(slots=True)
class RepairPlan:
    """What to do for a store.

    Attributes:
        search: What was found.
        mends: Damaged checkpoints.
        spoiled: Damaged packs that manifests name, each with what is wrong with it.
        in_trash: Packs in the trash that manifests name.
        claims: Missing claims.
        left: Sentences on what cannot be repaired here.
    """

    search: Search
    mends: list[Mend] = field(default_factory=list)
    damaged_packs: dict[PackId, str] = field(default_factory=dict)
    in_trash: list[PackId] = field(default_factory=list)
    claims: list[tuple[str, int]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing to repair."""
        return not (self.mends or self.damaged_packs or self.in_trash or self.claims or self.left)


def plan_repair(
    repository: Repository,
    *,
    sources: Sequence[Backend] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairPlan:
    """Check a whole store, and decide.

    Args:
        repository: The store.
        sources: Copies of the store.
        on_progress: Called with the number of packs checked and the total.
    """
    plan = RepairPlan(Search(repository, sources, on_progress))
    readable: list[ManifestName] = []
    for run in repository.runs():
        readable += _check_run(repository, run, plan, sources)
    plan.search.check_all(readable)
    for name in readable:
        mend = _plan_mend(plan.search, name, repository.limits.depth_max)
        if mend is not None:
            plan.mends.append(mend)
    for pack_id, state in sorted(plan.search.states.items()):
        if state.is_damaged:
            plan.damaged_packs[pack_id] = state.problem
        elif state.copy is not None and state.copy.kind == "trash":
            plan.in_trash.append(pack_id)
    return plan


def _check_run(
    repository: Repository, run: str, plan: RepairPlan, sources: Sequence[Backend]
) -> Iterator[ManifestName]:
    """Yield the readable manifests of a run. Plan what to do for the others."""
    manifests = repository.manifests_of(run)
    listing = manifests.listing()
    torn: dict[int, list[tuple[ManifestName, str]]] = {}
    whole: dict[int, ManifestName] = {}
    for name in (*listing.names, *listing.lower):
        if name.seq in listing.dropped:
            continue
        try:
            manifests.load(name)
        except FileNotFoundError:
            continue
        except (UnsupportedError, BackendError) as error:
            # A storage that fails temporarily is not damage.
            plan.left.append(str(error))
        except CorruptError as error:
            torn.setdefault(name.seq, []).append((name, error.what))
        else:
            if name.seq not in whole or whole[name.seq].generation < name.generation:
                whole[name.seq] = name
    claimed = {
        claim.seq
        for file in repository.backend.list_names(paths.claims_folder(run))
        if (claim := paths.parse_claim_file(file)) is not None and claim.kind == "claim"
    }
    plan.claims += [(run, seq) for seq in sorted({*whole, *torn} - claimed)]
    for seq, rows in sorted(torn.items()):
        for name, problem in rows:
            plan.mends.append(Mend(name, "quarantine", problem))
        if seq not in whole:
            plan.mends += _find_other_manifest(repository, rows[0][0], sources)
    # Manifests quarantined earlier, by an interrupted repair or an operator: search for an earlier generation, too.
    quarantined_seqs = {name.seq for name in quarantined_names(repository.backend, run)}
    for seq in sorted(quarantined_seqs - set(whole) - set(torn) - listing.dropped):
        plan.mends += _find_other_manifest(repository, ManifestName(run, seq, 0), sources)
    yield from sorted(whole.values(), reverse=True)


def _find_other_manifest(repository: Repository, name: ManifestName, sources: Sequence[Backend]) -> list[Mend]:
    """Return how another manifest of this seq can take its place; empty if there is none."""
    locations: list[tuple[Backend, str, ManifestName]] = [
        (repository.backend, trashed.path, trashed.name)
        for folder in repository.trash.contents()
        for trashed in folder.manifests
        if (trashed.name.run, trashed.name.seq) == (name.run, name.seq)
    ]
    for source in sources:
        for file in source.list_names(paths.manifests_folder(name.run)):
            found = paths.parse_manifest_file(name.run, file)
            if found is not None and found.seq == name.seq:
                locations.append((source, found.path, found))
    for backend, path, found in sorted(locations, key=lambda location: -location[2].generation):
        try:
            content = backend.read_bytes(path, nbytes_max=repository.limits.manifest_nbytes_max)
            manifest = decode_manifest(content, limits=repository.limits, expect=found, where=path)
        except (CorruptError, UnsupportedError, BackendError, FileNotFoundError):
            continue
        if manifest.header.store_id != repository.store_id:
            continue
        is_trash = backend is repository.backend
        reason = f"generation {found.generation} is in {'the trash' if is_trash else backend.root}"
        return [Mend(found, "revive" if is_trash else "bring back", reason, source=(backend, path, found))]
    return []


def _plan_mend(search: Search, name: ManifestName, depth_max: int) -> Mend | None:
    """Return what to do for one checkpoint; None if it can stay."""
    manifest = search.load(name)
    sound = search.sound_chains(manifest)
    damaged_packs = [
        pack.pack_id for pack in manifest.packs if pack.tier == LOCAL_TIER and search.states[pack.pack_id].is_damaged
    ]
    if all(sound) and not damaged_packs:
        return None
    picker = _Picker(search, manifest, sound, depth_max)
    picks, lost = [], []
    for chunk in manifest.chunks:
        pick = picker.pick(ChunkId(chunk.chunk_id))
        if pick is None:
            lost.append(ChunkId(chunk.chunk_id))
        else:
            picks.append(pick)
    before = {bytes(manifest.chunks[index].chunk_id) for index in lost_chunks(manifest)}
    if not damaged_packs and before == set(lost):
        # It is already partial, and nothing more was found.
        return None
    numbers = {index for index, chunk in enumerate(manifest.chunks) if chunk.chunk_id in set(lost)}
    tensors = tensor_paths(manifest, numbers, count_max=len(manifest.tensors) + 1) if lost else ()
    elsewhere = sum(pick.index < 0 for pick in picks)
    reason = f"{elsewhere} chunks found elsewhere, {len(lost)} lost" if elsewhere or lost else "packs are damaged"
    return Mend(name, "partial" if lost else "heal", reason, picks, lost, tensors)


class _Picker:
    """Choose frames for the chunks of one manifest: its own if they are sound, otherwise those found elsewhere."""

    def __init__(self, search: Search, manifest: Manifest, sound: Sequence[bool], depth_max: int) -> None:
        self._search = search
        self._manifest = manifest
        self._sound = sound
        self._depth_max = depth_max
        self._index_of = {frame.chunk_id: index for index, frame in enumerate(manifest.frames)}
        self._picked: dict[ChunkId, Pick | None] = {}

    def pick(self, chunk_id: ChunkId) -> Pick | None:
        """Return the frame for a chunk; None if it is lost."""
        # Iterate: chains may be longer than Python's recursion limit.
        waiting = [chunk_id]
        while waiting:
            base_id = self._base_of(waiting[-1])
            if base_id is not None and base_id not in self._picked:
                waiting.append(base_id)
                continue
            last = waiting.pop()
            self._picked[last] = self._choose(last, None if base_id is None else self._picked[base_id])
        return self._picked[chunk_id]

    def _base_of(self, chunk_id: ChunkId) -> ChunkId | None:
        """Return the base of the frame that would be chosen for a chunk."""
        index = self._index_of.get(chunk_id, -1)
        if index >= 0 and self._sound[index]:
            base = self._manifest.frames[index].base
            return None if base < 0 else self._manifest.frames[base].chunk_id
        # The base of a found frame was found before it, so this terminates.
        found = self._search.found.get(chunk_id)
        return found.header.base_id if found is not None and found.header.has_base else None

    def _choose(self, chunk_id: ChunkId, base: Pick | None) -> Pick | None:
        index = self._index_of.get(chunk_id, -1)
        if index >= 0 and self._sound[index]:
            return Pick.upon(base, chunk_id, index)
        found = self._search.found.get(chunk_id)
        if found is None:
            return None
        assert base is not None or not found.header.has_base, "the base of a found frame was found"
        pick = Pick.upon(base, chunk_id, -1)
        return pick if pick.depth <= self._depth_max else Pick(chunk_id, -1, None, is_plain=True)


@dataclass(frozen=True, slots=True)
class PackState:
    """A pack that manifests name, as it was found.

    Attributes:
        copy: The best copy; None if no copy was found.
        problem: What is wrong with it; empty if it is sound.
        frames: Headers of the sound frames among those that manifests name.
    """

    copy: PackCopy | None
    problem: str
    frames: dict[FramePosition, FrameHeader] = field(default_factory=dict)

    @property
    def is_damaged(self) -> bool:
        """Whether the pack is damaged, so that no manifest should name it."""
        return bool(self.problem)


class Search:
    """Check all frames that manifests name, and search elsewhere for lost chunks.

    Args:
        repository: The store.
        sources: Copies of the store.
        on_progress: Called with the number of packs checked and the total.
    """

    def __init__(
        self,
        repository: Repository,
        sources: Sequence[Backend] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._repository = repository
        self.pack_copies = PackCopies(repository, sources)
        self._decoder = FrameDecoder(repository.limits.chunk_nbytes_max)
        self._tell = on_progress or (lambda done, total: None)
        self.states: dict[PackId, PackState] = {}
        self.found: dict[ChunkId, FoundFrame] = {}
        """Lost chunks, and their bases, that were found elsewhere."""
        self.packs_elsewhere = 0
        """Number of packs in other tiers, which are not read."""

    def check_all(self, names: Iterable[ManifestName]) -> None:
        """Check every pack and frame that these manifests name, and search for lost chunks."""
        names = list(names)
        uses = Uses()
        for name in names:
            uses.add(name, self.load(name))
        for number, (pack_id, pack) in enumerate(sorted(uses.packs.items())):
            tiers = {ref.tier for ref in pack.refs.values()}
            self.packs_elsewhere += bool(tiers - {LOCAL_TIER, LOST_TIER})
            if LOCAL_TIER in tiers:
                self.states[pack_id] = self._state_of(pack_id, pack.places, {r.nbytes for r in pack.refs.values()})
            self._tell(number + 1, len(uses.packs))
        wanted = {chunk_id for name in names for chunk_id in self._wanted(self.load(name))}
        if wanted:
            self._find(wanted, uses.packs)

    def load(self, name: ManifestName) -> Manifest:
        """Read a manifest."""
        return self._repository.manifests_of(name.run).load(name)

    def sound_chains(self, manifest: Manifest) -> list[bool]:
        """Return for every frame of a manifest whether it and all its bases are sound in place."""
        sound: list[bool] = []
        for frame in manifest.frames:
            pack = manifest.packs[frame.pack]
            is_sound = pack.tier != LOST_TIER
            if pack.tier == LOCAL_TIER:
                place = (frame.chunk_id, frame.offset, frame.stored_nbytes)
                header = self.states[pack.pack_id].frames.get(place)
                base_id = manifest.frames[frame.base].chunk_id if frame.base >= 0 else NO_BASE
                is_sound = header is not None and header.base_id == base_id
            sound.append(is_sound and (frame.base < 0 or sound[frame.base]))
        return sound

    def decoded(self, chunk_id: ChunkId) -> bytes:
        """Return the plain bytes of a found chunk.

        Raises:
            CorruptError: They are damaged after all.
        """
        return self._decode(self.found[chunk_id])

    def _state_of(self, pack_id: PackId, places: Iterable[FramePosition], sizes: set[int]) -> PackState:
        # Try twice: another process may move the pack to the trash, or back, before it is opened.
        found = self._best_of(pack_id, places, sizes) or self._best_of(pack_id, places, sizes)
        return found or PackState(None, "it is missing")

    def _best_of(self, pack_id: PackId, places: Iterable[FramePosition], sizes: set[int]) -> PackState | None:
        best: PackState | None = None
        for copy in self.pack_copies.copies_of(pack_id):
            if copy.kind not in ("place", "trash"):
                # Frames in quarantine and in other stores are searched like all others, and copied.
                continue
            try:
                contents = self.pack_copies.read_contents(copy)
                frames = self._sound_frames(copy, contents, places)
            except FileNotFoundError:
                continue
            problem = contents.problem
            if not problem and contents.ref is not None and {contents.ref.nbytes} != sizes:
                problem = "its size differs from what manifests say"
            if not problem and len(frames) < len(set(places)):
                problem = "some of its frames are damaged"
            if not problem and best is not None:
                problem = "another file of this name is damaged"
            if best is None or len(frames) > len(best.frames):
                best = PackState(copy, problem, frames)
            if not problem:
                break
        return best

    def _sound_frames(
        self, copy: PackCopy, contents: PackContents, places: Iterable[FramePosition]
    ) -> dict[FramePosition, FrameHeader]:
        present = {(entry.chunk_id, entry.offset, entry.stored_nbytes) for entry in contents.entries}
        checked = self.pack_copies.check(copy, [place for place in places if place in present])
        return {place: header for place, header in checked.items() if header is not None}

    def _wanted(self, manifest: Manifest) -> set[ChunkId]:
        """Return the chunks of a manifest that cannot be read in place."""
        sound = self.sound_chains(manifest)
        index_of = {frame.chunk_id: index for index, frame in enumerate(manifest.frames)}
        ids = (ChunkId(chunk.chunk_id) for chunk in manifest.chunks)
        return {chunk_id for chunk_id in ids if not sound[index_of[chunk_id]]}

    def _find(self, wanted: set[ChunkId], named: Iterable[PackId]) -> None:
        """Search all reachable packs for chunks, then for the bases of the frames found, and so on."""
        candidates: dict[ChunkId, list[tuple[PackCopy, int, int, ChunkId]]] = {}
        copies = list(self.pack_copies.all_copies(named))
        searched: set[ChunkId] = set()
        missing = set(wanted)
        while missing:
            searched |= missing
            for copy in copies:
                try:
                    entries = self.pack_copies.read_contents(copy).entries
                except (FileNotFoundError, CkstoreError):
                    continue
                for entry in entries:
                    if entry.chunk_id in missing:
                        found = (copy, entry.offset, entry.stored_nbytes, entry.base_id)
                        candidates.setdefault(entry.chunk_id, []).append(found)
            bases = {base for rows in candidates.values() for *_, base in rows if base != NO_BASE}
            missing = bases - searched
        self._accept(candidates)

    def _accept(self, candidates: dict[ChunkId, list[tuple[PackCopy, int, int, ChunkId]]]) -> None:
        """Accept frames whose bases were accepted, until a round finds none."""
        open_rows = {chunk_id: list(rows) for chunk_id, rows in candidates.items()}
        has_progress = True
        while has_progress and open_rows:
            has_progress = False
            for chunk_id in sorted(open_rows):
                rows = open_rows[chunk_id]
                for row in [row for row in rows if row[3] == NO_BASE or row[3] in self.found]:
                    rows.remove(row)
                    if self._is_sound(chunk_id, row):
                        has_progress = True
                        del open_rows[chunk_id]
                        break

    def _is_sound(self, chunk_id: ChunkId, row: tuple[PackCopy, int, int, ChunkId]) -> bool:
        copy, offset, stored_nbytes, base_id = row
        try:
            header, payload = self.pack_copies.read(copy, offset, stored_nbytes)
            if (header.chunk_id, header.base_id) != (chunk_id, base_id):
                return False
            frame = FoundFrame(copy, offset, header)
            self._decode_payload(frame, payload)
        except (CkstoreError, FileNotFoundError):
            return False
        self.found[chunk_id] = frame
        return True

    def _decode(self, frame: FoundFrame) -> bytes:
        return self._decode_payload(frame, self._payload_of(frame))

    def _payload_of(self, frame: FoundFrame) -> bytes:
        header, payload = self.pack_copies.read(frame.copy, frame.offset, frame.header.stored_nbytes)
        if header != frame.header:
            raise CorruptError("a frame has changed since it was found", where=frame.copy.path)
        return payload

    def _decode_payload(self, frame: FoundFrame, payload: bytes) -> bytes:
        # Iterate: chains may be longer than Python's recursion limit.
        chain = [frame]
        while chain[-1].header.has_base:
            chain.append(self.found[chain[-1].header.base_id])
        plain: bytes | None = None
        for each in reversed(chain):
            base = None if plain is None else memoryview(bytearray(plain))
            stored = payload if each is frame else self._payload_of(each)
            plain = bytes(self._decoder.check_frame(each.header, memoryview(stored), base))
        assert plain is not None, "a chain has a frame"
        return plain
