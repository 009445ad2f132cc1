"""The frames that a repair copies: what is sound in damaged packs, and what was found where no manifest looks.

Invariants:
- A frame is compared with what was planned when it is read, and with what was read where it lies in its new pack.
- No manifest names a new pack before ``write`` has returned: then all of them are durable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckstore import kernels
from ckstore.errors import ConflictError, CorruptError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader
from ckstore.format.manifest import FrameRef, Manifest, PackRef
from ckstore.ids import NO_BASE, ChunkId, PackId, chunk_id_of
from ckstore.io.buffers import BufferPool
from ckstore.repair_plan import Pick, RepairPlan
from ckstore.store.known import KnownFrame
from ckstore.store.packer import FramePlace, Packer
from ckstore.store.parts import Parts
from ckstore.store.shelf import PackCopy

BLOCK_NBYTES = 8 << 20
BLOCKS = 3


@dataclass(frozen=True, slots=True)
class _Source:
    """A frame to be copied, or to be stored anew as plain bytes."""

    copy: PackCopy
    offset: int
    chunk_id: ChunkId
    is_plain: bool


class Copies:
    """Frames that are to lie in sound packs that manifests may name."""

    def __init__(self, parts: Parts, plan: RepairPlan) -> None:
        self._parts = parts
        self._search = plan.search
        self._headers: dict[_Source, FrameHeader] = {}
        self._places: dict[_Source, FramePlace] = {}
        self._refs: dict[PackId, PackRef] = {}
        for mend in plan.mends:
            if mend.picks:
                manifest = plan.search.load(mend.name)
                for pick in mend.picks:
                    self._want(manifest, pick)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(FRAME_HEADER_NBYTES + header.stored_nbytes for header in self._headers.values())

    def _want(self, manifest: Manifest, first: Pick) -> None:
        pick: Pick | None = first
        while pick is not None:
            source = self._source_of(manifest, pick)
            if source is not None and source not in self._headers:
                self._headers[source] = self._header_of(manifest, pick)
            pick = pick.base

    def _source_of(self, manifest: Manifest, pick: Pick) -> _Source | None:
        """Return what is to be copied for a pick; None: it can stay where the manifest says."""
        if pick.index < 0:
            found = self._search.found[pick.chunk_id]
            return _Source(found.copy, found.offset, pick.chunk_id, pick.is_plain)
        frame = manifest.frames[pick.index]
        state = self._search.states.get(manifest.packs[frame.pack].pack_id)
        if state is None or not state.is_spoiled:
            return None
        assert state.copy is not None, "a sound frame lies somewhere"
        return _Source(state.copy, frame.offset, pick.chunk_id, False)

    def _header_of(self, manifest: Manifest, pick: Pick) -> FrameHeader:
        if pick.index >= 0:
            frame = manifest.frames[pick.index]
            state = self._search.states[manifest.packs[frame.pack].pack_id]
            return state.frames[frame.chunk_id, frame.offset, frame.stored_nbytes]
        header = self._search.found[pick.chunk_id].header
        if not pick.is_plain:
            return header
        return replace(header, base_id=NO_BASE, steps=(), stored_nbytes=header.plain_nbytes)

    def write(self) -> None:
        """Copy them to new packs, check each where it lies then, and make the packs durable."""
        waiting = list(self._headers.items())
        while waiting:
            # A pack holds a chunk once; of a chunk in two forms the second goes to another pack.
            taken: set[ChunkId] = set()
            now: list[tuple[_Source, FrameHeader]] = []
            later: list[tuple[_Source, FrameHeader]] = []
            for row in waiting:
                (later if row[0].chunk_id in taken else now).append(row)
                taken.add(row[0].chunk_id)
            self._write_packs(now)
            waiting = later

    def _write_packs(self, rows: Sequence[tuple[_Source, FrameHeader]]) -> None:
        with BufferPool(BLOCK_NBYTES, BLOCKS) as pool:
            packer = Packer(
                self._parts.backend,
                pool,
                store_id=self._parts.store_id,
                nbytes_expected=sum(FRAME_HEADER_NBYTES + header.stored_nbytes for _, header in rows),
                copy=kernels.copy_bytes,
            )
            try:
                for source, header in rows:
                    self._copy(packer, source, header)
                self._refs.update({ref.pack_id: ref for ref in packer.finish()})
            except BaseException:
                packer.fail()
                packer.abandon()
                raise

    def _copy(self, packer: Packer, source: _Source, header: FrameHeader) -> None:
        payload = self._payload(source, header)

        def check(pieces: Sequence[memoryview]) -> None:
            if b"".join(pieces) != payload:
                raise CorruptError("a frame changed while it was copied", todo="test this machine's memory")

        place = self._places[source] = packer.place(header.stored_nbytes)
        packer.fill(place, header, [memoryview(payload)], check)

    def _payload(self, source: _Source, header: FrameHeader) -> bytes:
        if source.is_plain:
            plain = self._search.decoded(source.chunk_id)
            assert chunk_id_of(memoryview(plain)) == source.chunk_id, "what was decoded was checked"
            return plain
        with contextlib.suppress(CorruptError, FileNotFoundError):
            found, payload = self._search.shelf.read(source.copy, source.offset, header.stored_nbytes)
            if found == header:
                return payload
        raise ConflictError(
            "a frame that was sound when the repair was planned is not there any more",
            where=f"{source.copy.path}, offset {source.offset}",
            todo="repair again",
        )

    def located(self, manifest: Manifest, picks: Iterable[Pick]) -> list[KnownFrame]:
        """Return where the frames of a manifest lie, once what is to be copied was copied."""
        made: dict[ChunkId, KnownFrame] = {}
        return [self._located(manifest, pick, made) for pick in picks]

    def _located(self, manifest: Manifest, pick: Pick, made: dict[ChunkId, KnownFrame]) -> KnownFrame:
        # Chains may be longer than Python calls itself.
        chain: list[Pick] = []
        below: Pick | None = pick
        while below is not None and below.chunk_id not in made:
            chain.append(below)
            below = below.base
        for each in reversed(chain):
            base = None if each.base is None else made[each.base.chunk_id]
            made[each.chunk_id] = self._known(manifest, each, base)
        return made[pick.chunk_id]

    def _known(self, manifest: Manifest, pick: Pick, base: KnownFrame | None) -> KnownFrame:
        source = self._source_of(manifest, pick)
        if source is None:
            frame = manifest.frames[pick.index]
            return KnownFrame(frame, manifest.packs[frame.pack], base)
        place = self._places[source]
        ref = FrameRef(pick.chunk_id, 0, place.offset, place.stored_nbytes)
        return KnownFrame(ref, self._refs[place.pack.pack_id], base)
