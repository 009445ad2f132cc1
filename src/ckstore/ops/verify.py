"""Verify a store: read what checkpoints need, and report damage. Nothing is changed.

Levels; each includes the ones before:
- ``quick``: whole manifests with their digests; size, superheader, tail and directory of every pack they name; every
  location against the directory; claims, tags, config.json, home.json and owner.json.
- ``read``: every stored byte with its checksum, bypassing the page cache if the file system allows it; padding.
- ``decode``: every frame decoded, and its BLAKE3 compared: finds everything that a restore would find. Frames that need
  a base are read a second time for it, each once, however many checkpoints use the base.

Packs in other tiers are read only on request. A pack that is both here and in a tier is read here.

A verify of the whole store also reads all journals (``verify_journals``), on request also those in tiers.

Files that can be lost without harm are not read: ``leases``, ``tmp``, ``trash``, ``reserve``, ``gc.lock``, the contents
of drop marks, and packs that no manifest names.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

from ckstore.concurrency import run_uninterrupted
from ckstore.config import Policy, is_name
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CorruptError,
    NotFoundError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from ckstore.format import paths
from ckstore.format.paths import ManifestName
from ckstore.format.records import RECORD_NBYTES_MAX, ConfigRecord, FileRecord, HomeRecord, OwnerRecord, decode_record
from ckstore.format.replay_form import replay_form_of
from ckstore.io.backend import Ageing
from ckstore.io.remote import is_bucket_address
from ckstore.ops.verify_journals import JournalAudit, journal_audits
from ckstore.ops.verify_packs import Audit, ChainAudit, PackAudit
from ckstore.store.damage import Damage, Report, Uses, label_of
from ckstore.store.journals import Journals
from ckstore.store.manifests import Manifests, missing_sentence
from ckstore.store.replay_bases import find_base
from ckstore.store.repository import Repository
from ckstore.store.tags import Tags, place_of_tagged

__all__ = ["LEVELS", "Damage", "Report", "verify"]


LEVELS = ("quick", "read", "decode")

_RECORDS: dict[str, type[FileRecord]] = {
    paths.CONFIG_FILE: ConfigRecord,
    paths.HOME_FILE: HomeRecord,
    paths.OWNER_FILE: OwnerRecord,
}
"""Optional records at the top of a store."""

_NAMES_DATED_MAX = 3

_COPIED_AFTER_NS = 10 * 10**9
"""A manifest gets its name within moments of the time that it records; a later name means that it was copied."""


def verify(
    repository: Repository,
    level: str,
    names: Iterable[tuple[str, ManifestName]] | None,
    *,
    policy: Policy,
    is_remote: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check the given manifests, or the whole store, and everything they need.

    Args:
        repository: The store.
        level: One of LEVELS.
        names: Run and name of each manifest; None: all runs.
        policy: Number of threads, and memory for them and for read buffers.
        is_remote: Also read packs and journals in other tiers.
        on_progress: Called after each read and each pack, with bytes done and the total.
    """
    if level not in LEVELS:
        raise UsageError(f"level must be one of {', '.join(LEVELS)}", where=f"level={level!r}")
    report = Report(level)
    repository.require_same_store()
    is_partial = names is not None
    if names is None:
        names = list(_all_names(repository, report))
        _check_records(repository, report)
    uses = _uses_of(repository, names, report, is_remote=is_remote)
    chains = ChainAudit(uses) if level == "decode" else None
    total = sum(next(iter(pack.refs.values())).nbytes for pack in uses.packs.values())
    total += chains.nbytes if chains is not None else 0
    journals = [] if is_partial else [*journal_audits(repository, report)]
    if is_remote and not is_partial:
        journals += _journals_in_tiers(repository, report)
    total += sum(journal.nbytes for journal in journals)

    def tell() -> None:
        if on_progress is not None:
            on_progress(report.bytes_read, total)

    audit = Audit(repository, uses, report, policy, tell, is_partial, is_remote)

    def audit_all() -> None:
        for pack_id in sorted(uses.packs):
            PackAudit(audit, pack_id).run()
            if audit.stop.error is not None:
                return
            tell()
        for journal in journals:
            journal.run(tell)
        if chains is not None:
            chains.run(audit)

    run_uninterrupted(audit_all, on_interrupt=audit.stop.note)
    if audit.stop.error is not None:
        raise audit.stop.error
    if report.files_torn:
        report.copied_ns = _copied_ns(repository)
    return report


def _uses_of(
    repository: Repository, names: Iterable[tuple[str, ManifestName]], report: Report, *, is_remote: bool
) -> Uses:
    """Check manifests, and return what they need of all reachable packs."""
    reach = TierReach(repository, is_remote=is_remote)
    uses = Uses(is_remote=is_remote, reaches=reach)
    for run, name in names:
        _check_manifest(repository.manifests_of(run), name, uses, report)
    report.packs_elsewhere = uses.elsewhere_count
    report.unreachable += reach.problems(uses)
    return uses


def _journals_in_tiers(repository: Repository, report: Report) -> Iterator[JournalAudit]:
    for tier in repository.tiers.addresses():
        # A tier without a checkpoint of this store need not be reachable; the others are reported.
        with contextlib.suppress(UnreachableError):
            yield from journal_audits(Repository(repository.tiers.open(tier), repository.record, "main"), report)


def _copied_ns(repository: Repository) -> int | None:
    """Return when the store was copied here; None if file times do not show that it was copied."""
    found: list[int] = []
    if not isinstance(repository.backend, Ageing):
        return None
    for run in repository.runs():
        manifests = repository.manifests_of(run)
        names = [name for name in manifests.listing().names if name.generation == 0]
        for name in names[:_NAMES_DATED_MAX]:
            try:
                written_ns, arrived_ns = manifests.header(name).time_ns, repository.backend.arrived_ns(name.path)
            except (CkstoreError, FileNotFoundError):
                continue
            if arrived_ns is None or arrived_ns - written_ns < _COPIED_AFTER_NS:
                return None
            found.append(arrived_ns)
    return min(found, default=None)


class TierReach:
    """Whether tiers can be reached, and why not. Each tier is asked once.

    Args:
        repository: The store.
        is_remote: Also connect to buckets; otherwise only check that ``config.json`` has their address.
    """

    def __init__(self, repository: Repository, *, is_remote: bool) -> None:
        self._repository = repository
        self._is_remote = is_remote
        self._found: dict[str, CkstoreError | None] = {}

    def __call__(self, tier: str) -> bool:
        """Return whether a tier can be reached."""
        if tier not in self._found:
            self._found[tier] = self._problem_of(tier)
        return self._found[tier] is None

    def _problem_of(self, tier: str) -> CkstoreError | None:
        tiers = self._repository.tiers
        try:
            # Opening a bucket needs its server. Without that, only its configuration is checked.
            if self._is_remote or not is_bucket_address(tiers.addresses().get(tier, "")):
                tiers.open(tier)
        except CkstoreError as error:
            return error
        return None

    def problems(self, uses: Uses) -> Iterator[Damage]:
        """Yield each unreachable tier, with the checkpoints that are in it."""
        for tier, problem in sorted(self._found.items()):
            if problem is not None:
                labels = tuple(label_of(uses.names[index]) for index in uses.in_tiers.get(tier, ()))
                yield Damage(problem.what, problem.where or self._repository.backend.root, labels)


def _all_names(repository: Repository, report: Report) -> Iterator[tuple[str, ManifestName]]:
    for run in repository.runs_with_claims():
        manifests = repository.manifests_of(run)
        listing = manifests.listing()
        if listing.missing:
            where = repository.backend.location_of(paths.manifests_folder(run))
            report.damage.append(Damage(missing_sentence(run, listing.missing), where))
        claims = {
            claim.seq
            for file in repository.backend.list_names(paths.claims_folder(run))
            if (claim := paths.parse_claim_file(file)) is not None and claim.kind == "claim"
        }
        for name in (*listing.names, *listing.lower):
            if name.seq in listing.dropped:
                continue
            if name.seq not in claims:
                where = repository.backend.location_of(paths.claim_name(run, name.seq))
                report.files_torn += 1
                report.damage.append(Damage("the claim of a published seq is missing", where, (label_of(name),)))
            yield run, name
        _check_tags(repository, run, {name.seq for name in listing.names}, report)


def _check_tags(repository: Repository, run: str, seqs: set[int], report: Report) -> None:
    tags = Tags(repository.backend, run, repository.clock)
    journals = Journals(repository.manifests_of(run), clock=repository.clock)
    read_journal = functools.cache(journals.read)
    for file in repository.backend.list_names(paths.tags_folder(run)):
        where = repository.backend.location_of(f"{paths.tags_folder(run)}/{file}")
        if not is_name(file):
            continue
        try:
            record = tags.get(file)
        except NotFoundError:
            # It was removed meanwhile.
            continue
        except (CorruptError, UnsupportedError, BackendError) as error:
            report.add(Damage(error.what, where), error)
            continue
        if record.seq not in seqs:
            report.damage.append(Damage(f"the tag points to seq {record.seq}, which is not in place", where))
        elif record.point is not None and read_journal().find(place_of_tagged(record.point)) is None:
            what = f"the tag is on the point of step {record.step}, which is not in the journal, or damaged"
            report.damage.append(Damage(what, where))


def _check_records(repository: Repository, report: Report) -> None:
    for file, kind in _RECORDS.items():
        try:
            decode_record(repository.backend.read_bytes(file, nbytes_max=RECORD_NBYTES_MAX), kind)
        except FileNotFoundError:
            continue
        except CkstoreError as error:
            report.add(Damage(error.what, repository.backend.location_of(file)), error)


def _check_manifest(manifests: Manifests, name: ManifestName, uses: Uses, report: Report) -> None:
    where = manifests.backend.location_of(manifests.path_of(name))
    try:
        manifest = manifests.load(name)
        form = replay_form_of(manifest, where)
    except FileNotFoundError:
        # It was deleted or replaced meanwhile.
        return
    except (CorruptError, UnsupportedError, BackendError) as error:
        report.add(Damage(error.what, where, (label_of(name),)), error)
        return
    report.checkpoint_count += 1
    uses.add(name, manifest)
    if form is not None and find_base(manifests, form.base) is None:
        what = f"step {form.base.step} (seq {form.base.seq}), from which a checkpoint in replay form begins, is missing"
        report.damage.append(Damage(what, where, (label_of(name),)))
