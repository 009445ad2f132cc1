"""The points of a run's journal as users see them: which there are, by keyframe, and the facts about one.

Nothing is replayed here, and no gradient is read. A rewind to a point is a segment that continues it. Without a
journal, each function costs one listing of a folder that is not there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import NamedTuple

from ckstore.config import is_name
from ckstore.errors import CorruptError, NotFoundError, UsageError, counted
from ckstore.format import paths
from ckstore.format.header import ManifestHeader
from ckstore.format.journal import read_body
from ckstore.format.points import decode_point, metrics_of
from ckstore.format.records import RecordPlace
from ckstore.io.backend import Distant
from ckstore.results import Info
from ckstore.store.journal_chain import ChainRecord, Keyframe, Nearest
from ckstore.store.journal_needs import JournalState, require_keyframe
from ckstore.store.journals import WRITER_SECONDS, Journals
from ckstore.store.refs import Reference, header_or_none, order_of, resolve
from ckstore.store.repository import Repository
from ckstore.store.tags import place_of_tagged

_log = logging.getLogger("ckstore")


class Point(NamedTuple):
    """A point that ``restore(step)`` finds.

    Args:
        step: The trainer's step.
        time_ns: When it was made, in nanoseconds since 1970.
        nbytes: Bytes of its record.
        tags: Its tags, sorted.
    """

    step: int
    time_ns: int
    nbytes: int
    tags: tuple[str, ...] = ()


def has_journal(repository: Repository) -> bool:
    """Return whether the run has a journal."""
    return bool(Journals(repository.manifests, clock=repository.clock).names())


def points_by_keyframe(repository: Repository) -> dict[int, tuple[Point, ...]]:
    """Return the points of the run, by the seq of their nearest keyframe, each in the order of steps.

    Of each step it is the newest point, unless a checkpoint of this step is newer. Tagged points are never left out.
    """
    if not has_journal(repository):
        return {}
    state = JournalState.read(repository, is_strict=False)
    tags = _tags_by_place(state)
    found: dict[int, list[Point]] = {}
    for record, keyframe, is_of_step in _newest_first(state):
        head, names = record.head, tags.get(record.place, ())
        if (is_of_step or names) and record.place != keyframe.record.place:
            found.setdefault(keyframe.entry.seq, []).append(Point(head.step, head.time_ns, head.nbytes, names))
    return {seq: tuple(sorted(points)) for seq, points in found.items()}


def info_of_point(repository: Repository, ref: Reference, info_of: Callable[[ManifestHeader], Info]) -> Info | None:
    """Return the facts about the point that a reference means; None if it means a checkpoint, or nothing.

    Args:
        repository: The store and its run.
        ref: A step without a checkpoint, ``latest``, ``best:metric`` or a tag. Other references mean checkpoints.
        info_of: Returns the facts about a checkpoint.
    """
    found = find_point(repository, ref)
    if found is None:
        return None
    header = header_or_none(repository.manifests, resolve(repository, f"seq:{found.keyframe.entry.seq}"))
    return None if header is None else _described(repository, found, info_of(header))


_INSTEAD = "restore the point or rewind to it, or use its keyframe, which `ckstore show` names"


def require_checkpoint(
    repository: Repository, ref: Reference, todo: str = _INSTEAD, *, takes_latest: bool = False
) -> None:
    """Check that a reference does not mean a point.

    Args:
        repository: The store and its run.
        ref: The reference.
        todo: What to do instead with a point.
        takes_latest: ``latest`` means the newest checkpoint. Log a warning if a point is newer.

    Raises:
        UsageError: It means a point.
    """
    found = find_point(repository, ref)
    if found is None:
        return
    step = found.record.head.step
    if ref == "latest" and takes_latest:
        _log.warning("this is about the newest checkpoint; the newest state is step %d, a point of the journal", step)
    else:
        raise UsageError(
            f"step {step} is a point of the journal, and this needs a checkpoint",
            where=repository.backend.root,
            todo=todo,
        )


def rewind_to_point(repository: Repository, ref: Reference, info_of: Callable[[ManifestHeader], Info]) -> Info | None:
    """Make a point the newest state of the run; return the facts about it. None: the reference means a checkpoint.

    Raises:
        ConflictError: Another process writes to the run, or the point is being deleted.
        CapacityError: The disk is full.
    """
    if find_point(repository, ref) is None:
        return None
    repository.prepare_run()
    repository.lease.take()
    # The saver of a dead trainer may still append.
    journals = Journals(repository.manifests, clock=repository.clock)
    journals.wait_for_writer(seconds=WRITER_SECONDS)
    # Looked up again, because from now on no other process writes.
    found = find_point(repository, ref)
    if found is None:
        return None
    repository.lease.check()
    writer = journals.open_writer(previous=found.record.place)
    try:
        require_keyframe(repository, writer)
    finally:
        writer.close()
    return info_of_point(repository, "latest", info_of)


class FoundPoint(NamedTuple):
    """A point that a reference means.

    Args:
        record: Its record.
        keyframe: Its nearest keyframe.
        lasting_seq: The keyframe that a tag on the point keeps.
        tags: Its tags, sorted.
        state: The journal and the checkpoints in which it was found.
    """

    record: ChainRecord
    keyframe: Keyframe
    lasting_seq: int
    tags: tuple[str, ...]
    state: JournalState


def find_point(repository: Repository, ref: Reference, *, or_its_checkpoint: bool = False) -> FoundPoint | None:
    """Return the point that a reference means; None if it means a checkpoint, or nothing.

    Args:
        repository: The store and its run.
        ref: The reference.
        or_its_checkpoint: Return a point even if a checkpoint may be the same state.

    Raises:
        CorruptError: It is a tag on a point that is not in the journal.
        NotFoundError: It is a tag on a point without a keyframe.
    """
    if not may_mean_point(repository, ref):
        return None
    tagged = _tagged_place(repository, ref)
    # In a bucket, many heads are read concurrently.
    is_lazy = ref == "latest" or not isinstance(repository.backend, Distant)
    state = JournalState.read(repository, is_strict=False, is_lazy=is_lazy)
    record: ChainRecord | None
    if tagged:
        record = _of_tag(repository, state, str(ref), tagged)
    elif _is_step(ref):
        record = _of_step(state, int(ref))
    elif ref == "latest":
        newest = state.newest()
        record = newest if isinstance(newest, ChainRecord) else None
    else:
        record = _best(repository, state, str(ref))
    if record is None:
        return None
    keyframe = next(state.keyframes(record))
    if not (keyframe.replayed or tagged or or_its_checkpoint):
        return None
    lasting = state.lasting_keyframe(record) or keyframe
    return FoundPoint(record, keyframe, lasting.entry.seq, _tags_by_place(state).get(record.place, ()), state)


def may_mean_point(repository: Repository, ref: Reference) -> bool:
    """Return whether a reference may mean a point. Cheap: it lists a folder that is usually not there."""
    is_best = isinstance(ref, str) and ref.startswith("best:")
    if ref == "latest" or is_best or _is_step(ref):
        return has_journal(repository)
    return _tagged_place(repository, ref) is not None


def _is_step(ref: Reference) -> bool:
    return (isinstance(ref, int) and not isinstance(ref, bool)) or (isinstance(ref, str) and ref.isdecimal())


def _tagged_place(repository: Repository, ref: Reference) -> RecordPlace | None:
    if not isinstance(ref, str) or not is_name(ref) or ref == "latest" or ref.isdecimal():
        return None
    with suppress(NotFoundError):
        point = repository.tags.get(ref).point
        return None if point is None else place_of_tagged(point)
    return None


def _of_tag(repository: Repository, state: JournalState, name: str, place: RecordPlace) -> ChainRecord:
    record = state.journal.find(place)
    where = repository.backend.location_of(paths.journal_folder(repository.run))
    if record is None:
        raise CorruptError(
            f"the point of tag {name!r}, record {place.number} of the journal, is not there or is damaged",
            where=where,
            todo="run `ckstore verify`; `ckstore repair` takes it from a mirror or a tier",
        )
    if next(state.keyframes(record), None) is None:
        raise NotFoundError(
            f"the point of tag {name!r}, step {record.head.step}, has no keyframe that can be read",
            where=where,
            todo="run `ckstore verify`; `ckstore repair` takes it from a mirror or a tier",
        )
    return record


def _tags_by_place(state: JournalState) -> dict[RecordPlace, tuple[str, ...]]:
    found: dict[RecordPlace, tuple[str, ...]] = {}
    for name, record in state.tags.items():
        assert record.point is not None, "it is on a point"
        place = place_of_tagged(record.point)
        found[place] = (*found.get(place, ()), name)
    return found


def _best(repository: Repository, state: JournalState, ref: str) -> ChainRecord | None:
    """Return the point with the best value of a metric; None: a checkpoint is as good, or ``resolve`` says why none is.

    Of equal ones it is the newest. Of each step the newest point counts, as a restore takes it.
    """
    _, _, rest = ref.partition(":")
    metric, _, order = rest.partition(":")
    order = order or order_of(metric) or ""
    best: tuple[float, int] | None = None
    if order in {"min", "max"}:
        with suppress(NotFoundError):
            header = header_or_none(repository.manifests, resolve(repository, ref))
            best = None if header is None else (_rank(header.metrics[metric], order), header.time_ns)
    found = None
    for record, _, is_of_step in _newest_first(state) if order in {"min", "max"} else ():
        if not is_of_step:
            continue
        value = _metrics_of(repository, record).get(metric, math.nan)
        rank = _rank(value, order), record.head.time_ns
        if not math.isnan(value) and (best is None or rank > best):
            best, found = rank, record
    return found


def _rank(value: float, order: str) -> float:
    return value if order == "max" else -value


def _metrics_of(repository: Repository, record: ChainRecord) -> Mapping[str, float]:
    where = repository.backend.location_of(record.segment.path)
    try:
        with closing(repository.backend.open_read(record.segment.path)) as file:
            return metrics_of(read_body(file.read_at, record.placed, where=where), where=where)
    except CorruptError as error:
        _log.warning("skipping the point of step %d: %s", record.head.step, error)
        return {}


def _of_step(state: JournalState, step: int) -> ChainRecord | None:
    is_hidden = _hidden_by_checkpoints(state)
    for name in reversed(state.journal.segments):
        for record in reversed(state.journal.records(name).records):
            if record.head.step == step and next(state.keyframes(record), None) is not None:
                return None if is_hidden(record) else record
    return None


def _hidden_by_checkpoints(state: JournalState) -> Callable[[ChainRecord], bool]:
    """Return whether a checkpoint of the step of a record is newer (docs/FORMAT.md, section 14), as a function."""
    checkpoints = {entry.step: entry for entry in state.entries if not entry.is_archival}

    def is_hidden(record: ChainRecord) -> bool:
        checkpoint = checkpoints.get(record.head.step)
        return checkpoint is not None and state.journal.is_own(checkpoint, record)

    return is_hidden


def _newest_first(state: JournalState) -> Iterator[tuple[ChainRecord, Nearest, bool]]:
    """Yield the records that have a keyframe, each with the nearest one, and whether its step means it.

    A step means its newest record, unless a checkpoint of the step is newer.
    """
    nearest, is_hidden = state.nearest_keyframes(), _hidden_by_checkpoints(state)
    seen: set[int] = set()
    for name in reversed(state.journal.segments):
        records = state.journal.records(name).records
        for record, keyframe in reversed(list(zip(records, nearest[name].of_records, strict=True))):
            if keyframe is not None:
                yield record, keyframe, record.head.step not in seen and not is_hidden(record)
                seen.add(record.head.step)


def _described(repository: Repository, found: FoundPoint, info: Info) -> Info:
    record = found.record
    path = record.segment.path
    where = repository.backend.location_of(path)
    with closing(repository.backend.open_read(path)) as file:
        body = read_body(file.read_at, record.placed, where=where)
    point = decode_point(body, limits=repository.limits, where=where)
    return replace(
        info_of_restored(info, record.head.step),
        time_ns=record.head.time_ns,
        metrics=dict(point.metrics),
        tags=found.tags,
        bytes_stored=info.bytes_stored + sum(each.head.nbytes for each in found.keyframe.replayed),
        bytes_written=record.head.nbytes,
    )


def info_of_restored(info: Info, step: int) -> Info:
    """Return the facts about a point, from those about its keyframe and its step."""
    if step == info.step:
        return info
    form = f"journal, {counted(step - info.step, 'step')} after {info.step}"
    return replace(info, step=step, tags=(), form=form)
