"""Protocols of collection with a step left out: what the stress test must find."""

from __future__ import annotations

import dataclasses

from ckstore.format import paths
from ckstore.ops.gc import collect
from ckstore.ops.gc.survey import Survey
from ckstore.store.repository import Repository
from ckstore.store.trash import Trash


def without_verify():
    """Acknowledge without looking whether all packs are still there."""
    Repository.rescue_local_packs = lambda self, packs: set()


class BlindMarker:
    """A marker that never sees what manifests name."""

    def __init__(self, marker):
        self._marker = marker

    def mark(self):
        return dataclasses.replace(self._marker.mark(), named=frozenset())

    def __getattr__(self, name):
        return getattr(self._marker, name)


def without_recheck():
    """Empty the trash without looking what manifests name by now."""
    whole = collect.purge
    collect.purge = lambda repository, marker, *rest: whole(repository, BlindMarker(marker), *rest)
    Survey.trashed_and_named = lambda self: []


def without_trash():
    """Unlink packs where they are."""

    def move_packs(self, pack_ids, gc_id):
        return [pack_id for pack_id in pack_ids if self.unlink(paths.pack_name(pack_id))]

    Trash.move_packs = move_packs


BROKEN = {"verify": without_verify, "recheck": without_recheck, "trash": without_trash}
