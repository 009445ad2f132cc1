"""Drop checkpoints, many at a time: intents, tags read again, drop marks, and only then the move to the trash.

The steps are those of Drop in docs/FORMAT.md section 10, each taken by a batch before the next one begins.

Invariants:
- No tagged checkpoint is dropped: whoever tags writes first and looks at intents second, here it is the other way.
- Of a step, an older entry is durably marked before a newer one: the step never comes to mean something older.
- What a drop makes the newest is not being demoted meanwhile: whoever demotes looks after its intent, too.
- A drop mark is never taken back. What a crash leaves in place although it is marked, the next collection moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckstore.errors import CapacityError, CkstoreError, CorruptError, is_disk_full
from ckstore.format.layout import ManifestName
from ckstore.store.at_once import do_each
from ckstore.store.parts import Parts
from ckstore.store.references import header_or_none

BATCH_MAX = 256
"""Checkpoints that are dropped at a time: fewer would sync more often, more would refuse tags for longer."""


@dataclass(slots=True)
class Dropped:
    """What became of the checkpoints that were to go.

    Attributes:
        names: Those that are gone.
        spared: Those that stay, and why: they were tagged meanwhile, say.
    """

    names: list[ManifestName] = field(default_factory=list)
    spared: dict[ManifestName, str] = field(default_factory=dict)


def drop(
    parts: Parts, names: Sequence[ManifestName], purpose: str, tell: Callable[[int], None] = lambda count: None
) -> Dropped:
    """Drop checkpoints of the run of ``parts``, the oldest first.

    Args:
        parts: The store and its run.
        names: What is to go.
        purpose: Why, for people who find an intent.
        tell: Called with how many were dropped, now and then.

    Raises:
        CorruptError: A tag is damaged and may point to any of them; those that were dropped before stay dropped. Or
            ``store.json`` is gone.
        UnreachableError: The store itself is gone.
    """
    done, steps_kept = Dropped(), dict[int, str]()
    if names:
        # A purge of empty folders may have taken the ones that intents and drafts lie in.
        parts.make_folders()
    for batch in _batches(sorted(names)):
        try:
            _drop_batch(parts, batch, purpose, done, steps_kept)
        except CapacityError as error:
            if not is_disk_full(error) or len(batch) == 1:
                raise
            if not _drop_one_by_one(parts, batch, purpose, done, steps_kept):
                break
        tell(len(done.names))
    return done


def _drop_one_by_one(
    parts: Parts, batch: Sequence[ManifestName], purpose: str, done: Dropped, steps_kept: dict[int, str]
) -> bool:
    """Drop what a full disk has room for, and spare the rest until that was freed; return whether all could go.

    Raises:
        CapacityError: Not one of them can.
    """
    for name in batch:
        try:
            _drop_batch(parts, [name], purpose, done, steps_kept)
        except CapacityError as error:
            if not is_disk_full(error) or not done.names:
                raise
            done.spared[name] = "the disk is full; collect again when what goes now was freed"
            return False
    return True


def _batches(names: Sequence[ManifestName]) -> Iterator[list[ManifestName]]:
    """Yield names in batches in which no step occurs twice: marks of one batch may reach the disk in any order."""
    batch: list[ManifestName] = []
    steps: set[int] = set()
    for name in names:
        if len(batch) == BATCH_MAX or name.step in steps:
            yield batch
            batch, steps = [], set()
        batch.append(name)
        steps.add(name.step)
    if batch:
        yield batch


def newest_in_demotion(parts: Parts, names: Sequence[ManifestName]) -> int | None:
    """Return the seq that would be the newest of the run without these, if someone demotes it now; else None.

    To be asked after intents on all of them are durable: who demotes declares first and looks for those second.
    """
    going = {name.seq for name in names}
    for name in reversed(parts.manifests.listing().names):
        if name.seq in going:
            continue
        is_there = True
        with contextlib.suppress(CorruptError):
            header = header_or_none(parts.manifests, name)
            is_there = header is not None and not header.is_archival
        if is_there:
            return name.seq if name.seq < max(going) and parts.tags.intents_on(name.seq) else None
    return None


def _drop_batch(
    parts: Parts, batch: Sequence[ManifestName], purpose: str, done: Dropped, steps_kept: dict[int, str]
) -> None:
    intents = parts.tags.declare_all([name.seq for name in batch], purpose)
    try:
        # Read after the intents are durable: a tag set meanwhile is seen here, a later one is refused.
        tags = {record.seq: tag for tag, record in parts.tags.all(is_strict=True).items()}
        doomed = []
        left = newest_in_demotion(parts, batch)
        for name in batch:
            if left is not None and name.seq > left:
                steps_kept[name.step] = f"seq {left}, which would be the newest, is being demoted"
            if name.seq in tags:
                steps_kept[name.step] = f"it was tagged {tags[name.seq]!r} meanwhile"
            if name.step in steps_kept:
                done.spared[name] = steps_kept[name.step]
            else:
                doomed.append(name)
        if doomed:
            paths = {name.seq: intent for name, intent in zip(batch, intents, strict=True)}
            parts.manifests.mark_dropped({name.seq: paths[name.seq] for name in doomed})
            parts.manifests.move_to_trash(frozenset(name.seq for name in doomed))
            done.names += doomed
    finally:
        # One that stays is removed by the next collection once this process has ended.
        with contextlib.suppress(CkstoreError):
            do_each(parts.backend, parts.tags.retract, intents)
