"""Change which checkpoints a run has, without copying tensors: tag, rewind, delete, drop, undelete.

A drop runs in batches, each step for the whole batch: write intents, read the tags again, set drop marks, move to the
trash (docs/FORMAT.md section 10, Drop).

Undelete brings back what the trash still has. A dropped checkpoint is published as a new entry, because drop marks are
permanent. The entry is archival, so ``latest`` skips it and nothing old is resumed by surprise. A demoted checkpoint
gets its exact form back as its next generation.

Invariants:
- No tagged checkpoint is dropped. Setting a tag writes first and checks intents second; a drop writes intents first and
  reads tags second.
- Of one step, an older entry is durably marked before a newer one. So a step never changes its meaning to something
  older.
- The checkpoint that becomes the newest through a drop is not being demoted: a demotion checks after its intent, too.
- A tag on a point keeps its keyframe in the same way, and the segments between: store/journal_needs.py.
- The keyframe of the newest point of a journal is not dropped. A writer that continues a point checks intents, too.
- The base of a checkpoint in replay form is not dropped before that checkpoint is.
- A drop mark is permanent. A marked checkpoint that a crash left in place is moved by the next collection.
- An undeleted checkpoint is published like a commit: claim, link, then check its packs, also in the trash.
- Undelete needs no lease. A claim makes a seq exclusive, a generation's name makes a replacement exclusive, and a
  running trainer takes the next seq.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckstore.errors import (
    CapacityError,
    CkstoreError,
    ConflictError,
    CorruptError,
    MissingChunkError,
    NotFoundError,
    UsageError,
    counted,
    is_disk_full,
)
from ckstore.format.header import ManifestHeader
from ckstore.format.location import PackTable, decode_pack_table
from ckstore.format.logical import EXACT_FIDELITY
from ckstore.format.manifest import Manifest, decode_manifest, republished
from ckstore.format.paths import ManifestName
from ckstore.format.tree import is_in_replay_form
from ckstore.io.backend import for_each_concurrent
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.journal_chain import ChainRecord
from ckstore.store.journal_needs import JournalState, needed_keyframes, put_back_points_of
from ckstore.store.journals import Journals
from ckstore.store.points import find_point, require_checkpoint
from ckstore.store.reachability import UNREADABLE
from ckstore.store.refs import Reference, header_or_none, load_whole, resolve
from ckstore.store.replay_bases import ReplayEntries, require_stored
from ckstore.store.repository import Repository, finish_replacement
from ckstore.store.trash import TrashedManifest

BATCH_MAX = 256
"""Checkpoints per batch. Fewer would sync more often; more would refuse tags for longer."""


@dataclass(slots=True)
class Dropped:
    """The result of a drop.

    Attributes:
        names: The dropped checkpoints.
        spared: The checkpoints that stay, and why; for example they were tagged meanwhile.
    """

    names: list[ManifestName] = field(default_factory=list)
    spared: dict[ManifestName, str] = field(default_factory=dict)


def drop(
    repository: Repository,
    names: Sequence[ManifestName],
    purpose: str,
    tell: Callable[[int], None] = lambda count: None,
) -> Dropped:
    """Drop checkpoints of the run of ``repository``, the oldest first.

    Args:
        repository: The store and its run.
        names: The checkpoints to drop.
        purpose: The reason, for people who find an intent.
        tell: Called now and then with the number of dropped checkpoints.

    Raises:
        CorruptError: A damaged tag may point to any of them (those already dropped stay dropped). Or ``store.json`` is
            missing.
        UnreachableError: The store itself is gone.
    """
    done, spared_steps = Dropped(), dict[int, str]()
    if names:
        # A purge of empty folders may have removed those of intents and drafts.
        repository.make_folders()
    for batch in _batches(sorted(names)):
        try:
            _drop_batch(repository, batch, purpose, done, spared_steps)
        except CapacityError as error:
            if not is_disk_full(error) or len(batch) == 1:
                raise
            if not _drop_one_by_one(repository, batch, purpose, done, spared_steps):
                break
        tell(len(done.names))
    return done


def _drop_one_by_one(
    repository: Repository, batch: Sequence[ManifestName], purpose: str, done: Dropped, spared_steps: dict[int, str]
) -> bool:
    """Drop as many as a full disk allows and spare the rest; return whether all were dropped.

    Raises:
        CapacityError: Not even one can be dropped.
    """
    for name in batch:
        try:
            _drop_batch(repository, [name], purpose, done, spared_steps)
        except CapacityError as error:
            if not is_disk_full(error) or not done.names:
                raise
            done.spared[name] = "the disk is full; run gc again after this one has freed space"
            return False
    return True


def _batches(names: Sequence[ManifestName]) -> Iterator[list[ManifestName]]:
    """Yield batches in which no step occurs twice: marks of one batch may reach the disk in any order."""
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


def newest_in_demotion(repository: Repository, names: Sequence[ManifestName]) -> int | None:
    """Return the seq that would become the newest of the run without these, if it is being demoted; else None.

    Call it after the intents on all of them are durable. A demotion writes its intent first and checks for those
    second.
    """
    dropped = {name.seq for name in names}
    for name in reversed(repository.manifests.listing().names):
        if name.seq in dropped:
            continue
        counts = True
        with contextlib.suppress(CorruptError):
            header = header_or_none(repository.manifests, name)
            counts = header is not None and not header.is_archival
        if counts:
            return name.seq if name.seq < max(dropped) and repository.tags.intents_on(name.seq) else None
    return None


def _drop_batch(
    repository: Repository, batch: Sequence[ManifestName], purpose: str, done: Dropped, spared_steps: dict[int, str]
) -> None:
    intents = repository.tags.declare_all([name.seq for name in batch], purpose)
    try:
        # Read after the intents are durable: this sees a tag that was set meanwhile; a later one is refused.
        tags = {record.seq: tag for tag, record in repository.tags.all(is_strict=True).items()}
        to_drop = []
        demoted = newest_in_demotion(repository, batch)
        needed = needed_keyframes(repository)
        for name in batch:
            if name.seq in needed:
                spared_steps[name.step] = needed[name.seq]
            if demoted is not None and name.seq > demoted:
                spared_steps[name.step] = f"seq {demoted}, which would become the newest, is being demoted"
            if name.seq in tags:
                spared_steps[name.step] = f"it was tagged {tags[name.seq]!r} meanwhile"
            if name.step in spared_steps:
                done.spared[name] = spared_steps[name.step]
            else:
                to_drop.append(name)
        replayed = ReplayEntries(repository)
        for name, reason in _bases_that_stay(replayed, to_drop).items():
            done.spared[name] = spared_steps[name.step] = reason
            to_drop.remove(name)
        if to_drop:
            paths = {name.seq: intent for name, intent in zip(batch, intents, strict=True)}
            _mark(repository, {name.seq: paths[name.seq] for name in to_drop}, replayed.seqs)
            repository.manifests.move_to_trash(frozenset(name.seq for name in to_drop))
            done.names += to_drop
    finally:
        # The next collection removes an intent that stays, once this process has ended.
        with contextlib.suppress(CkstoreError):
            for_each_concurrent(repository.backend, repository.tags.retract, intents)


def _bases_that_stay(replayed: ReplayEntries, to_drop: Collection[ManifestName]) -> dict[ManifestName, str]:
    """Return those that checkpoints in replay form need which are not dropped with them, and why."""
    stay: dict[ManifestName, str] = {}
    while True:
        needed = replayed.needed({name.seq for name in to_drop if name not in stay})
        found = {name: needed[name.seq] for name in to_drop if name.seq in needed and name not in stay}
        if not found:
            return stay
        stay |= found


def _mark(repository: Repository, intents: Mapping[int, str], replayed: Collection[int]) -> None:
    """Create drop marks, those of checkpoints in replay form before those of their bases."""
    for chosen in (intents.keys() & replayed, intents.keys() - replayed):
        if chosen:
            repository.manifests.mark_dropped({seq: intents[seq] for seq in sorted(chosen)})


def tag(repository: Repository, name: str, reference: Reference) -> None:
    """Point a tag at a checkpoint, or at a point of the journal.

    Raises:
        NotFoundError: There is no such checkpoint or point.
        ConflictError: It is being dropped.
    """
    found = find_point(repository, reference)
    if found is None:
        tag_seq(repository, name, resolve(repository, reference))
        return
    # Another process may have appended it, and may have been killed before its own sync.
    Journals(repository.manifests, clock=repository.clock).secure(found.record.place)
    target = resolve(repository, f"seq:{found.lasting_seq}")
    tag_seq(repository, name, target, point=found.record)


def tag_seq(repository: Repository, name: str, target: ManifestName, *, point: ChainRecord | None = None) -> None:
    """Point a tag at this entry, or at a point of which it is the keyframe.

    Raises:
        NotFoundError: The entry was deleted.
        ConflictError: It is being dropped.
    """
    header = header_or_none(repository.manifests, target)
    if header is None:
        raise NotFoundError(f"seq {target.seq} was deleted meanwhile", where=repository.backend.root)

    def is_dropped(seq: int) -> bool:
        if all(other.seq != seq for other in repository.manifests.listing().names):
            return True
        return point is not None and JournalState.read(repository, is_strict=False).keyframe_of(point, seq) is None

    repository.tags.put(
        name,
        seq=target.seq,
        step=target.step if point is None else point.head.step,
        checkpoint_id=header.checkpoint_id,
        is_dropped=is_dropped,
        place=None if point is None else point.place,
    )


def rewind(repository: Repository, reference: Reference) -> Manifest:
    """Publish an entry again as the newest of its run. Its chunks are shared; nothing is copied.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: Another process writes to the run, or packs vanished meanwhile.
        CorruptError: The entry is damaged or one of its packs is missing.
    """
    repository.prepare_run()
    repository.lease.take()
    entry = load_whole(repository, resolve(repository, reference))
    require_stored(entry, repository.backend.root, what="published again")
    repository.lease.check()
    seq = repository.manifests.claim(repository.seq_next())
    repository.note_seq(seq)
    manifest = republished(entry, seq=seq, time_ns=repository.clock.now_ns(), is_archival=False)
    name = repository.manifests.publish(manifest)
    gone = repository.rescue_packs(manifest.packs)
    if gone:
        repository.manifests.withdraw(name)
        raise ConflictError(
            f"{counted(len(gone), 'pack')} of seq {entry.header.seq} vanished while it was published again",
            where=repository.backend.root,
            todo="run `ckstore verify`",
        )
    repository.manifests.note_published(seq)
    return manifest


_DELETE_POINTS = "points go with their keyframe: delete that checkpoint, or run `ckstore gc --keep-journal N`"


@dataclass(frozen=True, slots=True)
class Deleted:
    """The entries that a delete removed, ascending. The next gc removes their packs."""

    seqs: tuple[int, ...]
    steps: tuple[int, ...]


def delete(repository: Repository, reference: Reference) -> Deleted:
    """Drop a checkpoint: every entry of a step, or one entry otherwise.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: A tag on it, or on a point that needs it, keeps it; untag it first. Or it is the keyframe of the
            newest point of the journal.
        UsageError: It is a point of a journal.
    """
    if reference != "latest":
        require_checkpoint(repository, reference, _DELETE_POINTS)
    target = resolve(repository, reference)
    is_step = isinstance(reference, int) or reference.isdigit()
    names = [
        name
        for name in repository.manifests.listing().names
        if name.seq == target.seq or (is_step and name.step == target.step)
    ]
    if not names:
        raise NotFoundError(f"seq {target.seq} was deleted meanwhile", where=repository.backend.root)
    intents: list[str] = []
    try:
        for name in names:
            intents.append(repository.tags.declare(name.seq, "delete"))  # noqa: PERF401 - each must be retracted
        # Read after the intents are durable: this sees a tag that was set meanwhile; a later one is refused.
        for name in names:
            tags = repository.tags.that_keep(name.seq, is_strict=True)
            if tags:
                raise ConflictError(
                    f"seq {name.seq} (step {name.step}) is kept by the tag {tags[0]!r}",
                    where=repository.backend.root,
                    todo="to delete it, run `ckstore untag` first",
                    tags=tags,
                )
        demoted = newest_in_demotion(repository, names)
        if demoted is not None:
            raise ConflictError(
                f"seq {demoted}, which would become the newest checkpoint, is being demoted or deleted",
                where=repository.backend.root,
                todo="try again when that has ended",
            )
        _require_unneeded(repository, names)
        # One after another: of one step, an older entry is marked before a newer one.
        for name, intent in zip(names, intents, strict=True):
            repository.manifests.mark_dropped({name.seq: intent})
        repository.manifests.move_to_trash(frozenset(name.seq for name in names))
    finally:
        for intent in intents:
            repository.tags.retract(intent)
    return Deleted(tuple(name.seq for name in names), tuple(sorted({name.step for name in names})))


def _require_unneeded(repository: Repository, names: Sequence[ManifestName]) -> None:
    """Refuse to delete what the journal, or a checkpoint in replay form, needs. Call it after the intents are durable.

    Raises:
        ConflictError: One of them is needed.
    """
    needed = needed_keyframes(repository)
    bases = ReplayEntries(repository).needed({name.seq for name in names})
    for name in names:
        if name.seq in needed:
            raise ConflictError(
                f"seq {name.seq} (step {name.step}) is a keyframe: {needed[name.seq]}",
                where=repository.backend.root,
                todo="commit a newer checkpoint with `commit`, or rewind to an older one, then delete it",
            )
        if name.seq in bases:
            raise ConflictError(
                f"seq {name.seq} (step {name.step}) is needed: {bases[name.seq]}",
                where=repository.backend.root,
                todo="delete that one first, or restore it with replay= and commit it",
            )


TrashKind = Literal["dropped", "demoted", "made exact", "pushed", "pulled", "rewritten", "replaced", "stray"]
"""Why a manifest is in the trash.

``dropped``: its checkpoint was dropped. ``stray``: it belongs in place, and the next collection puts it there.
Otherwise the checkpoint is in place in another form; ``replaced`` if that form is unreadable.
"""


def dropped_in_trash(repository: Repository) -> list[TrashedManifest]:
    """Return the dropped checkpoints of the run that are still in the trash, by seq: the highest generation of each."""
    dropped = repository.manifests.listing().dropped
    found: dict[int, TrashedManifest] = {}
    for folder in repository.trash.contents():
        for trashed in folder.manifests:
            name = trashed.name
            if name.run == repository.run and name.seq in dropped:
                other = found.get(name.seq)
                if other is None or other.name.generation < name.generation:
                    found[name.seq] = trashed
    return [found[seq] for seq in sorted(found)]


def exact_in_trash(repository: Repository) -> list[TrashedManifest]:
    """Return the exact forms, still in the trash, of demoted checkpoints in place, by seq."""
    in_place = {name.seq: name for name in repository.manifests.listing().names}
    found: dict[int, TrashedManifest] = {}
    for folder in repository.trash.contents():
        for trashed in folder.manifests:
            name, current = trashed.name, in_place.get(trashed.name.seq)
            if name.run == repository.run and current is not None and is_exact_form(repository, trashed, current):
                other = found.get(name.seq)
                if other is None or other.name.generation < name.generation:
                    found[name.seq] = trashed
    return [found[seq] for seq in sorted(found)]


def is_exact_form(repository: Repository, trashed: TrashedManifest, in_place: ManifestName) -> bool:
    """Whether a manifest in the trash is the exact form of a demoted checkpoint in place."""
    if trashed.name.generation >= in_place.generation:
        return False
    try:
        header = repository.manifests.header(in_place)
    except (FileNotFoundError, *UNREADABLE):
        return False
    if not _is_demoted(header):
        return False
    table = table_of(repository, trashed)
    if table is None or _is_demoted(table.header):
        return False
    return header.fidelity != EXACT_FIDELITY or header.origin_id == table.header.checkpoint_id


def find_in_trash(repository: Repository, reference: Reference) -> TrashedManifest:
    """Return the dropped or demoted checkpoint that a step, ``seq:N`` or ``id:PREFIX`` means; of a step, the newest.

    Raises:
        NotFoundError: The trash has no such checkpoint. The message lists what it has.
        UsageError: It is not such a reference.
    """
    candidates = sorted(
        [*dropped_in_trash(repository), *exact_in_trash(repository)], key=lambda trashed: trashed.name.seq
    )
    if isinstance(reference, bool) or not isinstance(reference, (int, str)):
        raise UsageError("a deleted checkpoint is given as a step, seq:N or id:PREFIX", where=repr(reference))
    kind, _, rest = str(reference).partition(":")
    if re.fullmatch(r"[0-9]{1,18}", str(reference)):
        found = [trashed for trashed in candidates if trashed.name.step == int(reference)]
    elif kind == "seq" and re.fullmatch(r"[0-9]{1,18}", rest):
        found = [trashed for trashed in candidates if trashed.name.seq == int(rest)]
    elif kind == "id" and re.fullmatch(r"[0-9a-f]{4,64}", rest):
        found = [trashed for trashed in candidates if _id_of(repository, trashed).startswith(rest)]
        if len(found) > 1:
            raise UsageError(f"{len(found)} checkpoint ids begin with {rest}", todo="give more digits")
    else:
        raise UsageError("a deleted checkpoint is given as a step, seq:N or id:PREFIX", where=repr(reference))
    if not found:
        available = ", ".join(f"{trashed.name.step} (seq:{trashed.name.seq})" for trashed in candidates[-5:])
        raise NotFoundError(
            f"the trash has neither a deleted checkpoint {reference} of run {repository.run!r} nor its exact form",
            where=repository.backend.root,
            todo=f"it has steps {available}" if available else "it has no checkpoint of this run",
        )
    return found[-1]


def bring_back(repository: Repository, trashed: TrashedManifest) -> Manifest:
    """Bring back what ``find_in_trash`` returned: as a new entry, or as the exact form of the checkpoint in place.

    Raises:
        NotFoundError: The trash was emptied, or the checkpoint in place was dropped, meanwhile.
        MissingChunkError: A pack that it needs is already deleted.
        CorruptError: Its manifest is damaged.
        ConflictError: Another process has replaced the checkpoint meanwhile.
    """
    in_place = next((name for name in repository.manifests.listing().names if name.seq == trashed.name.seq), None)
    return undelete(repository, trashed) if in_place is None else make_exact(repository, trashed, in_place)


def make_exact(repository: Repository, trashed: TrashedManifest, in_place: ManifestName) -> Manifest:
    """Replace a demoted checkpoint by its exact form, as the next generation. Its seq and tags stay.

    Raises:
        NotFoundError: The trash was emptied, or the checkpoint was dropped, meanwhile.
        MissingChunkError: A pack that it needs is already deleted.
        CorruptError: Its manifest is damaged.
        ConflictError: Another process has replaced the checkpoint meanwhile.
    """
    entry = _entry_of(repository, trashed)
    again = replace(entry, header=replace(entry.header, generation=in_place.generation + 1))
    finish_replacement(repository, again, repository.manifests.publish(again))
    put_back_points_of(repository, again.header.seq)
    return again


def _entry_of(repository: Repository, trashed: TrashedManifest) -> Manifest:
    """Read a manifest in the trash, and check that all its packs exist."""
    where = repository.backend.location_of(trashed.path)
    try:
        content = repository.backend.read_bytes(trashed.path, nbytes_max=repository.limits.manifest_nbytes_max)
    except FileNotFoundError:
        raise _emptied(trashed, where) from None
    entry = decode_manifest(content, limits=repository.limits, expect=trashed.name, where=where)
    if entry.header.store_id != repository.store_id:
        raise CorruptError("the manifest belongs to another store", where=where)
    repository.require_packs(entry)
    return entry


def undelete(repository: Repository, trashed: TrashedManifest) -> Manifest:
    """Publish a dropped checkpoint again, as the next seq of its run.

    Raises:
        NotFoundError: The trash was emptied meanwhile.
        MissingChunkError: A pack that it needs is already deleted.
        CorruptError: Its manifest is damaged.
    """
    entry = _entry_of(repository, trashed)
    manifests = repository.manifests
    manifests.make_folders()
    listing = manifests.listing()
    seqs: Iterable[int] = (name.seq for name in (*listing.names, *listing.lower))
    seq = manifests.claim(max([listing.claimed_max, *listing.dropped, *seqs]) + 1)
    # Names of files show which manifests may be in replay form: their generation is not 0.
    generation = int(is_in_replay_form(entry.tree))
    now_ns = repository.clock.now_ns()
    again = republished(entry, seq=seq, time_ns=now_ns, is_archival=True, generation=generation)
    name = manifests.publish(again)
    gone = repository.rescue_packs(again.packs)
    if gone:
        manifests.withdraw(name)
        raise MissingChunkError(
            f"{counted(len(gone), 'pack')} of the dropped checkpoint of step {name.step} vanished meanwhile",
            where=repository.backend.root,
            todo="they cannot be recovered; undelete another checkpoint",
            pack_id=min(gone).hex(),
        )
    manifests.note_published(seq)
    put_back_points_of(repository, seq)
    return again


def _id_of(repository: Repository, trashed: TrashedManifest) -> str:
    table = table_of(repository, trashed)
    return "" if table is None else table.header.checkpoint_id.hex()


def table_of(repository: Repository, trashed: TrashedManifest) -> PackTable | None:
    """Return the header and packs of a manifest in the trash; None if it cannot be read."""
    try:
        content = repository.backend.read_bytes(trashed.path, nbytes_max=repository.limits.manifest_nbytes_max)
        return decode_pack_table(content, limits=repository.limits, expect=trashed.name)
    except (FileNotFoundError, *UNREADABLE):
        return None


def kind_in_trash(repository: Repository, trashed: TrashedManifest) -> TrashKind:
    """Return why a manifest of the run of ``repository`` is in the trash."""
    name, listing = trashed.name, repository.manifests.listing()
    if name.seq in listing.dropped:
        return "dropped"
    in_place = next((other for other in listing.names if other.seq == name.seq), None)
    if in_place is None:
        return "stray"
    table = table_of(repository, trashed)
    try:
        header = repository.manifests.header(in_place)
        tiers = set(repository.manifests.tiers(header))
    except (FileNotFoundError, *UNREADABLE):
        return "replaced"
    if table is None:
        return "replaced"
    if _is_demoted(table.header) != _is_demoted(header):
        return "demoted" if _is_demoted(header) else "made exact"
    before = set(table.tiers)
    if tiers != before:
        return "pulled" if LOCAL_TIER in tiers - before else "pushed"
    return "rewritten"


def _is_demoted(header: ManifestHeader) -> bool:
    return header.fidelity != EXACT_FIDELITY or header.may_be_in_replay_form


def _emptied(trashed: TrashedManifest, where: str) -> NotFoundError:
    return NotFoundError(f"seq {trashed.name.seq} was deleted from the trash meanwhile", where=where)
