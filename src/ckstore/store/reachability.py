"""Which packs manifests name: all manifests in place, of every run and generation, quarantined ones too.

Each look lists everything anew, but reads again only what may have changed: a manifest of generation 0 never does,
since its seq was claimed; a higher one may have been withdrawn and published by another replacer under the same name.

Invariants:
- What was listed in any of two listings in a row counts: one may show neither of two names of which one is made and
  the other moved meanwhile.
- A manifest that cannot be read is told; whoever collects packs must stop, since it may name anything.
- One that is whole and of another store, whose writer did not see that the folder had been exchanged, is no checkpoint
  here; the packs that it names are known, and stay.
- More may be taken for named than is; never less.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckstore.errors import BackendError, CapacityError, CorruptError, UnsupportedError
from ckstore.format import paths
from ckstore.format.header import ManifestHeader
from ckstore.format.location import PackRef, PackTable, decode_pack_row, decode_pack_table
from ckstore.format.paths import ManifestName
from ckstore.hashing import DIGEST_NBYTES, PackId
from ckstore.io.backend import Distant, map_concurrent
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.listing import manifests_in, marks_in
from ckstore.store.repository import Repository

UNREADABLE = (CorruptError, UnsupportedError, BackendError, CapacityError)
"""What makes a manifest one that may name anything."""

_LISTINGS_MAX = 1000
"""Listings of one run until nothing vanishes between a listing and the reading of what it shows."""


class PackNumbers:
    """Numbers the packs that manifests name, so that thousands of manifests that share them stay small."""

    def __init__(self) -> None:
        self.refs: list[PackRef] = []
        self._numbers: dict[tuple[bytes, str], int] = {}

    def numbers_of(self, table: PackTable, where: str) -> array[int]:
        """Return the numbers of the packs that a manifest names, in its order."""
        tiers, numbers = ",".join(table.tiers), self._numbers
        found = array("L")
        for row in table.rows():
            number = numbers.get((row, tiers))
            if number is None:
                self.refs.append(decode_pack_row(row, table.tiers, where=where))
                number = numbers[row, tiers] = len(self.refs) - 1
            found.append(number)
        return found


@dataclass(frozen=True, slots=True)
class MarkedManifest:
    """A manifest that was read: its header, the numbers of the packs that it names, and its own digest and size."""

    name: ManifestName
    header: ManifestHeader
    packs: array[int]
    digest: bytes
    nbytes: int
    frame_count: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A manifest that cannot be read, and why."""

    run: str
    path: str
    problem: str


@dataclass(frozen=True, slots=True)
class MarkResult:
    """What one look at all manifests showed.

    Attributes:
        manifests: Every manifest in place, by name.
        unreadable: Those that may name anything.
        dropped: For each run with manifests or marks, the seqs that carry a drop mark.
        quarantined: Contents of quarantined manifests; what they name, so far as it can be read, stays.
        named: Ids of local packs that manifests in place name.
        foreign: Manifests in place that are whole and of another store.
        published: For each run that has some, the seqs with a mark that they were published.
    """

    manifests: dict[ManifestName, MarkedManifest]
    unreadable: tuple[Unreadable, ...]
    dropped: dict[str, frozenset[int]]
    quarantined: tuple[bytes, ...]
    named: frozenset[PackId]
    foreign: tuple[ManifestName, ...] = ()
    published: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def is_named(self, pack_id: PackId) -> bool:
        """Whether a manifest names a pack; of a quarantined one, whose tables may be damaged, any bytes like it do."""
        return pack_id in self.named or any(bytes(pack_id) in content for content in self.quarantined)


class _ForeignError(CorruptError):
    """A manifest that is whole, and of another store; ``packs`` are those that it names."""


@dataclass(slots=True)
class _Seen:
    manifests: dict[ManifestName, MarkedManifest] = field(default_factory=dict)
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    foreign: dict[ManifestName, frozenset[PackId]] = field(default_factory=dict)


class Marker:
    """Looks at all manifests of a store, again and again."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._cache: dict[ManifestName, MarkedManifest] = {}
        self.numbers = PackNumbers()

    def mark(self) -> MarkResult:
        """List and read everything that names packs now.

        Raises:
            ConflictError: Another store has taken this one's place.
            UnreachableError: The store is not there any more.
        """
        self._repository.require_same_store()
        seen = _Seen()
        runs = self._look_far(seen) if isinstance(self._repository.backend, Distant) else self._look_here(seen)
        self._cache = dict(seen.manifests)
        # Also of runs of which no manifest is in place any more: what of them lies in the trash is not to come back.
        marks, published = marks_in(self._repository.backend)
        dropped = dict.fromkeys((*runs, *published), frozenset[int]()) | marks
        refs = self.numbers.refs
        used = {number for marked in seen.manifests.values() for number in marked.packs}
        named = frozenset(refs[number].pack_id for number in used if refs[number].tier == LOCAL_TIER)
        named = named.union(*seen.foreign.values())
        quarantined = tuple(self._quarantined(seen))
        unreadable, foreign = tuple(seen.unreadable.values()), tuple(sorted(seen.foreign))
        return MarkResult(seen.manifests, unreadable, dropped, quarantined, named, foreign, published)

    def packs_of(self, marked: MarkedManifest) -> Iterator[PackRef]:
        """Yield the packs that a manifest names."""
        return (self.numbers.refs[number] for number in marked.packs)

    def read(self, name: ManifestName, path: str) -> tuple[MarkedManifest, PackTable]:
        """Read a manifest wherever it lies: in place, or in the trash.

        Raises:
            FileNotFoundError: It is not there any more.
            CorruptError: It is damaged.
            UnsupportedError: A newer ckstore wrote it.
        """
        backend, limits = self._repository.backend, self._repository.limits
        where = backend.location_of(path)
        content = backend.read_bytes(path, nbytes_max=limits.manifest_nbytes_max)
        return self.decoded(name, content, where)

    def read_each(
        self, wanted: Iterable[tuple[ManifestName, str]]
    ) -> Iterator[tuple[MarkedManifest, PackTable] | Exception]:
        """Yield for each name and path what ``read`` returns or raises; far away, many are read at the same time."""

        def content_of(each: tuple[ManifestName, str]) -> tuple[ManifestName, str, bytes | Exception]:
            name, path = each
            try:
                limit = self._repository.limits.manifest_nbytes_max
                return name, path, self._repository.backend.read_bytes(path, nbytes_max=limit)
            except (FileNotFoundError, *UNREADABLE) as error:
                return name, path, error

        # Numbers are given by one thread, whoever reads.
        for name, path, content in map_concurrent(self._repository.backend, content_of, wanted):
            if isinstance(content, Exception):
                yield content
                continue
            try:
                yield self.decoded(name, content, self._repository.backend.location_of(path))
            except UNREADABLE as error:
                yield error

    def decoded(self, name: ManifestName, content: bytes, where: str) -> tuple[MarkedManifest, PackTable]:
        """Return what ``read`` does of bytes that were read already."""
        table = decode_pack_table(content, limits=self._repository.limits, expect=name, where=where)
        if table.header.store_id != self._repository.store_id:
            rows = table.rows()
            packs = frozenset(decode_pack_row(row, table.tiers, where=where).pack_id for row in rows)
            raise _ForeignError("the manifest belongs to another store", where=where, packs=packs)
        numbers = self.numbers.numbers_of(table, where)
        return MarkedManifest(name, table.header, numbers, table.digest, len(content), table.frame_count), table

    def _look_here(self, seen: _Seen) -> list[str]:
        """Look at each run; return their names."""
        repository = self._repository
        runs = sorted({*repository.runs(), *repository.runs()})
        for run in runs:
            self._look_at_run(run, seen)
        # A run that was begun meanwhile is one more; its packs are young, and its writer looks for them.
        for run in sorted(set(repository.runs()) - set(runs)):
            runs.append(run)
            self._look_at_run(run, seen)
        return runs

    def _look_far(self, seen: _Seen) -> list[str]:
        """Look at all runs at once, however many there are, and again at those that change; return their names."""
        backend = self._repository.backend
        names = manifests_in(backend) | manifests_in(backend)
        again = {name.run for name in self._read_those(names, seen)}
        if not names:
            # None in all of the store is believed only if another kind of request says so, too.
            again = set(self._repository.runs())
        for run in sorted(again):
            self._look_at_run(run, seen)
        return sorted({name.run for name in names} | again)

    def _look_at_run(self, run: str, seen: _Seen) -> None:
        for _ in range(_LISTINGS_MAX):
            if not self._read_those(self._names_in_place(run) | self._names_in_place(run), seen):
                return
        raise CorruptError(
            f"manifests of run {run!r} vanish again and again while they are read",
            where=self._repository.backend.location_of(paths.manifests_folder(run)),
            todo="find out who moves them, then collect again",
        )

    def _read_those(self, names: set[ManifestName], seen: _Seen) -> list[ManifestName]:
        """Read what was not read yet, or may have changed; return what is not there any more."""
        wanted = [name for name in sorted(names) if not self._is_marked(name, seen)]
        contents = map_concurrent(self._repository.backend, self._content_of, wanted)
        return [name for name, content in zip(wanted, contents, strict=True) if not self._mark(name, content, seen)]

    def _names_in_place(self, run: str) -> set[ManifestName]:
        files = self._repository.backend.list_names(paths.manifests_folder(run))
        return {name for file in files if (name := paths.parse_manifest_file(run, file)) is not None}

    def _is_marked(self, name: ManifestName, seen: _Seen) -> bool:
        """Whether a manifest need not be read again: of a higher generation, other bytes may have taken the name."""
        if name.generation:
            return False
        cached = self._cache.get(name)
        if cached is not None:
            seen.manifests[name] = cached
        return name in seen.manifests

    def _content_of(self, name: ManifestName) -> bytes | Exception:
        try:
            return self._repository.backend.read_bytes(
                name.path, nbytes_max=self._repository.limits.manifest_nbytes_max
            )
        except (FileNotFoundError, *UNREADABLE) as error:
            return error

    def _mark(self, name: ManifestName, content: bytes | Exception, seen: _Seen) -> bool:
        """Add a manifest to what was seen; return False when it is not there any more."""
        cached = self._cache.get(name)
        try:
            if isinstance(content, Exception):
                raise content
            if cached is None or content[-DIGEST_NBYTES:] != cached.digest or len(content) != cached.nbytes:
                cached, _ = self.decoded(name, content, self._repository.backend.location_of(name.path))
        except FileNotFoundError:
            return False
        except _ForeignError as error:
            seen.foreign[name] = error.packs
            return True
        except UNREADABLE as error:
            seen.unreadable[name.path] = Unreadable(name.run, name.path, str(error))
            return True
        seen.manifests[name] = cached
        return True

    def _quarantined(self, seen: _Seen) -> Iterator[bytes]:
        backend, limits = self._repository.backend, self._repository.limits
        for run in backend.list_names(f"{paths.QUARANTINE_FOLDER}/manifests"):
            folder = f"{paths.QUARANTINE_FOLDER}/manifests/{run}"
            for file in backend.list_names(folder):
                try:
                    yield backend.read_bytes(f"{folder}/{file}", nbytes_max=limits.manifest_nbytes_max)
                except FileNotFoundError:
                    continue
                except UNREADABLE as error:
                    seen.unreadable[f"{folder}/{file}"] = Unreadable(run, f"{folder}/{file}", str(error))


def missing_packs(repository: Repository, refs: Iterable[PackRef]) -> set[PackId]:
    """Return the local packs that are neither in place with their size nor, under their name, in the trash."""
    return repository.packs_not_found({ref.pack_id: ref.nbytes for ref in refs if ref.tier == LOCAL_TIER})
