"""Check every byte of a pack that is copied between places, and report checkpoints that could not be copied.

Other programs can change files in a bucket. Without this check, a pack that was changed there would be restored from
the local copy ever after.

Invariants:
- Nothing is changed here. Damage is raised, and the caller deletes the draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckstore.config import MIB, Policy
from ckstore.errors import CorruptError, MissingChunkError, UnreachableError
from ckstore.format import paths
from ckstore.format.manifest import Manifest, PackRef
from ckstore.format.paths import ManifestName
from ckstore.io.backend import Backend, ReadFile
from ckstore.ops.verify_packs import Audit, PackAudit
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.damage import Report, Uses
from ckstore.store.repository import Repository

# Several packs are copied concurrently, and one thread per pack computes checksums as fast as a network delivers.
_POLICY = Policy(threads=1, memory_nbytes_max=64 * MIB)


class IncomingPackCheck:
    """Checks the packs of one checkpoint that come from other tiers, or go to a copy of the store.

    Args:
        repository: The store.
        name: Name of the manifest.
        manifest: The manifest of the checkpoint.
        copy: The place that the packs go to; None: the store itself.
    """

    def __init__(
        self, repository: Repository, name: ManifestName, manifest: Manifest, *, copy: Backend | None = None
    ) -> None:
        self._repository = repository
        self._copy = copy
        here = replace(manifest, packs=tuple(replace(pack, tier=LOCAL_TIER) for pack in manifest.packs))
        self._uses_there, self._uses_here = Uses(), Uses()
        self._uses_there.add(name, manifest)
        self._uses_here.add(name, here)

    def check(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        """Check every byte of a pack.

        Args:
            pack: The pack, as named by the manifest.
            file: The file to check, in the place that the pack goes to.
            is_new: True for a new copy, False for a pack that existed there already.

        Raises:
            CorruptError: The bytes are not those of the pack. It names the source of a new copy, or the existing pack.
        """
        repository, report = self._repository, Report("read")
        uses = self._uses_there if is_new else self._uses_here
        audit = Audit(repository, uses, report, _POLICY, lambda: None, is_partial=False)
        name = paths.pack_name(pack.pack_id)
        source = audit.home_of(pack.pack_id).location_of(name)
        where = source if self._copy is None or is_new else self._copy.location_of(name)
        try:
            PackAudit(audit, pack.pack_id).check(file)
        except CorruptError as error:
            raise self._damage_error(error.what, where, pack, is_new=is_new) from error
        if report.damage:
            first = report.damage[0]
            where = first.where.replace(source, where)
            raise self._damage_error(first.what, where, pack, is_new=is_new, tensors=first.tensors)

    def _damage_error(
        self, what: str, where: str, pack: PackRef, *, is_new: bool, tensors: tuple[str, ...] = ()
    ) -> CorruptError:
        if is_new and pack.tier != LOCAL_TIER:
            what = f"a pack in the tier {pack.tier!r} is not what was pushed there: {what}"
            todo = "restore it there from a copy, then try again; nothing was changed here"
        elif is_new:
            what = f"a pack here is damaged and was not copied: {what}"
            todo = "run `ckstore repair`, then try again"
        elif self._copy is not None:
            what = f"an existing pack in the copy is damaged: {what}"
            todo = "delete it there, then mirror again"
        else:
            what = f"an existing pack here is damaged: {what}"
            todo = "run `ckstore gc`, which deletes it if the tier has it, then pull again"
        return CorruptError(what, where=where, todo=todo, pack_id=pack.pack_id.hex(), tensors=tensors)


_NAMED_MAX = 10


def partial_copy_error(
    what_was_not: str, damaged: Mapping[ManifestName, CorruptError | UnreachableError], report: object
) -> CorruptError | UnreachableError:
    """Return one error that names every failed checkpoint and describes the failure of the first one.

    Args:
        what_was_not: What did not happen to them: ``"pulled"``.
        damaged: The failed checkpoints and their errors.
        report: The whole result, stored as an attribute of the error.
    """
    names = sorted(damaged, reverse=True)
    first = damaged[names[0]]
    labels = [f"seq {name.seq} (step {name.step}) of run {name.run}" for name in names]
    rest = f" and {len(labels) - _NAMED_MAX} more" if len(labels) > _NAMED_MAX else ""
    facts = {**first.facts, "checkpoints": tuple(labels), "report": report}
    what = f"not {what_was_not}: {', '.join(labels[:_NAMED_MAX])}{rest}; of the first, {first.what}"
    # Use a special class only if it fits all of them, else CorruptError.
    kinds = (UnreachableError, MissingChunkError)
    kind = next((k for k in kinds if all(isinstance(error, k) for error in damaged.values())), CorruptError)
    facts = {name: value for name, value in facts.items() if name != "is_transient" or kind is UnreachableError}
    return kind(what, where=first.where, todo=first.todo, **facts)  # type: ignore[arg-type]
