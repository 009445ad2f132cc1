"""Collect a store that lies in a bucket: manifests go to the trash as elsewhere, packs are removed where they lie.

A bucket has no atomic rename, so a pack cannot be taken away from a writer and given back. Instead the collector
writes down what it is about to remove, then looks at all manifests: see ``doomed``. What manifests in the trash name
stays, so that what was dropped can be brought back as long as it lies there. A pack of which much is needed by nobody
is rewritten as elsewhere, and goes when the manifests that named it have left the trash.

Invariants:
- No pack is removed that a manifest in place, in the trash or in quarantine names in a look that began after the list
  of what goes was there.
- Nothing is collected where another store has pushed: its manifests are not here.
"""

from __future__ import annotations

from ckstore.errors import CorruptError
from ckstore.ids import PackId
from ckstore.store.doomed import remove_dead_lists, remove_packs
from ckstore.store.gc import Collector, GcDone, Tell
from ckstore.store.gc_marks import Marker
from ckstore.store.gc_plan import GcLimits, GcPlan
from ckstore.store.gc_survey import missing_in, named_in_trash
from ckstore.store.parts import Parts
from ckstore.store.tier_proof import unproven_packs


def collect_far(
    parts: Parts, marker: Marker, plan: GcPlan, limits: GcLimits, purpose: str, tell: Tell = lambda done, total: None
) -> GcDone:
    """Carry out a plan in a bucket; the arguments are those of ``gc.collect``.

    Raises:
        CorruptError: A tag became unreadable meanwhile.
        BackendError: The server does not answer. Whatever is raised, the next collection goes on from there.
    """
    remove_dead_lists(parts.backend, parts.clock)
    return _FarCollector(parts, marker, plan, limits, tell).run(purpose)


class _FarCollector(Collector):
    """Carries out one plan where nothing can be renamed."""

    def _free(self, planned: dict[PackId, int], *, is_proven: bool = True) -> None:
        if self._limits.frees_at_once and not self.done.stop:
            # Manifests before packs: what they name goes only when they have gone.
            self._purge(self._parts.trash.contents())
        if not is_proven and not self._limits.frees_at_once:
            # Manifests in the trash name these yet.
            return
        if planned and not is_proven and not self.done.stop:
            planned = self._proven(planned)
        if planned and not self.done.stop:
            removed = remove_packs(self._parts.backend, self._parts.clock, planned, lambda: self._named(planned))
            self.done.freed_files += len(removed.packs)
            self.done.freed_nbytes += sum(removed.packs.values())
            self.done.stop = removed.stop

    def _proven(self, planned: dict[PackId, int]) -> dict[PackId, int]:
        """Leave out what manifests say is in a tier, and was not seen there just now."""
        manifests = self._marker.look().manifests.values()
        found = unproven_packs(self._parts, self._marker, manifests, planned, self.done.waits)
        for unproven in found.values():
            self._keep(unproven)
        return {pack_id: nbytes for pack_id, nbytes in planned.items() if pack_id not in found}

    def _named(self, planned: dict[PackId, int]) -> set[PackId]:
        """Return what anything names: what is moved from its place to the trash meanwhile is seen in one of both."""
        before = self._parts.trash.contents()
        look = self._marker.look()
        if look.unreadable:
            first = look.unreadable[0]
            raise CorruptError(f"a manifest cannot be read and may name any pack: {first.problem}", where=first.path)
        for sentence in missing_in(self._parts, look).values():
            raise CorruptError(sentence, where=self._parts.backend.root)
        named = {pack_id for pack_id in planned if look.is_named(pack_id)}
        for trash in (before, self._parts.trash.contents()):
            named = named.union(*named_in_trash(self._parts, self._marker, trash).values())
        return named
