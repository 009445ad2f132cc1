"""Read what has arrived from another place, every byte of it, before it counts as a pack there.

A bucket has other masters, and a pack here stands for its bytes: one that was changed there would be restored from
ever after, however sound the bucket is by then.

Invariants:
- Nothing is changed here: what is not sound is told, and whoever copies it lets go of the draft.

Checkpoints that a copy could not take, because packs are altered or out of reach: all others go first.
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
from ckstore.ops.verify_packs import Audit, FrameCheck, PackAudit
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.damage import Report, Uses
from ckstore.store.repository import Repository

# Several packs arrive at once, and checksums keep up with a network on one thread.
_POLICY = Policy(threads=1, memory_nbytes_max=64 * MIB)


class IncomingPackCheck:
    """Checks the packs of one checkpoint that come from other tiers, or go to a copy of the store.

    Args:
        repository: The store.
        name: The checkpoint's manifest.
        manifest: What it says.
        copy: Where they go, if that is not the store itself.
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
            pack: The pack, as the manifest names it.
            file: What holds its bytes where they go.
            is_new: They are just being copied; else they lay there.

        Raises:
            CorruptError: They are not what the pack was made of; it names the pack where they came from, or the one
                that lay there already.
        """
        repository, report = self._repository, Report("read")
        uses = self._uses_there if is_new else self._uses_here
        audit = Audit(repository, uses, report, _never, 1, _POLICY, lambda: None, is_partial=False)
        name = paths.pack_name(pack.pack_id)
        source = audit.home_of(pack.pack_id).location_of(name)
        where = source if self._copy is None or is_new else self._copy.location_of(name)
        try:
            PackAudit(audit, pack.pack_id).check(file)
        except CorruptError as error:
            raise self._refused(error.what, where, pack, is_new=is_new) from error
        if report.damage:
            first = report.damage[0]
            where = first.where.replace(source, where)
            raise self._refused(first.what, where, pack, is_new=is_new, tensors=first.tensors)

    def _refused(
        self, what: str, where: str, pack: PackRef, *, is_new: bool, tensors: tuple[str, ...] = ()
    ) -> CorruptError:
        if is_new and pack.tier != LOCAL_TIER:
            what = f"a pack in the tier {pack.tier!r} is not what was pushed there: {what}"
            todo = "bring it back there from a copy, then try again; nothing here was changed"
        elif is_new:
            what = f"a pack here is damaged, and was not copied: {what}"
            todo = "`ckstore repair` may find its bytes elsewhere; then try again"
        elif self._copy is not None:
            what = f"a pack that lies in the copy already is damaged: {what}"
            todo = "remove it there, then mirror again"
        else:
            what = f"a pack that lies here already is damaged: {what}"
            todo = "`ckstore gc` frees it if the tier has it; then pull again"
        return CorruptError(what, where=where, todo=todo, pack_id=pack.pack_id.hex(), tensors=tensors)


def _never() -> FrameCheck:
    raise AssertionError("nothing is decoded at this level")


_NAMED_MAX = 10


def partial_copy_error(
    what_was_not: str, damaged: Mapping[ManifestName, CorruptError | UnreachableError], report: object
) -> CorruptError | UnreachableError:
    """Return one error that names every checkpoint, and says of the first what is wrong with it.

    Args:
        what_was_not: What did not happen to them: ``"pulled"``.
        damaged: Each checkpoint, and why not.
        report: What became of the others; a fact of the error, beside those of the first.
    """
    names = sorted(damaged, reverse=True)
    first = damaged[names[0]]
    labels = [f"seq {name.seq} (step {name.step}) of run {name.run}" for name in names]
    rest = f" and {len(labels) - _NAMED_MAX} more" if len(labels) > _NAMED_MAX else ""
    facts = {**first.facts, "checkpoints": tuple(labels), "report": report}
    what = f"not {what_was_not}: {', '.join(labels[:_NAMED_MAX])}{rest}; of the first, {first.what}"
    # The class says what is wrong with all of them; damage is worse than what may be reached another time.
    kinds = (UnreachableError, MissingChunkError)
    kind = next((k for k in kinds if all(isinstance(error, k) for error in damaged.values())), CorruptError)
    facts = {name: value for name, value in facts.items() if name != "is_transient" or kind is UnreachableError}
    return kind(what, where=first.where, todo=first.todo, **facts)  # type: ignore[arg-type]
