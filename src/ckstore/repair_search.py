"""Which chunks of a store can still be read, and where: what is named is checked, what is lost is looked for.

Invariants:
- A frame that no manifest names is believed only after it was decoded, with all its bases, to the chunk that it says.
- What is found rests on no cycle: a frame is taken when its base was found before it.
- Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ckstore.errors import CkstoreError, CorruptError
from ckstore.format.frame import FrameHeader
from ckstore.format.layout import ManifestName
from ckstore.format.manifest import Manifest
from ckstore.ids import NO_BASE, ChunkId, PackId
from ckstore.io.backend import Backend
from ckstore.store.audit import FrameCheck
from ckstore.store.damage import Place, Uses
from ckstore.store.known import LOCAL_TIER, LOST_TIER
from ckstore.store.parts import Parts
from ckstore.store.shelf import FoundFrame, PackCopy, PackLook, Shelf


@dataclass(frozen=True, slots=True)
class PackState:
    """A pack that manifests name, as it was found.

    Attributes:
        copy: Where what is left of it lies; None: nowhere.
        problem: What is wrong with it; empty where nothing is.
        frames: The sound frames among those that manifests name.
    """

    copy: PackCopy | None
    problem: str
    frames: dict[Place, FrameHeader] = field(default_factory=dict)

    @property
    def is_spoiled(self) -> bool:
        """Whether nothing should rest on it any more."""
        return bool(self.problem)


class Search:
    """Looks at all that manifests name, and elsewhere for what is lost.

    Args:
        parts: The store.
        make_check: Makes what decodes a frame and compares its identity.
        sources: Other places where packs of this store may lie.
        on_progress: Called with packs looked at and packs in all.
    """

    def __init__(
        self,
        parts: Parts,
        make_check: Callable[[], FrameCheck],
        sources: Sequence[Backend] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._parts = parts
        self.shelf = Shelf(parts, sources)
        self._check = make_check()
        self._tell = on_progress or (lambda done, total: None)
        self.states: dict[PackId, PackState] = {}
        self.found: dict[ChunkId, FoundFrame] = {}
        """Chunks that were lost where manifests name them, and where they were found; their bases too."""
        self.packs_elsewhere = 0
        """Packs in other tiers: these are not read."""

    def look(self, names: Iterable[ManifestName]) -> None:
        """Check every pack and frame that these manifests name, and look for what is lost."""
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
        return self._parts.manifests_of(name.run).load(name)

    def sound_chains(self, manifest: Manifest) -> list[bool]:
        """Return for every frame of a manifest whether it, and every base of it, is sound where it is named."""
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
        """Return the plain bytes of a chunk that was found.

        Raises:
            CorruptError: They are damaged after all.
        """
        return self._decode(self.found[chunk_id])

    def _state_of(self, pack_id: PackId, places: Iterable[Place], sizes: set[int]) -> PackState:
        # Twice: a collector may move what was just seen, or someone bring it back, before it is opened.
        found = self._best_of(pack_id, places, sizes) or self._best_of(pack_id, places, sizes)
        return found or PackState(None, "it is missing")

    def _best_of(self, pack_id: PackId, places: Iterable[Place], sizes: set[int]) -> PackState | None:
        best: PackState | None = None
        for copy in self.shelf.copies_of(pack_id):
            if copy.kind not in ("place", "trash"):
                # Frames in quarantine and elsewhere are copied, and found as any other.
                continue
            try:
                look = self.shelf.look_into(copy)
                frames = self._sound_frames(copy, look, places)
            except FileNotFoundError:
                continue
            problem = look.problem
            if not problem and look.ref is not None and {look.ref.nbytes} != sizes:
                problem = "its size is not what manifests say"
            if not problem and len(frames) < len(set(places)):
                problem = "frames of it are damaged"
            if not problem and best is not None:
                problem = "a damaged file has its name"
            if best is None or len(frames) > len(best.frames):
                best = PackState(copy, problem, frames)
            if not problem:
                break
        return best

    def _sound_frames(self, copy: PackCopy, look: PackLook, places: Iterable[Place]) -> dict[Place, FrameHeader]:
        there = {(entry.chunk_id, entry.offset, entry.stored_nbytes) for entry in look.entries}
        checked = self.shelf.check(copy, [place for place in places if place in there])
        return {place: header for place, header in checked.items() if header is not None}

    def _wanted(self, manifest: Manifest) -> set[ChunkId]:
        """Return the chunks that a manifest needs and cannot have from where it says."""
        sound = self.sound_chains(manifest)
        index_of = {frame.chunk_id: index for index, frame in enumerate(manifest.frames)}
        ids = (ChunkId(chunk.chunk_id) for chunk in manifest.chunks)
        return {chunk_id for chunk_id in ids if not sound[index_of[chunk_id]]}

    def _find(self, wanted: set[ChunkId], named: Iterable[PackId]) -> None:
        """Look for chunks in every pack that can be reached, and for the bases of what is found, and theirs."""
        candidates: dict[ChunkId, list[tuple[PackCopy, int, int, ChunkId]]] = {}
        copies = list(self.shelf.all_copies(named))
        looked_for: set[ChunkId] = set()
        missing = set(wanted)
        while missing:
            looked_for |= missing
            for copy in copies:
                try:
                    entries = self.shelf.look_into(copy).entries
                except (FileNotFoundError, CkstoreError):
                    continue
                for entry in entries:
                    if entry.chunk_id in missing:
                        found = (copy, entry.offset, entry.stored_nbytes, entry.base_id)
                        candidates.setdefault(entry.chunk_id, []).append(found)
            bases = {base for rows in candidates.values() for *_, base in rows if base != NO_BASE}
            missing = bases - looked_for
        self._settle(candidates)

    def _settle(self, candidates: dict[ChunkId, list[tuple[PackCopy, int, int, ChunkId]]]) -> None:
        """Take frames whose bases were taken, until nothing more is found."""
        open_rows = {chunk_id: list(rows) for chunk_id, rows in candidates.items()}
        is_moving = True
        while is_moving and open_rows:
            is_moving = False
            for chunk_id in sorted(open_rows):
                rows = open_rows[chunk_id]
                for row in [row for row in rows if row[3] == NO_BASE or row[3] in self.found]:
                    rows.remove(row)
                    if self._is_sound(chunk_id, row):
                        is_moving = True
                        del open_rows[chunk_id]
                        break

    def _is_sound(self, chunk_id: ChunkId, row: tuple[PackCopy, int, int, ChunkId]) -> bool:
        copy, offset, stored_nbytes, base_id = row
        try:
            header, payload = self.shelf.read(copy, offset, stored_nbytes)
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
        header, payload = self.shelf.read(frame.copy, frame.offset, frame.header.stored_nbytes)
        if header != frame.header:
            raise CorruptError("a frame has changed since it was found", where=frame.copy.path)
        return payload

    def _decode_payload(self, frame: FoundFrame, payload: bytes) -> bytes:
        # Chains may be longer than Python calls itself.
        chain = [frame]
        while chain[-1].header.has_base:
            chain.append(self.found[chain[-1].header.base_id])
        plain: bytes | None = None
        for each in reversed(chain):
            base = None if plain is None else memoryview(bytearray(plain))
            stored = payload if each is frame else self._payload_of(each)
            plain = bytes(self._check(each.header, memoryview(stored), base))
        assert plain is not None, "a chain has a frame"
        return plain
