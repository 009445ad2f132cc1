"""Which segments of journals a collection in a tier removes (docs/FORMAT.md, section 14: Journals in other stores)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator

from ckstore.config import is_name
from ckstore.errors import CorruptError, UnsupportedError
from ckstore.format import paths
from ckstore.format.paths import ManifestName, SegmentName
from ckstore.io.backend import Backend
from ckstore.store.journal_chain import entry_of
from ckstore.store.journals import Journals, structures_of
from ckstore.store.manifests import Manifests
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


def superfluous_segments(
    repository: Repository, target: Backend, kept: Collection[ManifestName], min_age_seconds: float
) -> dict[SegmentName, int]:
    """Return the segments in a tier that no point needs, and their sizes; of each run the highest order first.

    Args:
        repository: The store that owns the tier.
        target: The tier.
        kept: The manifests that stay in the tier.
        min_age_seconds: Younger segments stay: a push may have just copied them.

    Raises:
        BackendError: The tier does not respond.
    """
    found: dict[SegmentName, int] = {}
    for run in sorted(filter(is_name, target.list_names(paths.JOURNALS_FOLDER))):
        try:
            names = list(_superfluous_of_run(repository, target, run, kept))
        except (CorruptError, UnsupportedError) as error:
            _log.warning("the journal of run %r in the tier was not collected: %s", run, error)
            continue
        for name in reversed(names):
            info = target.stat(name.path)
            # A time far in the future counts as old, because no push is writing that segment now.
            if info is not None and abs(repository.clock.now_ns() - info.modified_ns) >= min_age_seconds * 1e9:
                found[name] = info.nbytes
    return found


def _superfluous_of_run(
    repository: Repository, target: Backend, run: str, kept: Collection[ManifestName]
) -> Iterator[SegmentName]:
    manifests = Manifests(target, run, store_id=repository.store_id, limits=repository.limits)
    journals = Journals(manifests, clock=repository.clock)
    # Listed before those here: a segment that is pushed now is here.
    there = journals.names()
    if not set(there) - _here(repository, run):
        return
    highest = {name.seq: name for name in sorted(kept) if name.run == run}
    journal = journals.read()
    journal.read_all(target)
    entries = [entry_of(manifests.header(name)) for name in highest.values()]
    structure_of = functools.cache(structures_of(manifests, is_strict=True))
    keyframes = journal.nearest_keyframes(entries, structure_of)
    needed = {name for name, each in keyframes.items() if each.entries}
    # Listed again: what was in the trash may have come back.
    yield from sorted(set(there) - needed - set(journal.problems) - _here(repository, run))


def _here(repository: Repository, run: str) -> set[SegmentName]:
    """Return the segments of a run here: in place, and in the trash, which is listed in between."""
    journals = Journals(repository.manifests_of(run), clock=repository.clock)
    in_place = journals.names()
    trashed = [each.name for folder in repository.trash.contents() for each in folder.segments if each.name.run == run]
    return {*in_place, *trashed, *journals.names()}


def remove_segments(target: Backend, names: Collection[SegmentName]) -> int:
    """Remove these segments, in this order: what is left of a chain begins at its keyframe. Return how many.

    Raises:
        BackendError: One cannot be removed.
    """
    removed = 0
    for name in names:
        try:
            target.unlink(name.path)
            removed += 1
        except FileNotFoundError:
            continue
    return removed
