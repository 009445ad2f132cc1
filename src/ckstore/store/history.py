"""Tag, rewind and delete: change which checkpoints a run shows, without touching a tensor.

Drop checkpoints, many at a time: intents, tags read again, drop marks, and only then the move to the trash.

The steps are those of Drop in docs/FORMAT.md section 10, each taken by a batch before the next one begins.

Invariants:
- No tagged checkpoint is dropped: whoever tags writes first and looks at intents second, here it is the other way.
- Of a step, an older entry is durably marked before a newer one: the step never comes to mean something older.
- What a drop makes the newest is not being demoted meanwhile: whoever demotes looks after its intent, too.
- A drop mark is never taken back. What a crash leaves in place although it is marked, the next collection moves.

Bring back what the trash still has: dropped checkpoints, and the exact form of those that were demoted.

A dropped one is published again, as a new entry that is archival: a drop mark is never taken back, and ``latest`` skips
archival entries, so that nothing old is resumed by surprise. A demoted one is replaced by its exact form, in place.

Invariants:
- A dropped one is published as any commit is: claimed, linked, and its packs looked for afterwards, in the trash too.
- The exact form is published as any replacement is, as the next generation, and the form with a loss goes to the trash.
- No lease is needed: a claim makes a seq exclusive, a generation's name makes a replacement so, and whoever trains goes
  on with the next one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    is_disk_full,
)
from ckstore.format.location import PackTable, decode_pack_table
from ckstore.format.losses import EXACT_FIDELITY
from ckstore.format.manifest import Manifest, decode_manifest, republished
from ckstore.format.paths import ManifestName
from ckstore.io.backend import for_each_concurrent
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.reachability import UNREADABLE
from ckstore.store.refs import Reference, header_or_none, load_whole, resolve
from ckstore.store.repository import Repository, finish_replacement
from ckstore.store.trash import TrashedManifest

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
    repository: Repository,
    names: Sequence[ManifestName],
    purpose: str,
    tell: Callable[[int], None] = lambda count: None,
) -> Dropped:
    """Drop checkpoints of the run of ``repository``, the oldest first.

    Args:
        repository: The store and its run.
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
        repository.make_folders()
    for batch in _batches(sorted(names)):
        try:
            _drop_batch(repository, batch, purpose, done, steps_kept)
        except CapacityError as error:
            if not is_disk_full(error) or len(batch) == 1:
                raise
            if not _drop_one_by_one(repository, batch, purpose, done, steps_kept):
                break
        tell(len(done.names))
    return done


def _drop_one_by_one(
    repository: Repository, batch: Sequence[ManifestName], purpose: str, done: Dropped, steps_kept: dict[int, str]
) -> bool:
    """Drop what a full disk has room for, and spare the rest until that was freed; return whether all could go.

    Raises:
        CapacityError: Not one of them can.
    """
    for name in batch:
        try:
            _drop_batch(repository, [name], purpose, done, steps_kept)
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


def newest_in_demotion(repository: Repository, names: Sequence[ManifestName]) -> int | None:
    """Return the seq that would be the newest of the run without these, if someone demotes it now; else None.

    To be asked after intents on all of them are durable: who demotes declares first and looks for those second.
    """
    going = {name.seq for name in names}
    for name in reversed(repository.manifests.listing().names):
        if name.seq in going:
            continue
        is_there = True
        with contextlib.suppress(CorruptError):
            header = header_or_none(repository.manifests, name)
            is_there = header is not None and not header.is_archival
        if is_there:
            return name.seq if name.seq < max(going) and repository.tags.intents_on(name.seq) else None
    return None


def _drop_batch(
    repository: Repository, batch: Sequence[ManifestName], purpose: str, done: Dropped, steps_kept: dict[int, str]
) -> None:
    intents = repository.tags.declare_all([name.seq for name in batch], purpose)
    try:
        # Read after the intents are durable: a tag set meanwhile is seen here, a later one is refused.
        tags = {record.seq: tag for tag, record in repository.tags.all(is_strict=True).items()}
        doomed = []
        left = newest_in_demotion(repository, batch)
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
            repository.manifests.mark_dropped({name.seq: paths[name.seq] for name in doomed})
            repository.manifests.move_to_trash(frozenset(name.seq for name in doomed))
            done.names += doomed
    finally:
        # One that stays is removed by the next collection once this process has ended.
        with contextlib.suppress(CkstoreError):
            for_each_concurrent(repository.backend, repository.tags.retract, intents)


def tag(repository: Repository, name: str, reference: Reference) -> ManifestName:
    """Point a tag at a checkpoint.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: It is being dropped.
    """
    target = resolve(repository, reference)
    tag_seq(repository, name, target)
    return target


def tag_seq(repository: Repository, name: str, target: ManifestName) -> None:
    """Point a tag at the entry with this name; raises ConflictError when it is being dropped."""
    header = header_or_none(repository.manifests, target)
    if header is None:
        raise NotFoundError(f"seq {target.seq} was dropped meanwhile", where=repository.backend.root)

    def is_dropped(seq: int) -> bool:
        return all(other.seq != seq for other in repository.manifests.listing().names)

    repository.tags.put(
        name, seq=target.seq, step=target.step, checkpoint_id=header.checkpoint_id, is_dropped=is_dropped
    )


def rewind(repository: Repository, reference: Reference) -> Manifest:
    """Publish an entry again as the newest of its run; its chunks are shared, nothing is copied.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: Another live writer has the run, or packs vanished meanwhile.
        CorruptError: The entry is torn, or a pack of it is missing.
    """
    repository.prepare_run()
    repository.lease.take()
    entry = load_whole(repository, resolve(repository, reference))
    repository.lease.check()
    seq = repository.manifests.claim(repository.seq_next())
    repository.note_seq(seq)
    manifest = republished(entry, seq=seq, time_ns=repository.clock.now_ns(), is_archival=False)
    name = repository.manifests.publish(manifest)
    gone = repository.rescue_packs(manifest.packs)
    if gone:
        repository.manifests.withdraw(name)
        raise ConflictError(
            f"{len(gone)} packs of seq {entry.header.seq} vanished while it was published again",
            where=repository.backend.root,
            todo="run `ckstore verify`",
        )
    repository.manifests.note_published(seq)
    return manifest


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a delete removed: seqs, ascending. Their packs go with the next gc."""

    seqs: tuple[int, ...]
    steps: tuple[int, ...]


def delete(repository: Repository, reference: Reference) -> Deleted:
    """Drop a checkpoint: every entry of a step, or one entry otherwise.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: It carries a tag; untag it first.
    """
    target = resolve(repository, reference)
    is_step = isinstance(reference, int) or reference.isdigit()
    names = [
        name
        for name in repository.manifests.listing().names
        if name.seq == target.seq or (is_step and name.step == target.step)
    ]
    if not names:
        raise NotFoundError(f"seq {target.seq} was dropped meanwhile", where=repository.backend.root)
    intents: list[str] = []
    try:
        for name in names:
            intents.append(repository.tags.declare(name.seq, "delete"))  # noqa: PERF401 - each must be retracted
        # Read after the intents are durable: a tag set meanwhile is seen here, a later one is refused.
        for name in names:
            tags = repository.tags.names_of(name.seq, is_strict=True)
            if tags:
                raise ConflictError(
                    f"seq {name.seq} (step {name.step}) carries the tag {tags[0]!r}",
                    where=repository.backend.root,
                    todo="`ckstore untag` it first if it is to go",
                    tags=tags,
                )
        left = newest_in_demotion(repository, names)
        if left is not None:
            raise ConflictError(
                f"seq {left}, which would be the newest checkpoint then, is being demoted or dropped",
                where=repository.backend.root,
                todo="try again when that is done",
            )
        for name, intent in zip(names, intents, strict=True):
            repository.manifests.mark_dropped({name.seq: intent})
        repository.manifests.move_to_trash(frozenset(name.seq for name in names))
    finally:
        for intent in intents:
            repository.tags.retract(intent)
    return Deleted(tuple(name.seq for name in names), tuple(sorted({name.step for name in names})))


TrashKind = Literal["dropped", "demoted", "made exact", "pushed", "pulled", "rewritten", "replaced", "stray"]
"""Why a manifest lies in the trash: the checkpoint was dropped; or it is in place in another form, and this is the one
before that (``replaced``: it cannot be read how). A stray belongs in place, and the next collection puts it there."""


def dropped_in_trash(repository: Repository) -> list[TrashedManifest]:
    """Return the dropped checkpoints of the run that the trash still has, by seq, each by its highest generation."""
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
    """Return the exact forms that the trash still has of checkpoints in place that were demoted, by seq."""
    in_place = {name.seq: name for name in repository.manifests.listing().names}
    found: dict[int, TrashedManifest] = {}
    for folder in repository.trash.contents():
        for trashed in folder.manifests:
            name, there = trashed.name, in_place.get(trashed.name.seq)
            if name.run == repository.run and there is not None and is_exact_form(repository, trashed, there):
                other = found.get(name.seq)
                if other is None or other.name.generation < name.generation:
                    found[name.seq] = trashed
    return [found[seq] for seq in sorted(found)]


def is_exact_form(repository: Repository, trashed: TrashedManifest, there: ManifestName) -> bool:
    """Whether a manifest in the trash is the exact form of a checkpoint that is in place with a loss."""
    if trashed.name.generation >= there.generation:
        return False
    try:
        if repository.manifests.header(there).fidelity == EXACT_FIDELITY:
            return False
    except (FileNotFoundError, *UNREADABLE):
        return False
    table = table_of(repository, trashed)
    return table is not None and table.header.fidelity == EXACT_FIDELITY


def find_in_trash(repository: Repository, reference: Reference) -> TrashedManifest:
    """Return the checkpoint that a step, ``seq:N`` or ``id:PREFIX`` means, dropped or demoted; of a step, the newest.

    Raises:
        NotFoundError: The trash has none such; the message names what it has.
        UsageError: It is no such reference.
    """
    candidates = sorted(
        [*dropped_in_trash(repository), *exact_in_trash(repository)], key=lambda trashed: trashed.name.seq
    )
    if isinstance(reference, bool) or not isinstance(reference, (int, str)):
        raise UsageError("a dropped checkpoint is named by a step, seq:N or id:PREFIX", where=repr(reference))
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
        raise UsageError("a dropped checkpoint is named by a step, seq:N or id:PREFIX", where=repr(reference))
    if not found:
        there = ", ".join(f"{trashed.name.step} (seq:{trashed.name.seq})" for trashed in candidates[-5:])
        raise NotFoundError(
            f"the trash has neither a dropped checkpoint {reference} of run {repository.run!r} nor its exact form",
            where=repository.backend.root,
            todo=f"it has {there}" if there else "it has none of this run",
        )
    return found[-1]


def bring_back(repository: Repository, trashed: TrashedManifest) -> Manifest:
    """Bring back what ``find_in_trash`` has found: as a new entry, or as the exact form of the one in place.

    Raises:
        NotFoundError: The trash was emptied, or the checkpoint in place was dropped, meanwhile.
        MissingChunkError: A pack that it needs was freed already.
        CorruptError: Its manifest is damaged.
        ConflictError: Another process has replaced the checkpoint meanwhile.
    """
    there = next((name for name in repository.manifests.listing().names if name.seq == trashed.name.seq), None)
    return undelete(repository, trashed) if there is None else make_exact(repository, trashed, there)


def make_exact(repository: Repository, trashed: TrashedManifest, there: ManifestName) -> Manifest:
    """Replace a demoted checkpoint by its exact form, as the next generation; its seq and tags stay.

    Raises:
        NotFoundError: The trash was emptied, or the checkpoint was dropped, meanwhile.
        MissingChunkError: A pack that it needs was freed already.
        CorruptError: Its manifest is damaged.
        ConflictError: Another process has replaced the checkpoint meanwhile.
    """
    entry = _entry_of(repository, trashed)
    again = replace(entry, header=replace(entry.header, generation=there.generation + 1))
    finish_replacement(repository, again, repository.manifests.publish(again))
    return again


def _entry_of(repository: Repository, trashed: TrashedManifest) -> Manifest:
    """Read a manifest in the trash, and see that every pack that it needs is somewhere."""
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
        MissingChunkError: A pack that it needs was freed already.
        CorruptError: Its manifest is damaged.
    """
    entry = _entry_of(repository, trashed)
    manifests = repository.manifests
    manifests.make_folders()
    listing = manifests.listing()
    seqs: Iterable[int] = (name.seq for name in (*listing.names, *listing.lower))
    seq = manifests.claim(max([listing.claimed_max, *listing.dropped, *seqs]) + 1)
    again = republished(entry, seq=seq, time_ns=repository.clock.now_ns(), is_archival=True)
    name = manifests.publish(again)
    gone = repository.rescue_packs(again.packs)
    if gone:
        manifests.withdraw(name)
        raise MissingChunkError(
            f"{len(gone)} packs of the dropped checkpoint of step {name.step} were freed meanwhile",
            where=repository.backend.root,
            todo="nothing brings them back; undelete another one",
            pack_id=min(gone).hex(),
        )
    manifests.note_published(seq)
    return again


def _id_of(repository: Repository, trashed: TrashedManifest) -> str:
    table = table_of(repository, trashed)
    return "" if table is None else table.header.checkpoint_id.hex()


def table_of(repository: Repository, trashed: TrashedManifest) -> PackTable | None:
    """Return the header and packs of a manifest in the trash; None where it cannot be read."""
    try:
        content = repository.backend.read_bytes(trashed.path, nbytes_max=repository.limits.manifest_nbytes_max)
        return decode_pack_table(content, limits=repository.limits, expect=trashed.name)
    except (FileNotFoundError, *UNREADABLE):
        return None


def kind_in_trash(repository: Repository, trashed: TrashedManifest) -> TrashKind:
    """Say why a manifest of the run of ``repository`` lies in the trash."""
    name, listing = trashed.name, repository.manifests.listing()
    if name.seq in listing.dropped:
        return "dropped"
    there = next((other for other in listing.names if other.seq == name.seq), None)
    if there is None:
        return "stray"
    table = table_of(repository, trashed)
    try:
        header = repository.manifests.header(there)
        tiers = set(repository.manifests.tiers(header))
    except (FileNotFoundError, *UNREADABLE):
        return "replaced"
    if table is None:
        return "replaced"
    if (table.header.fidelity == EXACT_FIDELITY) != (header.fidelity == EXACT_FIDELITY):
        return "demoted" if table.header.fidelity == EXACT_FIDELITY else "made exact"
    before = set(table.tiers)
    if tiers != before:
        return "pulled" if LOCAL_TIER in tiers - before else "pushed"
    return "rewritten"


def _emptied(trashed: TrashedManifest, where: str) -> NotFoundError:
    return NotFoundError(f"the trash was emptied of seq {trashed.name.seq} meanwhile", where=where)
