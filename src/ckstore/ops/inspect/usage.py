"""Where the bytes of a store are (``ckstore du``): by kind of file, run, checkpoint and tier.

Only names, sizes and manifests are read. A pack counts once. It belongs to a checkpoint if a restore of that checkpoint
reads from it. What is not counted: tags, claims and other files of less than a block, and quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckstore.config import is_name
from ckstore.display import repr_of_summary
from ckstore.format import paths
from ckstore.format.location import PackRef
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.ops.gc.survey import RunFacts, Survey, survey
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.journals import Journals
from ckstore.store.reachability import Marker
from ckstore.store.repository import Repository


@dataclass(frozen=True, slots=True)
class KindUsage:
    """Files of one kind in the store itself.

    Attributes:
        kind: ``packs of one checkpoint``, ``packs of several checkpoints``, ``packs no checkpoint needs``,
            ``manifests``, ``trash`` or ``unfinished files``; ``journals`` if a run has one.
    """

    kind: str
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RunUsage:
    """The packs of one run.

    Attributes:
        run: Its name.
        count: Its checkpoints.
        nbytes: Bytes of the packs here that its checkpoints need.
        own_nbytes: Those that no other run needs.
        elsewhere_nbytes: Bytes of the packs in other tiers that its checkpoints need.
    """

    run: str
    count: int
    nbytes: int
    own_nbytes: int
    elsewhere_nbytes: int


@dataclass(frozen=True, slots=True)
class CheckpointUsage:
    """The packs of one checkpoint.

    Attributes:
        nbytes: Bytes of the packs here that it needs.
        own_nbytes: Those that no other checkpoint needs: what deleting it would free.
        tags: Its tags; a tagged checkpoint cannot be deleted.
    """

    run: str
    seq: int
    step: int
    nbytes: int
    own_nbytes: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Packs in another tier that checkpoints need."""

    tier: str
    address: str
    packs: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the bytes of a store are.

    Attributes:
        kinds: Files in the store itself, by kind.
        runs: Every run, by name.
        checkpoints: Every checkpoint, the largest ``own_nbytes`` first.
        tiers: Other tiers, by name.
        problem: Why some packs may be attributed wrongly: a manifest that cannot be read; empty otherwise.
    """

    kinds: tuple[KindUsage, ...]
    runs: tuple[RunUsage, ...]
    checkpoints: tuple[CheckpointUsage, ...]
    tiers: tuple[TierUsage, ...]
    problem: str

    __repr__ = repr_of_summary

    @property
    def nbytes(self) -> int:
        """Bytes of all files in the store itself."""
        return sum(kind.nbytes for kind in self.kinds)


def usage_of(repository: Repository) -> Usage:
    """Return where the bytes of a store are; see ``Store.usage``."""
    marker = Marker(repository)
    found = survey(repository, marker)
    sizes = {pack_id: info.nbytes for pack_id, info in found.packs.items()}
    refs_of = {marked.name: [*marker.packs_of(marked)] for facts in found.runs.values() for marked in facts.highest}
    needs = {
        name: {ref.pack_id for ref in refs if ref.tier == LOCAL_TIER and ref.pack_id in sizes}
        for name, refs in refs_of.items()
    }
    users = Counter(pack_id for packs in needs.values() for pack_id in packs)
    tags = {run: facts.tags for run, facts in found.runs.items()}
    checkpoints = [
        CheckpointUsage(
            run=name.run,
            seq=name.seq,
            step=name.step,
            nbytes=sum(sizes[pack_id] for pack_id in packs),
            own_nbytes=sum(sizes[pack_id] for pack_id in packs if users[pack_id] == 1),
            tags=tags[name.run].get(name.seq, ()),
        )
        for name, packs in needs.items()
    ]
    checkpoints.sort(key=lambda each: (-each.own_nbytes, each.run, -each.seq))
    elsewhere = {
        name: {ref.pack_id: ref for ref in refs if ref.tier not in (LOCAL_TIER, LOST_TIER)}
        for name, refs in refs_of.items()
    }
    return Usage(
        kinds=(*_kinds(found, sizes, users), *journal_usage(repository)),
        runs=_runs(found.runs, needs, elsewhere, sizes),
        checkpoints=tuple(checkpoints),
        tiers=_tiers(elsewhere.values(), repository.tiers.addresses()),
        problem=found.stop,
    )


def _kinds(found: Survey, sizes: Mapping[PackId, int], users: Mapping[PackId, int]) -> tuple[KindUsage, ...]:
    def packs(kind: str, chosen: Iterable[PackId]) -> KindUsage:
        nbytes = [sizes[pack_id] for pack_id in chosen]
        return KindUsage(kind, len(nbytes), sum(nbytes))

    manifests = found.marks.manifests.values()
    trashed = sum(len(folder.packs) + len(folder.manifests) + len(folder.segments) for folder in found.trash)
    return (
        packs("packs of one checkpoint", (pack_id for pack_id in users if users[pack_id] == 1)),
        packs("packs of several checkpoints", (pack_id for pack_id in users if users[pack_id] > 1)),
        packs("packs no checkpoint needs", sizes.keys() - users.keys()),
        KindUsage("manifests", len(manifests), sum(marked.nbytes for marked in manifests)),
        KindUsage("trash", trashed, sum(folder.nbytes for folder in found.trash)),
        KindUsage("unfinished files", len(found.drafts), sum(draft.nbytes for draft in found.drafts)),
    )


def journal_usage(repository: Repository) -> Iterator[KindUsage]:
    """Yield the segments of all journals and their bytes; nothing if there are none."""
    runs = filter(is_name, repository.backend.list_names(paths.JOURNALS_FOLDER))
    names = [name for run in runs for name in Journals(repository.manifests_of(run)).names()]
    infos = [info for name in names if (info := repository.backend.stat(name.path)) is not None]
    if infos:
        yield KindUsage("journals", len(infos), sum(info.nbytes for info in infos))


def _runs(
    runs: Mapping[str, RunFacts],
    needs: Mapping[ManifestName, set[PackId]],
    elsewhere: Mapping[ManifestName, Mapping[PackId, PackRef]],
    sizes: Mapping[PackId, int],
) -> tuple[RunUsage, ...]:
    names = {run: [marked.name for marked in facts.highest] for run, facts in sorted(runs.items())}
    here = {run: {pack_id for name in of_run for pack_id in needs[name]} for run, of_run in names.items()}
    users = Counter(pack_id for packs in here.values() for pack_id in packs)
    there = {
        run: {pack_id: ref.nbytes for name in of_run for pack_id, ref in elsewhere[name].items()}
        for run, of_run in names.items()
    }
    return tuple(
        RunUsage(
            run=run,
            count=len(of_run),
            nbytes=sum(sizes[pack_id] for pack_id in here[run]),
            own_nbytes=sum(sizes[pack_id] for pack_id in here[run] if users[pack_id] == 1),
            elsewhere_nbytes=sum(there[run].values()),
        )
        for run, of_run in names.items()
    )


def _tiers(needed: Iterable[Mapping[PackId, PackRef]], addresses: Mapping[str, str]) -> tuple[TierUsage, ...]:
    packs: dict[str, dict[PackId, int]] = {name: {} for name in addresses}
    for refs in needed:
        for pack_id, ref in refs.items():
            packs.setdefault(ref.tier, {})[pack_id] = ref.nbytes
    return tuple(
        TierUsage(tier, addresses.get(tier, ""), len(sizes), sum(sizes.values()))
        for tier, sizes in sorted(packs.items())
    )
