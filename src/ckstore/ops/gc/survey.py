"""Look at a whole store before anything of it is collected: manifests, packs, trash, tags, leftovers. Changes nothing.

Invariants:
- What lies in the trash is listed before manifests are looked at: what these name, and only that, must come back.
- A run is blocked where a manifest cannot be read, a pack is missing, or a tag is damaged: nothing of it may go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ckstore.errors import BackendError, CorruptError, UnsupportedError
from ckstore.format import paths
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import FileInfo
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.listing import packs_in
from ckstore.store.manifests import missing_sentence
from ckstore.store.reachability import MarkedManifest, Marker, MarkResult, missing_packs
from ckstore.store.repository import Repository
from ckstore.store.tags import Tags
from ckstore.store.trash import TrashedManifest, TrashFolder

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class Draft:
    """A file in ``tmp``."""

    path: str
    nbytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run, as the survey found it.

    Attributes:
        highest: The highest generation of every seq without a drop mark.
        lower: Superseded generations, whose seq is not dropped.
        marked: Manifests in place although their seq is dropped.
        tags: Names of tags, by seq.
        missing: Packs that are nowhere, by the manifest that names them.
        blocked: Why nothing of the run may go; empty where nothing speaks against it.
    """

    run: str
    highest: tuple[MarkedManifest, ...]
    lower: tuple[MarkedManifest, ...]
    marked: tuple[MarkedManifest, ...]
    tags: dict[int, tuple[str, ...]] = field(default_factory=dict)
    missing: dict[ManifestName, frozenset[PackId]] = field(default_factory=dict)
    blocked: str = ""

    def problem_of(self, name: ManifestName) -> str:
        """Say why a checkpoint is not whole; empty where it is."""
        gone = self.missing.get(name)
        return "" if not gone else f"pack {min(gone).hex()} is missing"


@dataclass(frozen=True, slots=True)
class Survey:
    """A whole store, as it was found.

    Attributes:
        now_ns: What the clock said.
        runs: All runs.
        packs: Packs in place.
        trash: What lay in the trash before manifests were looked at.
        published: Packs that manifests in place or in the trash name: no writer is about to publish them.
        trashed: What manifests in the trash name, by where they lie.
        drafts: Files in ``tmp`` that may be leftovers.
        stop: Why no pack may be moved or removed; empty where nothing speaks against it.
    """

    now_ns: int
    look: MarkResult
    runs: dict[str, RunFacts]
    packs: dict[PackId, FileInfo]
    trash: tuple[TrashFolder, ...]
    published: frozenset[PackId]
    trashed: dict[str, frozenset[PackId]]
    drafts: tuple[Draft, ...]
    stop: str = ""

    def strays(self) -> Iterator[TrashedManifest]:
        """Yield manifests in the trash that belong in place: not dropped, and nothing newer of their seq is there."""
        return strays_among(self.trash, self.look)

    def trashed_and_named(self) -> list[PackId]:
        """Return packs in the trash that a manifest names, and that are not in place."""
        found = {pack.pack_id for folder in self.trash for pack in folder.packs if self.look.is_named(pack.pack_id)}
        return sorted(found - self.packs.keys())


def strays_among(trash: Iterable[TrashFolder], look: MarkResult) -> Iterator[TrashedManifest]:
    """Yield manifests in the trash that must not be lost: their seq is not dropped, and shows nothing in place."""
    in_place = {(name.run, name.seq) for name in look.manifests}
    broken = {unreadable.run for unreadable in look.unreadable}
    highest: dict[tuple[str, int], TrashedManifest] = {}
    for folder in trash:
        for trashed in folder.manifests:
            name = trashed.name
            if name.seq in look.dropped.get(name.run, ()) or (name.run, name.seq) in in_place:
                continue
            if name.run in broken:
                # What cannot be read may be what supersedes it.
                continue
            found = highest.get((name.run, name.seq))
            if found is None or found.name.generation < name.generation:
                highest[name.run, name.seq] = trashed
    yield from highest.values()


def survey(repository: Repository, marker: Marker) -> Survey:
    """Look at the whole store; what cannot be read is told, not raised."""
    now_ns = repository.clock.now_ns()
    trash = tuple(repository.trash.contents())
    packs = dict(packs_in(repository.backend))
    look = marker.mark()
    refs = marker.numbers.refs
    present = {ref.pack_id for ref in refs if (info := packs.get(ref.pack_id)) and info.nbytes == ref.nbytes}
    gone = missing_packs(repository, [ref for ref in refs if ref.pack_id not in present])
    wrong = frozenset(number for number, ref in enumerate(refs) if ref.tier == LOCAL_TIER and ref.pack_id in gone)
    by_run: dict[str, list[MarkedManifest]] = {run: [] for run in look.dropped}
    for name in sorted(look.manifests):
        by_run[name.run].append(look.manifests[name])
    runs = {run: _run_facts(repository, marker, look, run, by_run[run], wrong) for run in by_run}
    trashed = named_in_trash(repository, marker, trash)
    published = look.named.union(*trashed.values())
    for name in look.foreign:
        _log.warning(
            "%s belongs to another store; it and its packs are left alone", repository.backend.location_of(name.path)
        )
    missing = missing_in(repository, look)
    for run, sentence in missing.items():
        runs[run] = replace(runs[run], blocked=runs[run].blocked or sentence)
    stop = next(iter(missing.values()), "")
    if look.unreadable:
        first = look.unreadable[0]
        stop = f"{repository.backend.location_of(first.path)} cannot be read and may name any pack: {first.problem}"
    return Survey(now_ns, look, runs, packs, trash, published, trashed, tuple(_drafts(repository)), stop)


def missing_in(repository: Repository, look: MarkResult) -> dict[str, str]:
    """Return, for each run that lacks manifests which its marks say were published, a sentence that names them."""
    found = {}
    for run, published in sorted(look.published.items()):
        seen = {name.seq for name in (*look.manifests, *look.foreign) if name.run == run}
        # Whatever seems to be missing is looked for once more: it may have been published or dropped since.
        if published - look.dropped[run] - seen and (missing := repository.manifests_of(run).listing().missing):
            found[run] = (
                f"{missing_sentence(run, missing)}, so what they need is not known (`ckstore repair --from COPY` "
                "may bring them back; `ckstore gc --accept-missing` goes on without them)"
            )
    return found


def _run_facts(
    repository: Repository,
    marker: Marker,
    look: MarkResult,
    run: str,
    manifests: Iterable[MarkedManifest],
    wrong: frozenset[int],
) -> RunFacts:
    """Sort the manifests of a run, by seq and generation, and find out what blocks it."""
    dropped = look.dropped[run]
    manifests = list(manifests)
    alive = [marked for marked in manifests if marked.name.seq not in dropped]
    highest = {marked.name.seq: marked for marked in alive}
    top = {marked.name for marked in highest.values()}
    missing = {}
    for marked in highest.values():
        gone = wrong.intersection(marked.packs) if wrong else ()
        if gone:
            missing[marked.name] = frozenset(marker.numbers.refs[number].pack_id for number in gone)
    blocked = next((f"{seen.path} cannot be read: {seen.problem}" for seen in look.unreadable if seen.run == run), "")
    tags: dict[int, list[str]] = {}
    try:
        for tag, record in Tags(repository.backend, run, repository.clock).all(is_strict=True).items():
            tags.setdefault(record.seq, []).append(tag)
    except (CorruptError, UnsupportedError, BackendError) as error:
        blocked = blocked or f"a tag cannot be read and may mean any checkpoint: {error}"
    facts = RunFacts(
        run=run,
        highest=tuple(highest.values()),
        lower=tuple(marked for marked in alive if marked.name not in top),
        marked=tuple(marked for marked in manifests if marked.name.seq in dropped),
        tags={seq: tuple(sorted(names)) for seq, names in tags.items()},
        missing=missing,
        blocked=blocked,
    )
    if missing and not blocked:
        first = min(missing)
        return replace(facts, blocked=f"seq {first.seq}: {facts.problem_of(first)}")
    return facts


def named_in_trash(
    repository: Repository, marker: Marker, trash: Iterable[TrashFolder]
) -> dict[str, frozenset[PackId]]:
    """Return the packs that manifests in the trash name; those that cannot be read say nothing."""
    wanted = [(trashed.name, trashed.path) for folder in trash for trashed in folder.manifests]
    named = {}
    for (_, path), found in zip(wanted, marker.read_each(wanted), strict=True):
        if not isinstance(found, Exception):
            named[path] = frozenset(ref.pack_id for ref in marker.packs_of(found[0]))
    return named


def _drafts(repository: Repository) -> Iterator[Draft]:
    for file in repository.backend.list_names(paths.TMP_FOLDER):
        path = f"{paths.TMP_FOLDER}/{file}"
        info = repository.backend.stat(path) if paths.parse_draft_file(file) else None
        if info is not None:
            yield Draft(path, info.nbytes, info.modified_ns)
