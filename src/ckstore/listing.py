"""List the entries of runs, damaged ones too: what a log shows, at the price of one small read an entry.

Nothing here imports numpy or torch, so that ``ckstore ls`` starts at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckstore.errors import BackendError, CorruptError, NotFoundError, UnsupportedError, is_refused
from ckstore.format import layout
from ckstore.format.layout import ManifestName
from ckstore.info import Info
from ckstore.io.address import backend_for
from ckstore.io.backend import Backend
from ckstore.store.at_once import ask_each
from ckstore.store.manifests import missing_sentence
from ckstore.store.parts import Parts, read_store_record
from ckstore.store.references import header_or_none, tiers_of

UNREADABLE = (CorruptError, UnsupportedError, BackendError)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a run.

    Attributes:
        seq: Its number in the run.
        step: The trainer's step.
        info: What its header says; None when that cannot be read.
        damage: Why the header cannot be read; empty otherwise.
        refused: Why this user may not read it; it may be whole.
    """

    seq: int
    step: int
    info: Info | None
    damage: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class RunLog:
    """The entries of a run, newest first, perhaps not all of them.

    Attributes:
        count: How many entries the run has.
        damaged_tags: For every tag that is damaged, its name and why.
        refused_tags: For every tag that this user may not read, its name and why.
        missing: What was committed and has no manifest any more, in a sentence; empty otherwise.
    """

    run: str
    count: int
    entries: tuple[Entry, ...]
    damaged_tags: tuple[tuple[str, str], ...]
    refused_tags: tuple[tuple[str, str], ...] = ()
    missing: str = ""

    @property
    def is_damaged(self) -> bool:
        """Whether an entry shown, or a tag, is damaged, or an entry is missing."""
        return bool(self.damaged_tags or self.missing) or any(entry.damage for entry in self.entries)

    @property
    def is_refused(self) -> bool:
        """Whether there is an entry, or a tag, that this user may not read."""
        return bool(self.refused_tags) or any(entry.refused for entry in self.entries)


def log_of_store(
    address: str | os.PathLike[str] | Backend,
    *,
    run: str | None = None,
    limit: int | None = None,
    allow_shared_folder: bool = False,
) -> list[RunLog]:
    """Return the newest entries of one run, or of every run, by name.

    Raises:
        NotFoundError: There is no store, or no such run.
    """
    backend = backend_for(address, allow_shared_folder=allow_shared_folder)
    record = read_store_record(backend)
    if run is not None:
        layout.check_name(run, "run")
    runs = Parts(backend, record, run or "main").runs_ever()
    if run is not None and run not in runs:
        known = f"runs there are: {', '.join(runs)}" if runs else "nothing was committed here yet"
        raise NotFoundError(f"there is no run {run!r}", where=backend.root, todo=known)
    return [log_of_run(Parts(backend, record, name), limit=limit) for name in (runs if run is None else [run])]


def log_of_run(parts: Parts, *, limit: int | None = None) -> RunLog:
    """Return the newest ``limit`` entries of the run, or all; damage is told, not raised."""
    tags, damaged_tags, refused_tags = _tags_by_seq(parts)
    listing = parts.manifests.listing()
    names = listing.names
    missing = missing_sentence(parts.run, listing.missing) if listing.missing else ""
    entries: list[Entry] = []
    # Far away, many are asked for at the same time, and a few more than are wanted.
    for entry in ask_each(parts.backend, lambda name: _entry(parts, name, tags), names[::-1]):
        if entry is not None:
            entries.append(entry)
        if limit is not None and len(entries) >= limit:
            break
    return RunLog(parts.run, len(names), tuple(entries), tuple(damaged_tags), tuple(refused_tags), missing)


def _entry(parts: Parts, name: ManifestName, tags: dict[int, list[str]]) -> Entry | None:
    """Return what is shown of an entry; None of one that was dropped meanwhile."""
    try:
        header = header_or_none(parts.manifests, name)
        if header is None:
            return None
        info = Info.of(header, tags=sorted(tags.get(header.seq, ())), tiers=tiers_of(parts.manifests, header))
    except UNREADABLE as error:
        why = {"refused" if is_refused(error) else "damage": str(error)}
        return Entry(name.seq, name.step, None, **why)
    return Entry(header.seq, header.step, info)


_Problems = list[tuple[str, str]]


def _tags_by_seq(parts: Parts) -> tuple[dict[int, list[str]], _Problems, _Problems]:
    by_seq: dict[int, list[str]] = {}
    damaged: _Problems = []
    refused: _Problems = []
    for name in parts.backend.list_names(layout.tags_folder(parts.run)):
        if not layout.is_name(name):
            continue
        try:
            by_seq.setdefault(parts.tags.get(name).seq, []).append(name)
        except NotFoundError:
            # Removed since it was listed.
            continue
        except UNREADABLE as error:
            (refused if is_refused(error) else damaged).append((name, str(error)))
    return by_seq, damaged, refused
