"""Checksums of what a guard protects: as it was when the call returned, in its copy, and when the guard is entered."""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.format.wire import xxh3_64
from ckstore.saver.arena import Slot
from ckstore.staging.stowage import Section
from ckstore.tensor import HostStorage

Place = tuple[int, int]
"""A storage, and an offset in it."""


class Checksums:
    """Those of one section, one (xxh3) for each row of its units.

    Args:
        section: What is copied.
        slot: Where to.
        storages: Where from; a storage in a device is read in the order of the thread that asks.
    """

    def __init__(self, section: Section, slot: Slot, storages: Sequence[HostStorage]) -> None:
        self._section = section
        self._slot = slot
        self._storages = storages
        self._noted: dict[int, list[int]] = {}
        self._changed: Place | None = None

    def note(self) -> None:
        """Note what the sources are now."""
        # What is given up meanwhile lets go of its sources.
        storages = self._storages
        for unit in range(self._section.unit_count) if storages else ():
            if unit not in self._noted:
                self._noted.setdefault(unit, self._of_sources(unit, storages))

    def check_copy(self, unit: int) -> None:
        """Compare the copy of a unit, which has been made, with what was noted."""
        rows = list(self._section.rows_of(unit))
        copied = [xxh3_64(self._slot.view(place, nbytes)) for _, _, place, nbytes in rows]
        # A guard on another thread may be faster than the note.
        noted = self._noted.setdefault(unit, copied)
        for row, one, other in zip(rows, noted, copied, strict=True):
            if one != other:
                self._changed = row[0], row[1]

    def changed(self, *, is_looking: bool = True) -> Place | None:
        """Return where bytes are not what was noted: in a copy that was compared, or in a source by now; None: none.

        Args:
            is_looking: Read the sources, unless they were let go of.
        """
        storages = self._storages if is_looking else ()
        for unit, noted in list(self._noted.items()) if storages else ():
            found = self._of_sources(unit, storages)
            for row, one, other in zip(self._section.rows_of(unit), noted, found, strict=True):
                if one != other:
                    return row[0], row[1]
        return self._changed

    def forget(self) -> None:
        """Let go of the sources: they may change from now on."""
        self._storages = ()

    def _of_sources(self, unit: int, storages: Sequence[HostStorage]) -> list[int]:
        return [
            xxh3_64(storages[storage].read(offset, offset + nbytes))
            for storage, offset, _, nbytes in self._section.rows_of(unit)
        ]
