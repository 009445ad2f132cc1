"""Collect journals: which segments no point of a kept keyframe needs, and their move to the trash.

The rules are in ``store.journal_needs``; docs/FORMAT.md section 14 (Collect) has the steps.

Invariants:
- A segment is moved only if the plan names it and it is still not needed after all drops.
- Nothing is moved in a run of which a manifest cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckstore.errors import BackendError, CorruptError, UnsupportedError
from ckstore.format.paths import SegmentName
from ckstore.store.journal_needs import JournalState, needed_segments, put_back_segments
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
        of_run = repository.for_run(run)
        still = {move.name for move in plan_segments(of_run, planned[0].keyframe_count, (), min_age_seconds)}
        names = [move.name for move in planned if move.name in still]
        if names:
            gone = set(of_run.trash.move_segments(names))
            moved += [move for move in planned if move.name in gone]
            # A process may have continued one of them since it was read.
            put_back += put_back_segments(of_run, of_run.trash.contents())
    return moved, put_back
