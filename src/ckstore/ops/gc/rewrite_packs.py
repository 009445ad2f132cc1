"""Rewrite packs with many unreferenced bytes: copy the needed frames to new packs, then replace the manifests.

Frames are copied without decoding. The checksum of each is compared with its bytes in the new pack. If the packs are in
a tier, the new packs are written to that tier.

Invariants:
- A new pack is durable before a manifest names it. Manifests are replaced as in docs/FORMAT.md section 10 (Replace).
- Between any two steps every checkpoint can be restored: an old pack stays until no manifest names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckstore.config import MIB
from ckstore.errors import BackendError, CapacityError, ChecksumError, CkstoreError, ConflictError, CorruptError
from ckstore.format.frame import FRAME_HEADER_NBYTES, decode_frame_header
from ckstore.format.location import FRAME_ROW
from ckstore.format.manifest import FrameRef, Manifest, PackRef
from ckstore.format.paths import GENERATION_MAX, ManifestName
from ckstore.hashing import ChunkId, PackId
from ckstore.io.backend import ReadFile
from ckstore.io.block_writer import copy_plain
from ckstore.io.buffers import BufferPool
from ckstore.ops.gc.plan import PackRewrite
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.memory_budget import read_buffer_nbytes
from ckstore.store.pack_reader import open_pack, read_frame
from ckstore.store.pack_writer import PackWriter
from ckstore.store.reachability import UNREADABLE, Marker
from ckstore.store.repository import Repository, finish_replacement

_log = logging.getLogger("ckstore")

BLOCK_NBYTES, BLOCK_COUNT = 8 * MIB, 3
"""Write buffers: two are being written while one is filled."""

Place = tuple[PackId, int]
"""A pack, and the offset of a frame in it."""


@dataclass(slots=True)
class Repacked:
    """What rewriting packs did.

    Attributes:
        pack_ids: Packs whose needed frames were copied.
        nbytes_written: Bytes of the new packs.
        manifests: Number of replaced manifests.
        troubles: What could not be rewritten, and why. No data is lost by it.
    """

    pack_ids: list[PackId] = field(default_factory=list)
    nbytes_written: int = 0
    manifests: int = 0
    troubles: list[str] = field(default_factory=list)


def rewrite_packs(
    repository: Repository,
    marker: Marker,
    rewrites: Sequence[PackRewrite],
    on_step: Callable[[], None] = lambda: None,
    *,
    tier: str = LOCAL_TIER,
) -> Repacked:
    """Rewrite packs. Damage, conflicts and a full disk are recorded in the result and leave the old packs in place.

    Args:
        repository: The store.
        marker: Reads the frame tables of manifests.
        rewrites: The packs, each with the manifests that name it.
        on_step: Called after each pack and each manifest.
        tier: The tier of the packs.

    Raises:
        CapacityError: A manifest could not be written.
        BackendError: The storage failed. Nothing may be moved or freed after that.
    """
    done, moved = Repacked(), dict[Place, tuple[PackRef, int]]()
    if not rewrites:
        return done
    with (
        BufferPool(BLOCK_NBYTES, BLOCK_COUNT) as blocks,
        BufferPool(read_buffer_nbytes(repository.limits), 1) as buffers,
    ):
        for rewrite in rewrites:
            try:
                moved |= _copy(repository, marker, rewrite, tier, blocks, buffers, done)
            except (CorruptError, FileNotFoundError) as error:
                done.troubles.append(f"pack {rewrite.pack_id.hex()} was not rewritten: {error}")
            except BackendError as error:
                if tier == LOCAL_TIER or error.is_transient:
                    raise
                # The server refuses one object. The other packs can still be rewritten.
                done.troubles.append(f"pack {rewrite.pack_id.hex()} was not rewritten: {error}")
            except CapacityError as error:
                done.troubles.append(f"rewriting packs stopped: {error}")
                break
            on_step()
    for name in sorted({name for rewrite in rewrites for name in rewrite.manifests}):
        _replace(repository, name, moved, done)
        on_step()
    return done


def _copy(
    repository: Repository,
    marker: Marker,
    rewrite: PackRewrite,
    tier: str,
    blocks: BufferPool,
    buffers: BufferPool,
    done: Repacked,
) -> dict[Place, tuple[PackRef, int]]:
    """Copy the needed frames of a pack to a new, durable pack. Return the new location of each frame."""
    ref, frames = _needed_frames(marker, rewrite)
    if not frames:
        # The manifests that named this pack were removed meanwhile.
        return {}
    target = repository.backend if tier == LOCAL_TIER else repository.tiers.open(tier)
    packer = PackWriter(
        target, blocks, store_id=repository.store_id, nbytes_expected=rewrite.packed_nbytes, copy=copy_plain
    )
    try:
        # Each range is read once, so do not cache it.
        file = open_pack(repository, ref, keeps_ranges=False)
        try:
            places = {
                offset: _copy_frame(repository, packer, file, frames[offset], buffers) for offset in sorted(frames)
            }
        finally:
            file.close()
        (made,) = packer.finish()
    except BaseException:
        packer.fail()
        packer.abandon()
        raise
    done.pack_ids.append(rewrite.pack_id)
    done.nbytes_written += made.nbytes
    made = replace(made, tier=tier)
    return {(rewrite.pack_id, offset): (made, to) for offset, to in places.items()}


def _needed_frames(marker: Marker, rewrite: PackRewrite) -> tuple[PackRef, dict[int, FrameRef]]:
    """Return the pack and its needed frames by offset."""
    ref: PackRef | None = None
    frames: dict[int, FrameRef] = {}
    for name in rewrite.manifests:
        try:
            marked, table = marker.read(name, name.path)
        except FileNotFoundError:
            # It was deleted or replaced meanwhile. A replacement is visible by now, and is seen when packs are marked
            # again.
            continue
        found = [index for index, each in enumerate(marker.packs_of(marked)) if each.pack_id == rewrite.pack_id]
        rows = np.frombuffer(table.frame_rows, dtype=np.dtype(list(FRAME_ROW)))
        for index in found:
            ref = next(each for each in marker.packs_of(marked) if each.pack_id == rewrite.pack_id)
            for row in rows[rows["pack"] == index]:
                offset, chunk_id = int(row["offset"]), ChunkId(row["chunk_id"].tobytes())
                frames[offset] = FrameRef(chunk_id, 0, offset, int(row["stored_nbytes"]))
    if ref is None:
        raise FileNotFoundError(rewrite.pack_id.hex())
    return ref, frames


def _copy_frame(
    repository: Repository, packer: PackWriter, file: ReadFile, frame: FrameRef, buffers: BufferPool
) -> int:
    """Copy one frame, check it where it was written, and return its new offset."""
    where = f"{file.name}, offset {frame.offset}"
    result = read_frame(repository.backend, file, frame.offset, frame.frame_nbytes, buffers)
    try:
        if len(result.view) != frame.frame_nbytes:
            raise ChecksumError("a frame is cut off", where=where)
        header = decode_frame_header(result.view[:FRAME_HEADER_NBYTES], limits=repository.limits, where=where)
        if (header.chunk_id, header.stored_nbytes) != (frame.chunk_id, frame.stored_nbytes):
            raise ChecksumError("the frame is not the one that the manifest locates here", where=where)

        def check(_: Sequence[memoryview], payload_xxh3: int) -> None:
            if payload_xxh3 != header.payload_xxh3:
                raise ChecksumError("the checksum of a frame's payload is wrong", where=where)

        place = packer.reserve(header.stored_nbytes)
        packer.fill(place, header, [result.view[FRAME_HEADER_NBYTES:]], check)
    finally:
        result.release()
    return place.offset


def _replace(
    repository: Repository, name: ManifestName, moved: dict[Place, tuple[PackRef, int]], done: Repacked
) -> None:
    """Publish the next generation of a manifest, with the new locations of copied frames."""
    run = repository.for_run(name.run)
    try:
        manifest = run.manifests.load(name)
        replacement = with_new_locations(manifest, moved)
        if replacement is None or name.generation >= GENERATION_MAX:
            return
        finish_replacement(run, replacement, run.manifests.publish(replacement))
        done.manifests += 1
    except FileNotFoundError:
        # It was deleted or replaced meanwhile.
        return
    except (CapacityError, BackendError):
        raise
    except (ConflictError, *UNREADABLE, CkstoreError) as error:
        # Another process replaced or deleted it first, or packs are missing. The manifest in place stays valid, and an
        # old pack stays as long as a manifest names it.
        done.troubles.append(f"seq {name.seq} of run {name.run} was not replaced: {error}")
        _log.debug("%s", error)


def with_new_locations(manifest: Manifest, moved: dict[Place, tuple[PackRef, int]]) -> Manifest | None:
    """Return the next generation of a manifest with the new frame locations; None if no frame was copied."""
    packs: dict[PackId, tuple[int, PackRef]] = {}
    frames, has_moved = [], False
    for frame in manifest.frames:
        pack, offset = manifest.packs[frame.pack], frame.offset
        to = moved.get((pack.pack_id, offset))
        if to is not None:
            has_moved = True
            pack, offset = to
        number, _ = packs.setdefault(pack.pack_id, (len(packs), pack))
        frames.append(replace(frame, pack=number, offset=offset))
    if not has_moved:
        return None
    header = replace(manifest.header, generation=manifest.header.generation + 1)
    return replace(manifest, header=header, packs=tuple(ref for _, ref in packs.values()), frames=tuple(frames))
