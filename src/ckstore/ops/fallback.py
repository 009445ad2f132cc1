"""After a restore met damage: restore an older checkpoint, or say which one is readable.

Invariants:
- A checkpoint is called readable only after every frame that it needs was read and decoded.
- Nothing in the store is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ckstore.config import Policy
from ckstore.errors import BackendError, CkstoreError, CorruptError, UsageError, is_damage
from ckstore.format.manifest import Manifest
from ckstore.format.paths import ManifestName
from ckstore.format.tree import is_in_replay_form
from ckstore.ops.verify import verify
from ckstore.restore.restore import Restored, RestoreRequest, restore_manifest
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.refs import load_whole
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


def restore_older(
    repository: Repository, policy: Policy, damaged: int | None, error: CkstoreError, request: RestoreRequest
) -> Restored:
    """Restore the newest other checkpoint that can be read.

    Args:
        repository: The store and its run.
        policy: Threads, memory and checks.
        damaged: The seq of the checkpoint that is damaged; None if unknown.
        error: What reading it raised.
        request: What to restore, and into what.

    Raises:
        CkstoreError: No checkpoint of the run can be read: ``error``, with what to do.
        UsageError: The older checkpoint does not fit ``into``, which the damaged one has partly overwritten.
    """
    skipped = [f"seq {damaged} was skipped: {error}"]
    for manifest in fallback_candidates(repository, damaged, error):
        header = manifest.header
        _log.warning("%s", skipped[-1])
        try:
            return restore_manifest(repository, policy, manifest, skipped, request)
        except (CorruptError, BackendError) as problem:
            if not is_damage(problem):
                raise
            skipped.append(f"seq {header.seq} (step {header.step}) was skipped: {problem}")
        except UsageError as problem:
            raise UsageError(
                f"seq {header.seq} does not fit into what was given, of which parts were already "
                f"overwritten by a newer checkpoint that turned out to be damaged: {problem.what}",
                where=problem.where,
                todo=problem.todo,
            ) from problem
    raise type(error)(
        f"{error.what}; no checkpoint of run {repository.run!r} is readable",
        where=error.where,
        todo=f"run `ckstore repair {repository.backend.root}` to see what can be repaired",
        **error.facts,
    ) from error


def fallback_candidates(repository: Repository, damaged: int | None, error: CkstoreError) -> Iterator[Manifest]:
    """Yield the checkpoints that ``restore(fallback=True)`` may use, newest first. Only their manifests were checked.

    Args:
        repository: The store and its run.
        damaged: The seq of the damaged checkpoint; None: unknown.
        error: The damage. Checkpoints that need the same frame are left out.
    """
    place = (error.facts.get("pack_id"), error.facts.get("offset"))
    for name in reversed(repository.manifests.listing().names):
        if name.seq == damaged:
            continue
        try:
            manifest = load_whole(repository, name)
        except CkstoreError as problem:
            _log.warning("seq %d (step %d) was skipped: %s", name.seq, name.step, problem)
            continue
        is_lost = any(pack.tier == LOST_TIER for pack in manifest.packs) or is_in_replay_form(manifest.tree)
        if not (manifest.header.is_archival or is_lost or _needs(manifest, place)):
            yield manifest


def _needs(manifest: Manifest, place: tuple[object, object]) -> bool:
    pack_id, offset = place
    packs = [index for index, pack in enumerate(manifest.packs) if pack.pack_id.hex() == pack_id]
    return any(frame.pack in packs and frame.offset == offset for frame in manifest.frames)


def newest_readable(
    repository: Repository, policy: Policy, damaged: int | None, error: CkstoreError
) -> ManifestName | None:
    """Return the newest other checkpoint that can be decoded completely; None if there is none."""
    for manifest in fallback_candidates(repository, damaged, error):
        name = manifest.header.name
        try:
            report = verify(repository, "decode", [(repository.run, name)], policy=policy, is_remote=True)
        except CkstoreError as problem:
            _log.warning("seq %d (step %d) cannot be read either: %s", name.seq, name.step, problem)
            continue
        if report.is_clean and report.checkpoint_count:
            return name
    return None


def with_recovery_advice(
    repository: Repository, policy: Policy, damaged: int | None, error: CkstoreError
) -> CkstoreError:
    """Add advice to the error of a damaged checkpoint: repair, or the newest other one that is readable."""
    what = "a checkpoint" if damaged is None else f"seq {damaged}"
    _log.warning("%s is damaged (%s); looking for the newest other checkpoint that is readable", what, error.what)
    repair = f"run `ckstore repair {repository.backend.root}` to see what can be repaired"
    try:
        found = newest_readable(repository, policy, damaged, error)
    except CkstoreError as problem:
        return _with_todo(error, f"{repair}; looking for another readable checkpoint failed: {problem.what}")
    if found is None:
        return _with_todo(error, f"{repair}; no other checkpoint of run {repository.run} is readable")
    way = f'the newest other readable checkpoint is step {found.step}: restore("seq:{found.seq}")'
    is_older = damaged is None or found.seq < damaged
    by_itself = ", or restore(fallback=True), which does this automatically" if is_older else ""
    return _with_todo(error, f"{repair}; {way}{by_itself}", whole_step=found.step, whole_seq=found.seq)


def _with_todo(error: CkstoreError, todo: str, **facts: object) -> CkstoreError:
    return type(error)(error.what, where=error.where, todo=todo, **{**error.facts, **facts})
