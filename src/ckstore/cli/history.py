"""Change what is in a run: ``tag``, ``untag``, ``delete``, ``undelete``, ``trash`` and ``rewind``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ckstore.api import Store
from ckstore.cli import completion, render
from ckstore.cli.parser import AsJson, Ref, Run, Shared, StorePath, confirm, opened, require_terminal
from ckstore.cli.render import (
    SEQ,
    STEP,
    Column,
    Table,
    count,
    json_of,
    json_of_info,
    local_time,
    metrics_of,
    name_of,
    size,
)
from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.opening import open_existing
from ckstore.results import Info

if TYPE_CHECKING:
    from ckstore.ops.trash import TrashEntry


_TO_DELETE = Table(
    SEQ,
    STEP,
    Column("time (local)", "time_ns", local_time),
    Column("state", "bytes_state", size, is_number=True),
    Column("metrics", "metrics", metrics_of, worth=0, is_elastic=True),
    Column("tags", worth=1, is_elastic=True),
)


def tag(
    path: StorePath,
    ref: Ref,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag. An existing tag is moved.")],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Give a checkpoint or a point of a journal a name. It is then never deleted."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        store.tag(ref, name)
        info = store.info(name)
    if as_json:
        render.print_json(json_of_info(info))
    else:
        render.say(f"Tagged {name_of(info, ref)} of run {run} as {name}.")


def untag(
    path: StorePath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag to remove.", autocompletion=completion.tags)],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Remove a tag. What it was on stays, but is no longer protected by this name."""
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        store.untag(name)
    if as_json:
        render.print_json({"run": run, "removed": name})
    else:
        render.say(f"Removed tag {name} from run {run}. What it was on stays.")


def delete(
    path: StorePath,
    refs: Annotated[
        list[str],
        typer.Argument(
            metavar="REF...",
            help="What to delete. A step means every checkpoint of that step, seq:N exactly one.",
            autocompletion=completion.refs,
        ),
    ],
    run: Run = "main",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Delete checkpoints, after asking.

    They are listed first. If a REF is not found, or a checkpoint has a tag, nothing is deleted. `ckstore gc` frees the
    disk space.
    """
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        chosen = _chosen(store, refs)
        if not yes:
            _ask(chosen, run, as_json=as_json)
        for info in chosen:
            store.delete(f"seq:{info.seq}")
    if as_json:
        render.print_json({"run": run, "deleted": [json_of(info, "seq", "step") for info in chosen]})
        return
    deleted = count(len(chosen), "checkpoint")
    render.say(f"Deleted {deleted}. `ckstore gc` frees the disk space; until then `ckstore undelete` restores them.")


def _chosen(store: Store, refs: list[str]) -> list[Info]:
    """Return the checkpoints that the references name, each once. Refuse tagged ones before anything is deleted."""
    entries: dict[int, Info] = {}
    for ref in refs:
        info = store.info(ref)
        if info.form != "whole":
            raise UsageError(
                f"step {info.step} is a point of the journal ({info.form}); nothing was deleted",
                todo="points go with their keyframe: delete that checkpoint, or run `ckstore gc --keep-journal N`",
            )
        entries[info.seq] = info
        if ref.isdigit():
            entries.update({other.seq: other for other in store.log() if other.step == info.step})
    kept = {seq: name for name, seq in store.tags().items()}
    for info in entries.values():
        if info.seq in kept:
            raise ConflictError(
                f"seq {info.seq} (step {info.step}) is kept by the tag {kept[info.seq]!r}; nothing was deleted",
                todo="remove the tag with `ckstore untag` first",
            )
    return [entries[seq] for seq in sorted(entries)]


def _ask(chosen: list[Info], run: str, *, as_json: bool) -> None:
    require_terminal(unchanged="nothing was deleted", as_json=as_json)
    _TO_DELETE.print(chosen, title=f"to be deleted from run {run}")
    these = "this checkpoint" if len(chosen) == 1 else f"these {len(chosen)} checkpoints"
    confirm(f"Delete {these}?", unchanged="nothing was deleted")


def rewind(
    path: StorePath,
    ref: Ref,
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Make an older checkpoint the newest again.

    Training then resumes from it. REF may also be a point of a journal. A checkpoint is published again under a new
    seq, without copying data. The newer checkpoints and points stay in the history. Refused while a trainer is writing
    to this run.
    """
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        before = store.info(ref)
        is_point = before.form != "whole"
        info = store.rewind(before.step if is_point else f"seq:{before.seq}")
    if as_json:
        render.print_json(json_of_info(info))
    else:
        where = "" if is_point else f", as seq {info.seq}"
        render.say(f"Rewound run {run}: {name_of(before, ref)} is the newest again{where}.")


_KINDS = {
    "dropped": "deleted",
    "demoted": "exact form of a demoted one",
    "made exact": "lossy form of one that is exact again",
    "pushed": "form before a push",
    "pulled": "form before a pull",
    "rewritten": "form before its packs were rewritten",
    "replaced": "older form",
    "stray": "to be put back by the next collection",
}
_ID_LETTERS = 8
_SHOWN_MAX = 6


def _manifests_by_kind(entry: TrashEntry) -> str | None:
    groups: dict[str, list[str]] = {}
    for (run, seq, step, _), kind in zip(entry.manifests, entry.kinds, strict=True):
        groups.setdefault(_KINDS[kind], []).append(f"{run} step {step} (seq:{seq})")
    words = [f"{words}: {_listed(names)}" for words, names in groups.items()]
    words += [f"{count(entry.segment_count, 'segment')} of a journal"] if entry.segment_count else []
    return "; ".join(words) or None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more


_TRASH = Table(
    Column("id", lambda entry: entry.trash_id[:_ID_LETTERS]),
    Column("time (local)", "time_ns", local_time),
    Column("packs", "pack_count", is_number=True),
    Column("size", "nbytes", size, is_number=True),
    Column("checkpoints", _manifests_by_kind, is_elastic=True),
)


def trash(
    action: Annotated[Literal["ls", "restore", "purge"], typer.Argument(help="What to do.")],
    path: StorePath,
    trash_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="Folders of the trash, by the first letters of their ids."),
    ] = None,
    run: Run = "main",
    purge_all: Annotated[bool, typer.Option("--all", help="For purge: the whole trash.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="For purge: do not ask for confirmation.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """List, restore or empty the trash.

    \b
    ls       lists its folders, one for each collection and each deletion
    restore  brings packs and checkpoints back: deleted checkpoints become new
             entries, demoted ones become exact again
    purge    deletes what no checkpoint needs; this cannot be undone
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    with open_existing(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        if action == "ls":
            _list_trash(store, as_json=as_json)
            return
        if not trash_ids and not (purge_all and action == "purge"):
            raise UsageError(f"trash {action} needs the ID of a trash folder", todo="`ckstore trash ls` lists them")
        if action == "restore":
            _restore_folders(store, path, trash_ids or [], as_json=as_json)
        else:
            _purge_trash(store, trash_ids or [], is_asked=not yes, as_json=as_json)


def _list_trash(store: Store, *, as_json: bool) -> None:
    entries = store.trash()
    if as_json:
        render.print_json({"trash": [_json_of_folder(entry) for entry in entries]})
        return
    if not entries:
        render.say("The trash is empty.")
        return
    _TRASH.print(entries)


def _json_of_folder(entry: TrashEntry) -> dict[str, object]:
    names = ("run", "seq", "step", "generation")
    return {
        "trash_id": entry.trash_id,
        "time": None if entry.time_ns is None else render.iso_time(entry.time_ns),
        "packs": entry.pack_count,
        "nbytes": entry.nbytes,
        "manifests": [
            {**dict(zip(names, manifest, strict=True)), "kind": kind}
            for manifest, kind in zip(entry.manifests, entry.kinds, strict=True)
        ],
        "segments": entry.segment_count,
    }


def _restore_folders(store: Store, path: str, trash_ids: list[str], *, as_json: bool) -> None:
    restored = [store.restore_from_trash(trash_id) for trash_id in trash_ids]
    undeleted = [info for each in restored for info in each.undeleted]
    troubles = [trouble for each in restored for trouble in each.troubles]
    exact_again = [info for each in restored for info in each.exact_again]
    packs = sum(each.packs for each in restored)
    superseded = sum(each.superseded for each in restored)
    segments = sum(each.segments for each in restored)
    if as_json:
        facts = {
            "undeleted": [json_of_info(info) for info in undeleted],
            "troubles": troubles,
            "superseded": superseded,
            "exact_again": [json_of_info(info) for info in exact_again],
        }
        render.print_json({"packs": packs, **facts, "segments": segments})
    else:
        if packs:
            unneeded = "" if undeleted or exact_again else "; the next gc moves unreferenced ones back to the trash"
            render.say(f"{count(packs, 'pack')} restored{unneeded}.")
        if segments:
            render.say(f"{count(segments, 'segment')} of journals restored.")
        for info in (*undeleted, *exact_again):
            render.say(_restored_sentence(info))
        if superseded:
            older = count(superseded, "older form")
            render.say(f"{older} left in the trash: the checkpoints are in the store, with the same content.")
        for trouble in troubles:
            render.say(f"Not restored: {trouble}")
    if troubles or all(each.is_empty for each in restored):
        what = f"{count(len(troubles), 'checkpoint')} not restored" if troubles else "nothing was restored"
        raise NotFoundError(what, where=str(path), todo="`ckstore trash ls` lists the content of the trash")


def _purge_trash(store: Store, trash_ids: list[str], *, is_asked: bool, as_json: bool) -> None:
    if is_asked:
        require_terminal(unchanged="nothing was freed", as_json=as_json)
        confirm("Free it? Deleted checkpoints in it cannot be restored afterwards.", unchanged="nothing was freed")
    freed = sum(store.purge(trash_id) for trash_id in trash_ids) if trash_ids else store.purge()
    if as_json:
        render.print_json({"freed_nbytes": freed})
    else:
        render.say(f"{render.size(freed)} freed.")


def undelete(
    path: StorePath,
    refs: Annotated[
        list[str],
        typer.Argument(metavar="REF...", help="What to bring back: a step (its newest entry), seq:N, or id:PREFIX."),
    ],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Bring back deleted checkpoints, or make demoted ones exact.

    Deleted checkpoints become new entries, which `latest` skips: training never resumes from an old state by surprise.
    Demoted checkpoints become exact again in place. `ckstore trash ls` lists what can be brought back.
    """
    with open_existing(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        infos = []
        for ref in refs:
            infos.append(store.undelete(ref))
            if not as_json:
                render.say(_restored_sentence(infos[-1]))
    if as_json:
        render.print_json({"run": run, "undeleted": [json_of_info(info) for info in infos]})


def _restored_sentence(info: Info) -> str:
    if info.generation:
        return f"Exact again: {name_of(info)} of run {info.run}. Its lossy form is in the trash."
    return f"Restored: {name_of(info)} of run {info.run}, as a new entry that `latest` skips."
