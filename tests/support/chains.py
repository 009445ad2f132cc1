"""Write checkpoints by hand, with the bases that a test wants: chains of any depth, roundings, whatever a policy does.

The files are as a commit makes them; only the choice of bases is the test's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckstore.api import Store
from ckstore.codec import chunk_codec, kernels
from ckstore.commit.chunking import ChunkPlan, plan_commit
from ckstore.format.frame import FrameHeader
from ckstore.format.manifest import ChunkSpec, FrameRef, Manifest, PackRef, build_manifest, republished
from ckstore.format.paths import ManifestName
from ckstore.hashing import NO_BASE, ChunkId, PackId, chunk_id_of
from ckstore.io.buffers import BufferPool
from ckstore.state.capture import Captured, capture
from ckstore.state.tensors import LeafAdapter
from ckstore.store.pack_writer import FrameSlot, PackWriter

_BLOCK_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Frame:
    chunk_id: ChunkId
    base_id: ChunkId
    offset: int
    stored_nbytes: int
    pack: PackRef


@dataclass(slots=True)
class ChainWriter:
    """Writes checkpoints of one store.

    Args:
        store: Opened for writing.
        adapters: Libraries of tensors beyond numpy.
        rounds: Whether chunks of two-byte elements that round others of the same state are stored so.
    """

    store: Store
    adapters: Sequence[LeafAdapter] = ()
    rounds: bool = True
    names: list[ManifestName] = field(default_factory=list)
    _frames: dict[ChunkId, _Frame] = field(default_factory=dict)
    _plains: dict[ChunkId, bytes] = field(default_factory=dict)
    _states: list[list[ChunkId]] = field(default_factory=list)

    def commit(self, state: Any, step: int, *, base: int | None = None) -> Manifest:
        """Publish a state whose chunks, where they are new, are residuals of those at the same place of another one.

        Args:
            state: What is stored.
            step: Its step.
            base: Which of the states before, counted from 0, from the end if negative; None: a keyframe.
        """
        parts = self.store._repository
        parts.prepare_run()
        parts.lease.take()
        captured = capture(state, self.adapters)
        plan = plan_commit(captured.storages, parts.limits)
        plains = [_plain_of(chunk, captured) for chunk in plan.chunks]
        ids = [chunk_id_of(plain) for plain in plains]
        pool = BufferPool(_BLOCK_NBYTES, 4)
        packer = PackWriter(
            parts.backend,
            pool,
            store_id=parts.store_id,
            nbytes_expected=0,
            copy=kernels.copy_bytes,
        )
        placed: dict[ChunkId, tuple[FrameSlot, ChunkId]] = {}
        scratch = chunk_codec.Scratch(parts.limits.chunk_nbytes_max)
        # Masters come before what rounds them.
        for index in sorted(range(len(ids)), key=lambda index: plan.chunks[index].element_width == 2):
            if ids[index] in self._frames or ids[index] in placed:
                continue
            candidate = None if base is None else next(iter(self._states[base][index : index + 1]), None)
            coded, base_id = self._coded(plains[index], plan.chunks[index], candidate, ids, scratch)
            place = packer.reserve(coded.nbytes)
            header = FrameHeader(
                ids[index], base_id, len(plains[index]), coded.nbytes, coded.width, tuple(coded.steps), 0
            )
            packer.fill(place, header, coded.parts, lambda payload, xxh3: None)
            placed[ids[index]] = place, base_id
            self._plains[ids[index]] = plains[index]
        refs = {ref.pack_id: ref for ref in packer.finish()}
        pool.close()
        for chunk_id, (place, base_id) in placed.items():
            ref = refs[place.pack.pack_id]
            self._frames[chunk_id] = _Frame(chunk_id, base_id, place.offset, place.stored_nbytes, ref)
        self._states.append(ids)
        chunks = [
            ChunkSpec(chunk_id, chunk.nbytes, chunk.element_width, chunk.is_float)
            for chunk_id, chunk in zip(ids, plan.chunks, strict=True)
        ]
        return self._publish(captured, plan.storages, chunks, step, len(placed))

    def publish_again(self, manifest: Manifest, frames: Sequence[FrameRef]) -> Manifest:
        """Publish a checkpoint as a new entry whose frames are said to lie, and to rest on each other, otherwise."""
        parts = self.store._repository
        seq = parts.manifests.claim(parts.seq_next())
        parts.note_seq(seq)
        again = republished(manifest, seq=seq, time_ns=parts.clock.now_ns(), is_archival=False)
        again = replace(again, frames=tuple(frames))
        self.names.append(parts.manifests.publish(again))
        return again

    def _coded(
        self,
        plain: bytes,
        chunk: ChunkPlan,
        candidate: ChunkId | None,
        ids: Sequence[ChunkId],
        scratch: chunk_codec.Scratch,
    ) -> tuple[chunk_codec.Encoded, ChunkId]:
        view = memoryview(plain)
        if self.rounds and chunk.element_width == 2:
            for master in ids:
                if len(self._plains.get(master, b"")) == 2 * len(plain):
                    rounded = chunk_codec.encode_rounded(view, memoryview(self._plains[master]), scratch=scratch)
                    if rounded is not None:
                        return rounded, master
        if candidate is not None and len(self._plains[candidate]) == len(plain):
            residual = chunk_codec.encode_delta(
                view,
                memoryview(self._plains[candidate]),
                width=chunk.element_width,
                is_float=chunk.is_float,
                compression="fast",
                scratch=scratch,
            )
            if residual is not None:
                return residual, candidate
        full = chunk_codec.encode(
            view, width=chunk.element_width, is_float=chunk.is_float, compression="fast", scratch=scratch
        )
        return full, NO_BASE

    def _publish(
        self, captured: Captured, storages: Any, chunks: Sequence[ChunkSpec], step: int, chunks_new: int
    ) -> Manifest:
        parts = self.store._repository
        packs, frames = self._located(chunks)
        seq = parts.manifests.claim(parts.seq_next())
        parts.note_seq(seq)
        manifest = build_manifest(
            store_id=parts.store_id,
            run=parts.run,
            seq=seq,
            step=step,
            time_ns=parts.clock.now_ns(),
            parent=None,
            tree=captured.tree,
            tensors=captured.tensors,
            storages=storages,
            chunks=chunks,
            packs=packs,
            frames=frames,
            bytes_written=0,
            chunks_new=chunks_new,
        )
        self.names.append(parts.manifests.publish(manifest))
        return manifest

    def _located(self, chunks: Sequence[ChunkSpec]) -> tuple[list[PackRef], list[FrameRef]]:
        """Return the frames of chunks, bases included and before what rests on them, and their packs."""
        packs: dict[PackId, tuple[int, PackRef]] = {}
        index_of: dict[ChunkId, int] = {}
        located: list[FrameRef] = []
        for spec in chunks:
            chain = [self._frames[ChunkId(spec.chunk_id)]]
            while chain[-1].base_id != NO_BASE:
                chain.append(self._frames[chain[-1].base_id])
            for link in reversed(chain):
                if link.chunk_id in index_of:
                    continue
                number, _ = packs.setdefault(link.pack.pack_id, (len(packs), link.pack))
                base = index_of.get(link.base_id, -1)
                index_of[link.chunk_id] = len(located)
                frame = FrameRef(link.chunk_id, number, link.offset, link.stored_nbytes, base)
                located.append(replace(frame, depth=0 if base < 0 else located[base].depth + 1))
        return [ref for _, ref in packs.values()], located


def _plain_of(chunk: ChunkPlan, captured: Captured) -> bytes:
    return b"".join(
        bytes(captured.storages[source.storage].read(source.offset, source.offset + source.nbytes))
        for source in chunk.sources
    )
