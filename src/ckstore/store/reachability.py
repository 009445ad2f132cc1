"""The mark phase of gc: which packs do manifests name?

All manifests count: of every run and generation, and quarantined ones.

Each ``mark`` lists everything again, but reads only manifests that may have changed. One of generation 0 never changes,
because its seq was claimed. A higher one may have been withdrawn and published by another process under the same name.

Invariants:
- Everything found by either of two listings in a row counts: a single one may miss both names of a file that is renamed
  meanwhile.
- An unreadable manifest is reported. It may name any pack, so the collection of packs must stop.
- A complete manifest of another store is no checkpoint here. (Its writer did not notice that the folder was exchanged.)
  The packs that it names stay.
- Too many packs may count as named; never too few.
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
"""Errors that make a manifest unreadable, so that it may name any pack."""

_LISTINGS_MAX = 1000
"""Listings of one run, until nothing vanishes between the listing and the reading."""


class PackNumbers:
    """Numbers the packs that manifests name, so that thousands of manifests with shared packs use little memory."""

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
    """A manifest that was read: its header, the numbers of its packs, its digest and its size."""

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
    """The state of all manifests at one ``mark``.

    Attributes:
        manifests: Every manifest in place, by name.
        unreadable: Manifests that may name any pack.
        dropped: For each run with manifests or marks, the seqs with a drop mark.
        quarantined: Contents of quarantined manifests. Packs that they name stay.
        named: Ids of local packs that manifests in place name.
        foreign: Complete manifests in place that belong to another store.
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
        """Whether a manifest names a pack. In quarantined manifests, any bytes equal to its id count."""
        return pack_id in self.named or any(bytes(pack_id) in content for content in self.quarantined)


class _ForeignError(CorruptError):
    """A complete manifest of another store; ``packs`` are those that it names."""


@dataclass(slots=True)
class _Seen:
    manifests: dict[ManifestName, MarkedManifest] = field(default_factory=dict)
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    foreign: dict[ManifestName, frozenset[PackId]] = field(default_factory=dict)


class Marker:
    """Marks the packs that manifests name, any number of times."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._cache: dict[ManifestName, MarkedManifest] = {}
        self.numbers = PackNumbers()

    def mark(self) -> MarkResult:
        """List and read all manifests now.

        Raises:
            ConflictError: Another store is at this path now.
            UnreachableError: No store is at this path now.
        """
        self._repository.require_same_store()
        seen = _Seen()
        runs = self._mark_bucket(seen) if isinstance(self._repository.backend, Distant) else self._mark_folder(seen)
        self._cache = dict(seen.manifests)
        # Includes runs without a manifest in place: their manifests in the trash must not be brought back.
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
        """Read a manifest at any path: in place, or in the trash.

        Raises:
            FileNotFoundError: It is gone.
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
        """Yield for each name and path what ``read`` returns or raises. In a bucket, many are read concurrently."""

        def content_of(each: tuple[ManifestName, str]) -> tuple[ManifestName, str, bytes | Exception]:
            name, path = each
            try:
                limit = self._repository.limits.manifest_nbytes_max
                return name, path, self._repository.backend.read_bytes(path, nbytes_max=limit)
            except (FileNotFoundError, *UNREADABLE) as error:
                return name, path, error

        # Only this thread numbers packs; the reads may run on others.
        for name, path, content in map_concurrent(self._repository.backend, content_of, wanted):
            if isinstance(content, Exception):
                yield content
                continue
            try:
                yield self.decoded(name, content, self._repository.backend.location_of(path))
            except UNREADABLE as error:
                yield error

    def decoded(self, name: ManifestName, content: bytes, where: str) -> tuple[MarkedManifest, PackTable]:
        """Decode a manifest as ``read`` does, from its bytes."""
        table = decode_pack_table(content, limits=self._repository.limits, expect=name, where=where)
        if table.header.store_id != self._repository.store_id:
            rows = table.rows()
            packs = frozenset(decode_pack_row(row, table.tiers, where=where).pack_id for row in rows)
            raise _ForeignError("the manifest belongs to another store", where=where, packs=packs)
        numbers = self.numbers.numbers_of(table, where)
        return MarkedManifest(name, table.header, numbers, table.digest, len(content), table.frame_count), table

    def _mark_folder(self, seen: _Seen) -> list[str]:
        """Read the manifests of each run; return the names of the runs."""
        repository = self._repository
        runs = sorted({*repository.runs(), *repository.runs()})
        for run in runs:
            self._mark_run(run, seen)
        # A run that was begun meanwhile is read as well. Its packs are young, and its writer checks them.
        for run in sorted(set(repository.runs()) - set(runs)):
            runs.append(run)
            self._mark_run(run, seen)
        return runs

    def _mark_bucket(self, seen: _Seen) -> list[str]:
        """Read the manifests of all runs with one listing, then again those that changed; return their names."""
        backend = self._repository.backend
        names = manifests_in(backend) | manifests_in(backend)
        again = {name.run for name in self._read_changed(names, seen)}
        if not names:
            # An empty listing of the whole store is confirmed by another kind of request.
            again = set(self._repository.runs())
        for run in sorted(again):
            self._mark_run(run, seen)
        return sorted({name.run for name in names} | again)

    def _mark_run(self, run: str, seen: _Seen) -> None:
        for _ in range(_LISTINGS_MAX):
            if not self._read_changed(self._names_in_place(run) | self._names_in_place(run), seen):
                return
        raise CorruptError(
            f"manifests of run {run!r} keep vanishing while they are read",
            where=self._repository.backend.location_of(paths.manifests_folder(run)),
            todo="find out which process moves them, then run gc again",
        )

    def _read_changed(self, names: set[ManifestName], seen: _Seen) -> list[ManifestName]:
        """Read the manifests that are new or may have changed; return those that are gone."""
        wanted = [name for name in sorted(names) if not self._is_current(name, seen)]
        contents = map_concurrent(self._repository.backend, self._content_of, wanted)
        return [name for name, content in zip(wanted, contents, strict=True) if not self._add(name, content, seen)]

    def _names_in_place(self, run: str) -> set[ManifestName]:
        files = self._repository.backend.list_names(paths.manifests_folder(run))
        return {name for file in files if (name := paths.parse_manifest_file(run, file)) is not None}

    def _is_current(self, name: ManifestName, seen: _Seen) -> bool:
        """Whether a manifest need not be read again. One of a higher generation may have new bytes."""
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

    def _add(self, name: ManifestName, content: bytes | Exception, seen: _Seen) -> bool:
        """Add a manifest to the result; return False if it is gone."""
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
    """Return the local packs that are neither in place nor in the trash with their size."""
    return repository.packs_not_found({ref.pack_id: ref.nbytes for ref in refs if ref.tier == LOCAL_TIER})
