"""One checkpoint as it would be stored after those newer than it: its form, and what that costs, estimated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ckstore.bases import Bases
from ckstore.basing import Basing, choose_forms
from ckstore.choice import Verdict
from ckstore.config import Policy
from ckstore.format.choices import UNSAMPLED, Choices
from ckstore.format.frame import frame_extent
from ckstore.format.manifest import FrameRef, Manifest, PackRef
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.wire import align_up
from ckstore.ids import ChunkId, PackId
from ckstore.plan import CommitPlan
from ckstore.repack_ledger import Key, sizes_of
from ckstore.store.known import LOCAL_TIER, Known, KnownFrame, locate
from ckstore.store.parts import Parts
from ckstore.stored_state import plan_of, stored_state

_PLANNED_PACK = PackRef(PackId(bytes(16)), 0, bytes(32))
"""Stands for packs that are not written yet."""


class Placed(Known):
    """Frames that older checkpoints may share or be coded against, written or planned so far."""

    def __init__(self) -> None:
        super().__init__(manifests_max=1)
        self._frames: dict[ChunkId, KnownFrame] = {}
        self._added: list[ChunkId] = []

    def find(self, chunk_id: ChunkId) -> KnownFrame | None:
        """Return the frame of a chunk."""
        return self._frames.get(chunk_id)

    def put(self, frames: Iterable[KnownFrame]) -> None:
        """Remember frames; the first one of a chunk stays."""
        for known in frames:
            if known.frame.chunk_id not in self._frames:
                self._frames[known.frame.chunk_id] = known
                self._added.append(known.frame.chunk_id)

    def mark(self) -> int:
        """Return a point to come back to."""
        return len(self._added)

    def back_to(self, mark: int) -> None:
        """Forget everything that was put after a point."""
        for chunk_id in self._added[mark:]:
            del self._frames[chunk_id]
        del self._added[mark:]


def roots_of(manifest: Manifest) -> list[KnownFrame]:
    """Return the local frames of a manifest that need no base.

    Of a checkpoint that stays, only these may serve older ones: the bases of the others may yet be coded anew.
    """
    return [
        KnownFrame(frame, manifest.packs[frame.pack], None)
        for frame in manifest.frames
        if frame.base < 0 and manifest.packs[frame.pack].tier == LOCAL_TIER
    ]


def needs_others(manifest: Manifest) -> bool:
    """Whether a restore needs chunks beyond those of the state itself."""
    return len(manifest.frames) > len(manifest.chunks)


@dataclass(slots=True)
class Sketch:
    """A planned form of a checkpoint.

    Args:
        manifest: As it is stored now.
        plan: How it is cut into chunks.
        basing: The base, the form of each chunk, and why.
        in_place: Frames that stay where they are, by chunk.
        frames: Where each chunk will lie; sizes of new frames are estimates.
        is_new: Whether the frame of each chunk is new.
    """

    manifest: Manifest
    plan: CommitPlan
    basing: Basing
    in_place: dict[ChunkId, KnownFrame]
    frames: list[KnownFrame] = field(init=False, default_factory=list)
    is_new: list[bool] = field(init=False, default_factory=list)
    _frame_of: dict[ChunkId, FrameRef] = field(init=False)

    def __post_init__(self) -> None:
        self._frame_of = {frame.chunk_id: frame for frame in self.manifest.frames}

    def leaving(self, in_place: dict[ChunkId, KnownFrame], placed: Known) -> Sketch:
        """Return the same form with other frames that stay where they are."""
        other = Sketch(self.manifest, self.plan, self.basing, in_place)
        other.place(placed)
        return other

    def place(self, placed: Known) -> None:
        """Give every chunk a frame: one that is placed, or stays, or is new."""
        bits = self._bits()
        found: dict[int, KnownFrame] = {}
        new: set[int] = set()
        forms = self.basing.forms
        for index in sorted(range(len(forms)), key=lambda index: forms[index].master is not None):
            chunk, form = self.manifest.chunks[index], forms[index]
            chunk_id = ChunkId(chunk.chunk_id)
            known = placed.find(chunk_id) or self.in_place.get(chunk_id)
            if known is None:
                new.add(index)
                base = form.base if form.master is None else found[form.master]
                estimate = chunk.nbytes * bits.get(index, 8.0 * chunk.element_width) / (8 * chunk.element_width)
                stored_nbytes = 1 if form.master is not None else max(1, min(chunk.nbytes, round(estimate)))
                stored_nbytes = self._stored_so(chunk_id, base, chunk.nbytes) or stored_nbytes
                depth = 0 if base is None else base.frame.depth + 1
                known = KnownFrame(FrameRef(chunk_id, 0, 0, stored_nbytes, -1, depth), _PLANNED_PACK, base)
            found[index] = known
        self.frames = [found[index] for index in range(len(forms))]
        self.is_new = [index in new for index in range(len(forms))]

    def _stored_so(self, chunk_id: ChunkId, base: KnownFrame | None, nbytes: int) -> int | None:
        """Return what a chunk takes that is coded already against this base: better than any estimate."""
        frame = self._frame_of[chunk_id]
        base_id = self.manifest.frames[frame.base].chunk_id if frame.base >= 0 else None
        is_so = base_id == (None if base is None else base.frame.chunk_id) and frame.stored_nbytes < nbytes
        return frame.stored_nbytes if is_so else None

    def _bits(self) -> dict[int, float]:
        """Return the estimated bits per element of each chunk that was surveyed."""
        bits: dict[int, float] = {}
        for surveyed, view in zip(self.basing.surveyed, self.basing.verdict.views, strict=True):
            against = None if view is None else surveyed.estimate.against(view)
            for index in surveyed.unit.chunks:
                has_base = self.basing.forms[index].base is not None
                bits[index] = against.bits if has_base and against is not None else surveyed.estimate.full_bits
        return bits

    @property
    def written_nbytes(self) -> int:
        """Bytes of new frames."""
        return sum(known.frame.frame_nbytes for known, is_new in zip(self.frames, self.is_new, strict=True) if is_new)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of a pack that holds the new frames; 0 for none."""
        new = [known.frame.stored_nbytes for known, is_new in zip(self.frames, self.is_new, strict=True) if is_new]
        frames = align_up(sum(map(frame_extent, new)), PACK_ALIGN)
        directory = align_up(len(new) * DIRECTORY_ENTRY_NBYTES, PACK_ALIGN)
        return SUPERHEADER_NBYTES + frames + directory + TAIL_NBYTES if new else 0

    @property
    def moved_nbytes(self) -> int:
        """Bytes of the frames that hold the checkpoint's own chunks now and would do so no more."""
        return sum(nbytes for key, nbytes in self._own().items() if key not in self.keys_in_place())

    @property
    def stored_before(self) -> int:
        """Bytes of the frames that hold the checkpoint's own chunks now."""
        return sum(self._own().values())

    @property
    def stored_after(self) -> int:
        """The same afterwards, without frames that newer checkpoints hold."""
        return self.written_nbytes + sum(self.keys_in_place().values())

    @property
    def read_before(self) -> int:
        """Bytes that a restore reads now."""
        return sum(frame.frame_nbytes for frame in self.manifest.frames)

    @property
    def read_after(self) -> int:
        """Bytes that a restore reads afterwards."""
        links = {link.frame.chunk_id: link.frame.frame_nbytes for known in self.frames for link in known.closure()}
        return sum(links.values())

    def keys_in_place(self) -> dict[Key, int]:
        """Return the frames that stay where they are, with their bytes."""
        return {(k.pack.pack_id, k.frame.offset): k.frame.frame_nbytes for k in self.in_place.values()}

    def _own(self) -> dict[Key, int]:
        chunk_ids = {chunk.chunk_id for chunk in self.manifest.chunks}
        sizes = sizes_of(self.manifest).items()
        return {
            key: n for (key, n), frame in zip(sizes, self.manifest.frames, strict=True) if frame.chunk_id in chunk_ids
        }

    def planned(self) -> Manifest:
        """Return the manifest as it would be, for those that are coded after it."""
        packs, frames = locate(self.frames)
        return replace(self.manifest, packs=tuple(packs), frames=tuple(frames), choices=self.choices)

    @property
    def choices(self) -> Choices | None:
        """What its manifest would say of its base."""
        return self.basing.choices([UNSAMPLED] * len(self.manifest.storages))

    def unchanged(self) -> Manifest:
        """Return the manifest as it is; for those that are coded after it, a keyframe."""
        return replace(self.manifest, choices=None)

    def follow(self, bases: Bases, manifest: Manifest) -> None:
        """Let the next older checkpoint be coded against this one."""
        self.basing.remember(bases, manifest, [ChunkId(chunk.chunk_id) for chunk in self.manifest.chunks])


def sketch(
    parts: Parts,
    manifest: Manifest,
    placed: Known,
    bases: Bases,
    policy: Policy,
    *,
    is_keyframe: bool,
    in_place: dict[ChunkId, KnownFrame],
) -> Sketch:
    """Read samples of a checkpoint and plan its form.

    Args:
        parts: The store.
        manifest: The checkpoint.
        placed: Frames that it may share, or be coded against.
        bases: The next newer checkpoint, and the keyframe that goes with it.
        policy: How it shall be coded.
        is_keyframe: Code every chunk whole.
        in_place: Frames of it that others need where they are.

    Raises:
        CorruptError: What is stored is damaged.
        UnsupportedError: Its tensors do not cover its chunks.
    """
    plan = plan_of(manifest)
    with stored_state(parts, manifest) as state:
        basing = choose_forms(state.captured(), plan, placed, bases, policy, parts.limits)
    if is_keyframe:
        whole = tuple(replace(form, base=None, is_tried=False) for form in basing.forms)
        verdict = Verdict((None,) * len(basing.surveyed), "keyframe: among the newest, for fast restores")
        basing = replace(basing, forms=whole, verdict=verdict)
    found = Sketch(manifest, plan, basing, in_place)
    found.place(placed)
    return found
