"""Read the whole store before a collection: manifests, packs, trash, tags and drafts. Nothing is changed.

Live bytes per pack are counted in a second pass over the manifests that stay. That pass keeps numbers only, so memory
grows with distinct frames, not with manifests.

Invariants:
- The trash is listed before manifests are read. Exactly the trashed packs that those manifests name are rescued.
- A run is blocked if a manifest cannot be read, a pack is missing, or a tag is damaged. Nothing of a blocked run is
  deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ckstore.errors import BackendError, CorruptError, UnsupportedError
from ckstore.format import paths
from ckstore.format.frame import FRAME_ALIGN, FRAME_HEADER_NBYTES
from ckstore.format.location import FRAME_ROW, PackTable
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.paths import ManifestName
from ckstore.format.wire import BLOCK_NBYTES, align_up
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
        highest: The highest generation of each seq that has no drop mark.
        lower: Superseded generations of seqs that have no drop mark.
        marked: Manifests still in place although their seq has a drop mark.
        tags: Tag names by seq.
        missing: For each manifest, the packs that exist nowhere.
        blocked: Why nothing of the run may be deleted; empty if it may.
    """

    run: str
    highest: tuple[MarkedManifest, ...]
    lower: tuple[MarkedManifest, ...]
    marked: tuple[MarkedManifest, ...]
    tags: dict[int, tuple[str, ...]] = field(default_factory=dict)
    missing: dict[ManifestName, frozenset[PackId]] = field(default_factory=dict)
    blocked: str = ""

    def problem_of(self, name: ManifestName) -> str:
        """Return why a checkpoint is incomplete; empty if it is complete."""
        gone = self.missing.get(name)
        return "" if not gone else f"pack {min(gone).hex()} is missing"


@dataclass(frozen=True, slots=True)
class Survey:
    """A whole store, as the survey found it.

    Attributes:
        now_ns: The time of the survey.
        marks: What all manifests name.
        runs: Every run by name.
        packs: Packs in place.
        trash: The trash, listed before manifests were read.
        published: Packs named by manifests in place or in the trash. No writer is about to publish them.
        trashed: For the path of each manifest in the trash, the packs that it names.
        drafts: Files in ``tmp`` that may be leftovers.
        stop: Why no pack may be moved or removed; empty if packs may be.
    """

    now_ns: int
    marks: MarkResult
    runs: dict[str, RunFacts]
    packs: dict[PackId, FileInfo]
    trash: tuple[TrashFolder, ...]
    published: frozenset[PackId]
    trashed: dict[str, frozenset[PackId]]
    drafts: tuple[Draft, ...]
    stop: str = ""

    def strays(self) -> Iterator[TrashedManifest]:
        """Yield manifests in the trash that belong in place: not deleted, and with no generation in place."""
        return strays_among(self.trash, self.marks)

    def trashed_and_named(self) -> list[PackId]:
        """Return packs that are in the trash and not in place, although a manifest names them."""
        found = {pack.pack_id for folder in self.trash for pack in folder.packs if self.marks.is_named(pack.pack_id)}
        return sorted(found - self.packs.keys())


def strays_among(trash: Iterable[TrashFolder], marks: MarkResult) -> Iterator[TrashedManifest]:
    """Yield the highest trashed manifest of each seq that has no drop mark and no manifest in place."""
    in_place = {(name.run, name.seq) for name in marks.manifests}
    broken = {unreadable.run for unreadable in marks.unreadable}
    highest: dict[tuple[str, int], TrashedManifest] = {}
    for folder in trash:
        for trashed in folder.manifests:
            name = trashed.name
            if name.seq in marks.dropped.get(name.run, ()) or (name.run, name.seq) in in_place:
                continue
            if name.run in broken:
                # An unreadable manifest of this run may be the one that supersedes it.
                continue
            found = highest.get((name.run, name.seq))
            if found is None or found.name.generation < name.generation:
                highest[name.run, name.seq] = trashed
    yield from highest.values()


def survey(repository: Repository, marker: Marker) -> Survey:
    """Read the whole store. Files that cannot be read are recorded, not raised."""
    now_ns = repository.clock.now_ns()
    trash = tuple(repository.trash.contents())
    packs = dict(packs_in(repository.backend))
    marks = marker.mark()
    refs = marker.numbers.refs
    present = {ref.pack_id for ref in refs if (info := packs.get(ref.pack_id)) and info.nbytes == ref.nbytes}
    gone = missing_packs(repository, [ref for ref in refs if ref.pack_id not in present])
    wrong = frozenset(number for number, ref in enumerate(refs) if ref.tier == LOCAL_TIER and ref.pack_id in gone)
    by_run: dict[str, list[MarkedManifest]] = {run: [] for run in marks.dropped}
    for name in sorted(marks.manifests):
        by_run[name.run].append(marks.manifests[name])
    runs = {run: _run_facts(repository, marker, marks, run, by_run[run], wrong) for run in by_run}
    trashed = named_in_trash(repository, marker, trash)
    published = marks.named.union(*trashed.values())
    for name in marks.foreign:
        _log.warning(
            "%s belongs to another store; it and its packs are not touched", repository.backend.location_of(name.path)
        )
    missing = missing_in(repository, marks)
    for run, sentence in missing.items():
        runs[run] = replace(runs[run], blocked=runs[run].blocked or sentence)
    stop = next(iter(missing.values()), "")
    if marks.unreadable:
        first = marks.unreadable[0]
        stop = f"{repository.backend.location_of(first.path)} cannot be read and may name any pack: {first.problem}"
    return Survey(now_ns, marks, runs, packs, trash, published, trashed, tuple(_drafts(repository)), stop)


def missing_in(repository: Repository, marks: MarkResult) -> dict[str, str]:
    """Return, for each run that lacks published manifests, a sentence that names them."""
    found = {}
    for run, published in sorted(marks.published.items()):
        seen = {name.seq for name in (*marks.manifests, *marks.foreign) if name.run == run}
        # List the run again: the manifest may have been published or deleted since.
        if published - marks.dropped[run] - seen and (missing := repository.manifests_of(run).listing().missing):
            found[run] = (
                f"{missing_sentence(run, missing)}, so the packs that they need are unknown (`ckstore repair "
                "--from COPY` may restore them; `ckstore gc --accept-missing` gives them up)"
            )
    return found


def _run_facts(
    repository: Repository,
    marker: Marker,
    marks: MarkResult,
    run: str,
    manifests: Iterable[MarkedManifest],
    wrong: frozenset[int],
) -> RunFacts:
    """Sort the manifests of a run by seq and generation, and determine whether the run is blocked."""
    dropped = marks.dropped[run]
    manifests = list(manifests)
    alive = [marked for marked in manifests if marked.name.seq not in dropped]
    highest = {marked.name.seq: marked for marked in alive}
    top = {marked.name for marked in highest.values()}
    missing = {}
    for marked in highest.values():
        gone = wrong.intersection(marked.packs) if wrong else ()
        if gone:
            missing[marked.name] = frozenset(marker.numbers.refs[number].pack_id for number in gone)
    blocked = next((f"{seen.path} cannot be read: {seen.problem}" for seen in marks.unreadable if seen.run == run), "")
    tags: dict[int, list[str]] = {}
    try:
        for tag, record in Tags(repository.backend, run, repository.clock).all(is_strict=True).items():
            tags.setdefault(record.seq, []).append(tag)
    except (CorruptError, UnsupportedError, BackendError) as error:
        blocked = blocked or f"a tag cannot be read and may point to any checkpoint: {error}"
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
    """Return the packs that each readable manifest in the trash names."""
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


_OFFSET_BITS = 34
"""A key is ``pack number << 34 | offset / 64``. A pack of 64 GiB has 2^30 such offsets."""

_PENDING_FRAMES_MAX = 1 << 20
"""Number of frames collected before duplicates are removed."""

Keys = npt.NDArray[np.uint64]
Lengths = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PackUse:
    """How much of a pack is needed.

    Attributes:
        number: The pack, as numbered by ``PackNumbers``.
        frame_count: Number of frames that manifests need.
        live_nbytes: Bytes of these frames, with headers and padding.
    """

    number: int
    frame_count: int
    live_nbytes: int

    @property
    def packed_nbytes(self) -> int:
        """Size of a pack that contains only these frames."""
        directory = align_up(self.frame_count * DIRECTORY_ENTRY_NBYTES, BLOCK_NBYTES)
        return align_up(SUPERHEADER_NBYTES + self.live_nbytes, BLOCK_NBYTES) + directory + TAIL_NBYTES


class FrameCount:
    """Count each frame that manifests locate, once."""

    def __init__(self) -> None:
        self._keys: list[Keys] = []
        self._lengths: list[Lengths] = []
        self._pending_count = 0

    def add(self, marked: MarkedManifest, table: PackTable) -> None:
        """Add the frames of one manifest."""
        rows = np.frombuffer(table.frame_rows, dtype=np.dtype(list(FRAME_ROW)))
        if not len(rows) or int(rows["pack"].max()) >= len(marked.packs):
            # A full decode rejects this manifest. Its packs are named, which protects them.
            return
        numbers = np.array(marked.packs, dtype=np.uint64)[rows["pack"]]
        keys = (numbers << np.uint64(_OFFSET_BITS)) | (rows["offset"] // np.uint64(FRAME_ALIGN))
        self._keys.append(keys)
        self._lengths.append(rows["stored_nbytes"].astype(np.uint32))
        self._pending_count += len(keys)
        if self._pending_count > _PENDING_FRAMES_MAX:
            self._remove_duplicates()

    def uses(self) -> list[PackUse]:
        """Return what is needed of each pack."""
        keys, lengths = self._remove_duplicates()
        if not len(keys):
            return []
        extents = (lengths.astype(np.int64) + FRAME_HEADER_NBYTES + FRAME_ALIGN - 1) // FRAME_ALIGN * FRAME_ALIGN
        numbers, first = np.unique(keys >> np.uint64(_OFFSET_BITS), return_index=True)
        sums = np.add.reduceat(extents, first)
        counts = np.diff(np.append(first, len(keys)))
        return [
            PackUse(int(number), int(count), int(nbytes))
            for number, count, nbytes in zip(numbers, counts, sums, strict=True)
        ]

    def _remove_duplicates(self) -> tuple[Keys, Lengths]:
        if not self._keys:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        keys, first = np.unique(np.concatenate(self._keys), return_index=True)
        lengths = np.concatenate(self._lengths)[first]
        self._keys, self._lengths = [keys], [lengths]
        # Count from the remaining keys on. Otherwise every further manifest would sort all of them again.
        self._pending_count = 0
        return keys, lengths


def count_frames(marker: Marker, manifests: Iterable[MarkedManifest]) -> list[PackUse]:
    """Read manifests again and return what they need of each pack.

    Raises:
        FileNotFoundError: A manifest was moved meanwhile, so its needs are unknown.
        CorruptError: A manifest can no longer be read.
    """
    count = FrameCount()
    for found in marker.read_each((marked.name, marked.name.path) for marked in manifests):
        if isinstance(found, Exception):
            raise found
        count.add(*found)
    return count.uses()
