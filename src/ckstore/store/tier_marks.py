"""Which packs of a tier manifests name: those there, those here, in the trash here and in quarantine.

Invariants:
- A manifest that cannot be read, here or there, is told: it may name anything.
- What is moved from its place to the trash meanwhile is seen in one of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckstore.errors import BackendError, CorruptError
from ckstore.format.layout import ManifestName
from ckstore.format.location import decode_pack_row
from ckstore.format.pack_table import decode_pack_table
from ckstore.ids import PackId
from ckstore.io.backend import Backend
from ckstore.store.at_once import ask_each
from ckstore.store.gc_marks import Look, Marker
from ckstore.store.gc_survey import missing_in
from ckstore.store.inventory import packs_in
from ckstore.store.parts import Parts


@dataclass(frozen=True, slots=True)
class Named:
    """What manifests name, here and there, each pack by its id, wherever they say that it lies.

    Attributes:
        there: By each manifest there.
        look: The manifests in place here.
        here: By these.
        held: By those in the trash here; and what one in quarantine may name.
    """

    there: dict[ManifestName, frozenset[PackId]]
    look: Look
    here: frozenset[PackId]
    held: frozenset[PackId]

    @property
    def packs(self) -> frozenset[PackId]:
        """All of them."""
        return self.here.union(self.held, *self.there.values())


class TierMarker:
    """Looks at all manifests of a store and of a tier of it, again and again.

    Attributes:
        here: Looks at those of the store.
    """

    def __init__(self, parts: Parts, target: Backend) -> None:
        self._parts = parts
        self._target = target
        self._tables: dict[ManifestName, frozenset[PackId]] = {}
        self.here = Marker(parts)

    def seqs_here(self) -> set[tuple[str, int]]:
        """Return run and seq of every manifest in place here or in the trash, looked for there on both sides."""
        trashed = self._trashed()
        look = self.here.look()
        kept = {(name.run, name.seq) for name in look.manifests}
        return kept | {(name.run, name.seq) for name, _ in (*trashed, *self._trashed())}

    def named(self, there: Iterable[ManifestName]) -> Named:
        """Look at everything that names packs now.

        Args:
            there: The manifests in the tier that count.

        Raises:
            CkstoreError: One cannot be read.
        """
        there = list(there)
        unread = [name for name in there if name not in self._tables]
        self._tables |= zip(unread, ask_each(self._target, self._table_there, unread), strict=True)
        trashed = self._trashed()
        look = self.here.look()
        if look.unreadable:
            raise BackendError("a manifest cannot be read", where=look.unreadable[0].path)
        for sentence in missing_in(self._parts, look).values():
            raise CorruptError(sentence, where=self._parts.backend.root)
        held = set[PackId]()
        packs = [pack_id for pack_id, _ in packs_in(self._target)] if look.quarantined else []
        for content in look.quarantined:
            # Any bytes of it may be a name.
            held |= {pack_id for pack_id in packs if bytes(pack_id) in content}
        for found in self.here.read_each({*trashed, *self._trashed()}):
            if isinstance(found, FileNotFoundError):
                continue
            if isinstance(found, Exception):
                raise found
            held |= {ref.pack_id for ref in self.here.packs_of(found[0])}
        refs = self.here.numbers.refs
        here = frozenset(refs[number].pack_id for marked in look.manifests.values() for number in marked.packs)
        return Named({name: self._tables[name] for name in there}, look, here, frozenset(held))

    def _trashed(self) -> list[tuple[ManifestName, str]]:
        folders = self._parts.trash.contents()
        return [(trashed.name, trashed.path) for folder in folders for trashed in folder.manifests]

    def _table_there(self, name: ManifestName) -> frozenset[PackId]:
        where = self._target.location_of(name.path)
        try:
            content = self._target.read_bytes(name.path, nbytes_max=self._parts.limits.manifest_nbytes_max)
        except FileNotFoundError:
            return frozenset()
        table = decode_pack_table(content, limits=self._parts.limits, expect=name, where=where)
        return frozenset(decode_pack_row(row, table.tiers, where=where).pack_id for row in table.rows())
