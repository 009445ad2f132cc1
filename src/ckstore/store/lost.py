"""Chunks that are lost: what a manifest says of them, and who may go on without them.

``repair`` replaces the manifest of a checkpoint that cannot be made whole by a generation that locates its lost chunks
in the tier ``lost``, which is nowhere. So the rest of it can be restored, nothing names a pack that is not there, and
the checkpoint's id stays: when the same bytes are found or committed again, another repair makes it whole.

Invariants:
- Nothing reads from the tier ``lost``: what needs a chunk in it raises, and names the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckstore.errors import MissingChunkError
from ckstore.format.frame import frame_extent
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.wire import align_up
from ckstore.ids import DIGEST_NBYTES, ChunkId, new_pack_id
from ckstore.store.known import LOST_TIER, KnownFrame

if TYPE_CHECKING:
    # Only types here: listing a run reads headers, and must start at once.
    from ckstore.format.manifest import Manifest

NAMES_SHOWN_MAX = 8
_STORED_NBYTES = 1


def lost_frames(chunk_ids: Sequence[ChunkId]) -> list[KnownFrame]:
    """Return what a manifest says of lost chunks: places in a pack that is nowhere."""
    from ckstore.format.manifest import FrameRef, PackRef

    extent = frame_extent(_STORED_NBYTES)
    directory_nbytes = align_up(DIRECTORY_ENTRY_NBYTES * len(chunk_ids), PACK_ALIGN)
    frames_end = align_up(SUPERHEADER_NBYTES + extent * len(chunk_ids), PACK_ALIGN)
    pack = PackRef(new_pack_id(), frames_end + directory_nbytes + TAIL_NBYTES, bytes(DIGEST_NBYTES), LOST_TIER)
    return [
        KnownFrame(FrameRef(chunk_id, 0, SUPERHEADER_NBYTES + extent * index, _STORED_NBYTES), pack, None)
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
    from ckstore.store.damage import tensor_paths

    chunks = lost_chunks(manifest)
    return tensor_paths(manifest, chunks, count_max=len(manifest.tensors) + 1) if chunks else ()


def lost_error(manifest: Manifest) -> MissingChunkError:
    """Return the error for who needs what a partial checkpoint has lost."""
    header, tensors = manifest.header, lost_tensors(manifest)
    shown = ", ".join(tensors[:NAMES_SHOWN_MAX])
    more = len(tensors) - NAMES_SHOWN_MAX
    return MissingChunkError(
        f"{len(tensors)} of {header.tensor_count} tensors of seq {header.seq} (step {header.step}) are lost: "
        + shown
        + (f" and {more} more" if more > 0 else ""),
        todo="restore the others with only=, or another checkpoint; `ckstore repair` brings back what is found again",
        tensors=tensors,
    )


def refuse_lost(manifest: Manifest, storages: Iterable[int]) -> None:
    """Raise if any of these storages has lost bytes.

    Raises:
        MissingChunkError: It has; the message names all tensors that have.
    """
    chunks = lost_chunks(manifest)
    if chunks and any(piece.chunk in chunks for index in storages for piece in manifest.storages[index].pieces):
        raise lost_error(manifest)
