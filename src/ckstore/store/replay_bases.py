"""Which checkpoints are in replay form, and the bases that must stay for them (docs/FORMAT.md, section 15).

Only manifests of a generation above 0 can be in replay form, so a run without demotions costs one listing.

Invariants:
- A demotion to replay form publishes, and then checks the intents on its base. A process that drops or demotes a base
  declares its intent, and then asks here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckstore.errors import CorruptError, UnsupportedError, UsageError
from ckstore.format.header import ManifestHeader
from ckstore.format.paths import ManifestName
from ckstore.format.tree import is_in_replay_form
from ckstore.results import Info
from ckstore.store.manifests import Manifests
from ckstore.store.refs import header_or_none, headers_newest_first
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest
    from ckstore.format.replay_form import ReplayBase, ReplayForm

_log = logging.getLogger("ckstore")


def replay_form(manifests: Manifests, header: ManifestHeader) -> ReplayForm | None:
    """Return what a checkpoint in replay form says; None: it is stored whole, or was dropped or replaced meanwhile.

    Raises:
        CorruptError: Its manifest is damaged.
    """
    from ckstore.format.replay_form import replay_form_of

    if not header.may_be_in_replay_form:
        return None
    try:
        return replay_form_of(manifests.load(header.name))
    except FileNotFoundError:
        return None


def info_with_form(manifests: Manifests, header: ManifestHeader, info: Info) -> Info:
    """Return the facts about a checkpoint, for one in replay form with its form and with the size of its state."""
    try:
        form = replay_form(manifests, header)
    except (CorruptError, UnsupportedError) as error:
        _log.warning("seq %d (step %d): %s", header.seq, header.step, error)
        form = None
    if form is None:
        return info
    return replace(
        info,
        form=f"replay, from step {form.base.step}",
        bytes_state=sum(storage.nbytes for storage in form.storages),
        tensor_count=len(form.tensors),
    )


class ReplayEntries:
    """The checkpoints of a run that are in replay form, and their bases, at one moment."""

    def __init__(self, repository: Repository) -> None:
        manifests = repository.manifests
        self._bases: dict[ManifestName, int | None] = {}
        names = manifests.listing().names
        for name in names:
            form = _form_or_none(manifests, name) if name.generation else None
            if form is not None:
                base = find_base(manifests, form.base, names)
                self._bases[name] = None if base is None else base.seq

    @property
    def seqs(self) -> frozenset[int]:
        """Their seqs."""
        return frozenset(name.seq for name in self._bases)

    @property
    def bases(self) -> dict[int, int]:
        """The seq of the base of each, by seq, where it is in place."""
        return {name.seq: base for name, base in self._bases.items() if base is not None}

    def needed(self, leaving: Collection[int] = ()) -> dict[int, str]:
        """Return the seqs of the bases that must stay, and why, if those with the seqs in ``leaving`` are dropped."""
        return {
            base: f"step {name.step} (seq {name.seq}), which is in replay form, begins from it"
            for name, base in self._bases.items()
            if base is not None and name.seq not in leaving
        }


def _form_or_none(manifests: Manifests, name: ManifestName) -> ReplayForm | None:
    try:
        header = header_or_none(manifests, name)
        return None if header is None else replay_form(manifests, header)
    except (CorruptError, UnsupportedError) as error:
        # It cannot be restored. A collection deletes nothing of a run with a damaged manifest.
        _log.warning("seq %d (step %d): %s", name.seq, name.step, error)
        return None


def find_base(
    manifests: Manifests, base: ReplayBase, names: Sequence[ManifestName] | None = None
) -> ManifestName | None:
    """Return the checkpoint that is a base: this entry, or the newest exact one that was made from it; else None."""
    for name in manifests.listing().names if names is None else names:
        if name.seq == base.seq:
            header = _exact_header_or_none(manifests, name)
            if header is not None and header.checkpoint_id == base.checkpoint_id:
                return header.name
    for header in headers_newest_first(manifests):
        is_exact = header.fidelity == "exact" and not header.may_be_in_replay_form
        if is_exact and base.checkpoint_id in (header.checkpoint_id, header.origin_id):
            return header.name
    return None


def _exact_header_or_none(manifests: Manifests, name: ManifestName) -> ManifestHeader | None:
    try:
        return header_or_none(manifests, name)
    except (CorruptError, UnsupportedError):
        return None


def require_stored(manifest: Manifest, where: object, *, what: str = "restored") -> None:
    """Refuse a checkpoint in replay form, for work that needs its bytes.

    Raises:
        UsageError: It is in replay form.
    """
    from ckstore.format.replay_form import replay_form_of

    form = replay_form_of(manifest, where) if is_in_replay_form(manifest.tree) else None
    if form is not None:
        header = manifest.header
        raise UsageError(
            f"step {header.step} (seq {header.seq}) is in replay form, which has no bytes of tensors, so it cannot be "
            f"{what} without the code that trains it again from step {form.base.step}",
            where=where,
            todo=f"call restore({header.step}, replay=train_until), or use step {form.base.step}; until the trash is "
            "emptied, `ckstore undelete` brings its exact form back",
            base_step=form.base.step,
        )
