"""List what a store contains, for all runs: manifests, marks, packs; and the entries of runs for ``ckstore ls``.

Entries cost one small read each and include damaged checkpoints. Nothing here imports numpy or torch, so ``ckstore ls``
starts quickly. It reads plain stores with ``plain_listing``, which starts faster still.

In a bucket, one recursive listing replaces a listing of each folder: a request returns a thousand names and costs as
much as reading one file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckstore.config import check_name, is_name
from ckstore.display import html_table
from ckstore.errors import BackendError, CorruptError, NotFoundError, UnsupportedError, counted, is_refused
from ckstore.format import paths
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, Distant, FileInfo, map_concurrent
from ckstore.io.url import backend_for
from ckstore.results import HEADINGS, Info, cells_of
from ckstore.store.manifests import missing_sentence
from ckstore.store.points import Point, points_by_keyframe
from ckstore.store.refs import header_or_none, headers_newest_first, tiers_of, tiers_of_each
from ckstore.store.replay_bases import info_with_form
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record

_log = logging.getLogger("ckstore")


def manifests_in(backend: Backend) -> set[ManifestName]:
    """Return the names of all manifests in place, of every run and generation.

    A single listing may miss both names of a file that is renamed meanwhile. If other processes replace manifests, call
    it twice.
    """
    found = (paths.parse_manifest_file(run, file) for run, file in _files_by_run(backend, paths.MANIFESTS_FOLDER))
    return {name for name in found if name is not None}


def marks_in(backend: Backend) -> tuple[dict[str, frozenset[int]], dict[str, frozenset[int]]]:
    """Return, by run, the seqs with a drop mark and the seqs with a published mark.

    A run without manifests may have marks.
    """
    found: dict[str, dict[str, set[int]]] = {"dropped": {}, "published": {}}
    for run, file in _files_by_run(backend, paths.CLAIMS_FOLDER):
        claim = paths.parse_claim_file(file)
        if claim is not None and claim.kind in found:
            found[claim.kind].setdefault(run, set()).add(claim.seq)
    dropped, published = ({run: frozenset(seqs) for run, seqs in kind.items()} for kind in found.values())
    return dropped, published


def packs_in(backend: Backend) -> Iterator[tuple[PackId, FileInfo]]:
    """Yield the packs in place."""
    for name, info in _files_of_packs(backend):
        pack_id = paths.parse_pack_file(name.rpartition("/")[2])
        if pack_id is not None and paths.pack_name(pack_id) == name:
            yield pack_id, info


def _files_by_run(backend: Backend, above: str) -> Iterator[tuple[str, str]]:
    """Yield run and file name for the files in all folders that are named like runs."""
    if isinstance(backend, Distant):
        for path, _ in backend.list_deep(above):
            run, _, file = path.removeprefix(f"{above}/").partition("/")
            if is_name(run):
                yield run, file
        return
    for run in filter(is_name, backend.list_names(above)):
        for file in backend.list_names(f"{above}/{run}"):
            yield run, file


def _files_of_packs(backend: Backend) -> Iterator[tuple[str, FileInfo]]:
    if isinstance(backend, Distant):
        yield from backend.list_deep(paths.PACKS_FOLDER)
        return
    pack_folders = {folder.rpartition("/")[2] for folder in paths.pack_folders()}
    for folder in backend.list_names(paths.PACKS_FOLDER):
        # This user may not be allowed to list foreign folders.
        for file in backend.list_names(f"{paths.PACKS_FOLDER}/{folder}") if folder in pack_folders else ():
            name = f"{paths.PACKS_FOLDER}/{folder}/{file}"
            # A pack may be gone meanwhile. Foreign files are not checked.
            info = backend.stat(name) if paths.parse_pack_file(file) is not None else None
            if info is not None:
                yield name, info


UNREADABLE = (CorruptError, UnsupportedError, BackendError)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a run.

    Attributes:
        seq: Its commit number.
        step: The trainer's step.
        info: The content of its header; None if unreadable.
        damage: Why the header is unreadable; empty otherwise.
        refused: Why this user may not read it. It may be undamaged.
        points: The points of the journal of which it is the nearest keyframe.
    """

    seq: int
    step: int
    info: Info | None
    damage: str = ""
    refused: str = ""
    points: tuple[Point, ...] = ()

    @property
    def is_archival(self) -> bool:
        """Whether it was restored from the trash, so that ``latest`` skips it."""
        return self.info is not None and self.info.is_archival


@dataclass(frozen=True, slots=True)
class RunLog:
    """Entries of a run, newest first, possibly not all.

    Attributes:
        count: How many entries the run has.
        damaged_tags: Name and problem of every damaged tag.
        refused_tags: Name and problem of every tag that this user may not read.
        missing: A sentence about committed checkpoints whose manifest is missing; empty otherwise.
        tags: All readable tags, sorted.
    """

    run: str
    count: int
    entries: tuple[Entry, ...]
    damaged_tags: tuple[tuple[str, str], ...]
    refused_tags: tuple[tuple[str, str], ...] = ()
    missing: str = ""
    tags: tuple[str, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether a shown entry or a tag is damaged, or an entry is missing."""
        return bool(self.damaged_tags or self.missing) or any(entry.damage for entry in self.entries)

    @property
    def is_refused(self) -> bool:
        """Whether this user may not read some entry or tag."""
        return bool(self.refused_tags) or any(entry.refused for entry in self.entries)


def log_of_store(
    address: str | os.PathLike[str] | Backend,
    *,
    run: str | None = None,
    limit: int | None = None,
    skips_archival: bool = False,
    allow_shared_folder: bool = False,
) -> list[RunLog]:
    """Return the newest entries of one run, or of every run, sorted by name.

    Args:
        address: A folder, a URL, or a backend.
        run: Only this run.
        limit: How many entries of each run; None: all.
        skips_archival: Leave out checkpoints that were restored from the trash, as ``latest`` does.
        allow_shared_folder: Accept a folder that other users can write to.

    Raises:
        NotFoundError: There is no store, or no such run.
    """
    backend = backend_for(address, allow_shared_folder=allow_shared_folder)
    record = read_store_record(backend)
    if run is not None:
        check_name(run, "run")
    runs = Repository(backend, record, run or "main").runs_with_claims()
    if run is not None and run not in runs:
        todo = f"existing runs: {', '.join(runs)}" if runs else "nothing was committed to this store yet"
        raise NotFoundError(f"there is no run {run!r}", where=backend.root, todo=todo)
    repositories = (Repository(backend, record, name) for name in (runs if run is None else [run]))
    return [log_of_run(each, limit=limit, skips_archival=skips_archival) for each in repositories]


def log_of_run(repository: Repository, *, limit: int | None = None, skips_archival: bool = False) -> RunLog:
    """Return the newest ``limit`` entries of the run, or all. Damage is reported, not raised."""
    tags, all_tags, damaged_tags, refused_tags = _tags_by_seq(repository)
    listing = repository.manifests.listing()
    names = listing.names
    missing = missing_sentence(repository.run, listing.missing) if listing.missing else ""
    points = points_by_keyframe(repository)
    entries: list[Entry] = []
    # In a bucket, many entries are read concurrently, and a few more than the limit.
    for entry in map_concurrent(repository.backend, lambda name: _entry(repository, name, tags), names[::-1]):
        if entry is not None and not (skips_archival and entry.is_archival):
            entries.append(replace(entry, points=points.get(entry.seq, ())))
        if limit is not None and len(entries) >= limit:
            break
    problems = tuple(damaged_tags), tuple(refused_tags)
    return RunLog(repository.run, len(names), tuple(entries), *problems, missing, tuple(sorted(all_tags)))


def infos_of_run(repository: Repository) -> Iterator[Info]:
    """Yield every entry of the run, newest first. Damaged and missing entries are left out, with a warning."""
    manifests, by_seq = repository.manifests, dict[int, list[str]]()
    for name, record in repository.tags.all().items():
        if record.point is None:
            by_seq.setdefault(record.seq, []).append(name)
    headers = headers_newest_first(manifests)
    if missing := manifests.listing().missing:
        _log.warning("%s", missing_sentence(repository.run, missing))
    for header, tiers in zip(headers, tiers_of_each(manifests, headers), strict=True):
        info = Info.of(header, tags=sorted(by_seq.get(header.seq, ())), tiers=tiers)
        yield info_with_form(manifests, header, info)


HTML_ROWS = 10
"""Checkpoints in the table of ``table_of_newest``."""


def table_of_newest(repository: Repository) -> str:
    """Return the newest entries of the run as an HTML table for notebooks."""
    log = log_of_run(repository, limit=HTML_ROWS)
    rows = [
        cells_of(entry.info) if entry.info is not None else (entry.seq, entry.step, entry.damage or entry.refused)
        for entry in log.entries
    ]
    older = log.count - len(rows)
    title = f"{repository.backend.root}, run {log.run}: {counted(log.count, 'checkpoint')}"
    return html_table(f"{title}; the newest {len(rows)}" if older > 0 else title, HEADINGS, rows)


def _entry(repository: Repository, name: ManifestName, tags: dict[int, list[str]]) -> Entry | None:
    """Return an entry; None if it was dropped meanwhile."""
    try:
        header = header_or_none(repository.manifests, name)
        if header is None:
            return None
        info = Info.of(header, tags=sorted(tags.get(header.seq, ())), tiers=tiers_of(repository.manifests, header))
        info = info_with_form(repository.manifests, header, info)
    except UNREADABLE as error:
        damage, refused = ("", str(error)) if is_refused(error) else (str(error), "")
        return Entry(name.seq, name.step, None, damage, refused)
    return Entry(header.seq, header.step, info)


_Problems = list[tuple[str, str]]


def _tags_by_seq(repository: Repository) -> tuple[dict[int, list[str]], list[str], _Problems, _Problems]:
    """Return the tags on checkpoints by seq, the names of all tags, and the damaged and the unreadable ones."""
    by_seq: dict[int, list[str]] = {}
    names: list[str] = []
    damaged: _Problems = []
    refused: _Problems = []
    for name in repository.backend.list_names(paths.tags_folder(repository.run)):
        if not is_name(name):
            continue
        try:
            record = repository.tags.get(name)
        except NotFoundError:
            continue
        except UNREADABLE as error:
            (refused if is_refused(error) else damaged).append((name, str(error)))
            continue
        names.append(name)
        if record.point is None:
            by_seq.setdefault(record.seq, []).append(name)
    return by_seq, names, damaged, refused
