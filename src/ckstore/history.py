"""Tag, rewind and delete: change which checkpoints a run shows, without touching a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.errors import ConflictError, NotFoundError
from ckstore.format.layout import ManifestName
from ckstore.format.manifest import Manifest, republished
from ckstore.store.drop import newest_in_demotion
from ckstore.store.parts import Parts
from ckstore.store.references import Reference, header_or_none, load_whole, resolve


def tag(parts: Parts, name: str, reference: Reference) -> ManifestName:
    """Point a tag at a checkpoint.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: It is being dropped.
    """
    target = resolve(parts, reference)
    tag_seq(parts, name, target)
    return target


def tag_seq(parts: Parts, name: str, target: ManifestName) -> None:
    """Point a tag at the entry with this name; raises ConflictError when it is being dropped."""
    header = header_or_none(parts.manifests, target)
    if header is None:
        raise NotFoundError(f"seq {target.seq} was dropped meanwhile", where=parts.backend.root)

    def is_dropped(seq: int) -> bool:
        return all(other.seq != seq for other in parts.manifests.listing().names)

    parts.tags.put(name, seq=target.seq, step=target.step, checkpoint_id=header.checkpoint_id, is_dropped=is_dropped)


def rewind(parts: Parts, reference: Reference) -> Manifest:
    """Publish an entry again as the newest of its run; its chunks are shared, nothing is copied.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: Another live writer has the run, or packs vanished meanwhile.
        CorruptError: The entry is torn, or a pack of it is missing.
    """
    parts.prepare_run()
    parts.lease.take()
    entry = load_whole(parts, resolve(parts, reference))
    parts.lease.check()
    seq = parts.manifests.claim(parts.seq_next())
    parts.note_seq(seq)
    manifest = republished(entry, seq=seq, time_ns=parts.clock.now_ns(), is_archival=False)
    name = parts.manifests.publish(manifest)
    gone = parts.lost_packs(manifest.packs)
    if gone:
        parts.manifests.withdraw(name)
        raise ConflictError(
            f"{len(gone)} packs of seq {entry.header.seq} vanished while it was published again",
            where=parts.backend.root,
            todo="run `ckstore verify`",
        )
    parts.manifests.note_published(seq)
    return manifest


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a delete removed: seqs, ascending. Their packs go with the next gc."""

    seqs: tuple[int, ...]
    steps: tuple[int, ...]


def delete(parts: Parts, reference: Reference) -> Deleted:
    """Drop a checkpoint: every entry of a step, or one entry otherwise.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: It carries a tag; untag it first.
    """
    target = resolve(parts, reference)
    is_step = isinstance(reference, int) or reference.isdigit()
    names = [
        name
        for name in parts.manifests.listing().names
        if name.seq == target.seq or (is_step and name.step == target.step)
    ]
    if not names:
        raise NotFoundError(f"seq {target.seq} was dropped meanwhile", where=parts.backend.root)
    intents: list[str] = []
    try:
        for name in names:
            intents.append(parts.tags.declare(name.seq, "delete"))  # noqa: PERF401 - each must be retracted
        # Read after the intents are durable: a tag set meanwhile is seen here, a later one is refused.
        for name in names:
            tags = parts.tags.names_of(name.seq, is_strict=True)
            if tags:
                raise ConflictError(
                    f"seq {name.seq} (step {name.step}) carries the tag {tags[0]!r}",
                    where=parts.backend.root,
                    todo="`ckstore untag` it first if it is to go",
                    tags=tags,
                )
        left = newest_in_demotion(parts, names)
        if left is not None:
            raise ConflictError(
                f"seq {left}, which would be the newest checkpoint then, is being demoted or dropped",
                where=parts.backend.root,
                todo="try again when that is done",
            )
        for name, intent in zip(names, intents, strict=True):
            parts.manifests.mark_dropped({name.seq: intent})
        parts.manifests.move_to_trash(frozenset(name.seq for name in names))
    finally:
        for intent in intents:
            parts.tags.retract(intent)
    return Deleted(tuple(name.seq for name in names), tuple(sorted({name.step for name in names})))
