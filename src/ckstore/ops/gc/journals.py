"""Collect journals: which segments no point of a kept keyframe needs, and their move to the trash.

The rules are in ``store.journal_needs``; docs/FORMAT.md section 14 (Collect) has the steps.

Invariants:
- A segment is moved only if the plan names it and it is still not needed after all drops.
- Nothing is moved in a run of which a manifest cannot be read.
- While segments of a keyframe in place are moved, an intent on it keeps writers from continuing them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ckstore.errors import BackendError, CkstoreError, CorruptError, UnsupportedError
from ckstore.format.paths import SegmentName
from ckstore.store.journal_needs import JournalState, keyframes_in, needed_segments, put_back_needed
from ckstore.store.journals import Journals
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class SegmentMove:
    """A segment of a journal that no point needs after the planned deletions.

    Attributes:
        name: The segment.
        nbytes: Its size.
        keyframe_count: The rule ``keep_journal`` of the collection, or None.
    """

    name: SegmentName
    nbytes: int
    keyframe_count: int | None = None


def plan_segments(
    repository: Repository, keyframe_count: int | None, dropped: Collection[int], min_age_seconds: float
) -> list[SegmentMove]:
    """Return the segments of the run that go to the trash, the highest order first.

    Without a journal it costs one listing of a folder that is not there.

    Args:
        repository: The store and its run.
        keyframe_count: Keep the points of this many keyframes; None: of all.
        dropped: Seqs of checkpoints that will be dropped.
        min_age_seconds: Segments that were changed within this time stay.
    """
    names = Journals(repository.manifests, clock=repository.clock).names()
    if not names:
        return []
    try:
        state = JournalState.read(repository, min_age_seconds=min_age_seconds).without(dropped)
        needed = needed_segments(state, keyframe_count)
    except (CorruptError, UnsupportedError, BackendError) as error:
        _log.warning("the journal of run %r was not collected: %s", repository.run, error)
        return []
    moves = []
    for name in sorted(state.journal.segments.keys() - needed, reverse=True):
        info = repository.backend.stat(name.path)
        if info is not None:
            moves.append(SegmentMove(name, info.nbytes, keyframe_count))
    return moves


def trash_segments(
    repository: Repository, moves: Iterable[SegmentMove], min_age_seconds: float
) -> tuple[list[SegmentMove], int]:
    """Move planned segments to the trash; return those that were moved, and how many of them were put back.

    Args:
        repository: The store.
        moves: The plan.
        min_age_seconds: As in the plan.
    """
    moved: list[SegmentMove] = []
    put_back = 0
    by_run: dict[str, list[SegmentMove]] = {}
    for move in moves:
        by_run.setdefault(move.name.run, []).append(move)
    for run, planned in sorted(by_run.items()):
        gone = _trash_of_run(repository.for_run(run), planned, min_age_seconds)
        moved += [move for move in planned if move.name in gone]
        # A keyframe may have come back since they were read.
        put_back += put_back_needed(repository.for_run(run), gone, planned[0].keyframe_count) if gone else 0
    return moved, put_back


def _trash_of_run(repository: Repository, planned: Sequence[SegmentMove], min_age_seconds: float) -> set[SegmentName]:
    """Move the planned segments of a run that are still not needed; return those that were moved."""
    count, names = planned[0].keyframe_count, [move.name for move in planned]
    # Those of checkpoints that were just dropped have none.
    seqs = keyframes_in(JournalState.read(repository), names) if count is not None else []
    intents = repository.tags.declare_all(seqs, "collect the points of") if seqs else []
    try:
        # Read after the intents are durable: this sees a segment that continues one of them; a later one is refused.
        still = {move.name for move in plan_segments(repository, count, (), min_age_seconds)}
        going = [name for name in names if name in still]
        return set(repository.trash.move_segments(going)) if going else set()
    finally:
        with contextlib.suppress(CkstoreError):
            for intent in intents:
                repository.tags.retract(intent)
