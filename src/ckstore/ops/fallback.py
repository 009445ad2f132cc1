"""After damage that a restore met: which other checkpoint reads whole, and what the error says about it.

Invariants:
- A checkpoint is called whole only after every frame that it needs was read and decoded.
- Nothing is changed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator

from ckstore.codec.frame_decoder import FrameDecoder, decoder_nbytes
from ckstore.config import Policy
from ckstore.errors import BackendError, CkstoreError, CorruptError
from ckstore.format.manifest import Manifest
from ckstore.format.paths import ManifestName
from ckstore.ops.verify import verify
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.refs import load_whole
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


def is_damage(error: CkstoreError) -> bool:
    """Whether stored bytes are not what was written, or a disk cannot read them: another checkpoint may be readable."""
    is_unreadable = isinstance(error, BackendError) and error.facts.get("errno") == errno.EIO
    return is_unreadable or isinstance(error, CorruptError)


def candidates(repository: Repository, damaged: int | None, error: CkstoreError) -> Iterator[Manifest]:
    """Yield the checkpoints that ``restore()`` may go back to, the newest first: whole as far as manifests tell.

    Args:
        repository: The store and its run.
        damaged: The seq of the checkpoint that was damaged; None: that is not known.
        error: What was met there. A checkpoint that needs the same frame is left out.
    """
    place = (error.facts.get("pack_id"), error.facts.get("offset"))
    for name in reversed(repository.manifests.listing().names):
        if name.seq == damaged:
            continue
        try:
            manifest = load_whole(repository, name)
        except CkstoreError as problem:
            _log.warning("seq %d (step %d) was passed over: %s", name.seq, name.step, problem)
            continue
        is_lost = any(pack.tier == LOST_TIER for pack in manifest.packs)
        if not (manifest.header.is_archival or is_lost or _needs(manifest, place)):
            yield manifest


def _needs(manifest: Manifest, place: tuple[object, object]) -> bool:
    pack_id, offset = place
    packs = [index for index, pack in enumerate(manifest.packs) if pack.pack_id.hex() == pack_id]
    return any(frame.pack in packs and frame.offset == offset for frame in manifest.frames)


def newest_readable(
    repository: Repository, policy: Policy, damaged: int | None, error: CkstoreError
) -> ManifestName | None:
    """Return the newest other checkpoint of which everything can be read; None where there is none."""
    chunk_nbytes_max = repository.limits.chunk_nbytes_max
    for manifest in candidates(repository, damaged, error):
        name = manifest.header.name
        try:
            report = verify(
                repository,
                "decode",
                [(repository.run, name)],
                make_check=lambda: FrameDecoder(chunk_nbytes_max).check_frame,
                check_nbytes=decoder_nbytes(chunk_nbytes_max),
                policy=policy,
                is_remote=True,
            )
        except CkstoreError as problem:
            _log.warning("seq %d (step %d) cannot be read either: %s", name.seq, name.step, problem)
            continue
        if report.is_clean and report.checkpoint_count:
            return name
    return None


def with_way_out(repository: Repository, policy: Policy, damaged: int | None, error: CkstoreError) -> CkstoreError:
    """Return the error of a damaged checkpoint with what can be done: repair, or the newest that reads whole."""
    what = "a checkpoint" if damaged is None else f"seq {damaged}"
    _log.warning("%s is damaged (%s); looking for the newest other checkpoint that reads whole", what, error.what)
    repair = f"run `ckstore repair {repository.backend.root}`, which says what can be made whole again"
    try:
        found = newest_readable(repository, policy, damaged, error)
    except CkstoreError as problem:
        return _with_todo(error, f"{repair}; looking for another checkpoint that reads whole failed: {problem.what}")
    if found is None:
        return _with_todo(error, f"{repair}; no other checkpoint of run {repository.run} reads whole")
    way = f'the newest other checkpoint that reads whole is step {found.step}: restore("seq:{found.seq}")'
    is_older = damaged is None or found.seq < damaged
    by_itself = ", or restore(fallback=True), which goes there by itself" if is_older else ""
    return _with_todo(error, f"{repair}; {way}{by_itself}", whole_step=found.step, whole_seq=found.seq)


def _with_todo(error: CkstoreError, todo: str, **facts: object) -> CkstoreError:
    return type(error)(error.what, where=error.where, todo=todo, **{**error.facts, **facts})
