"""Decide which checkpoints of a run are to be stored anew with a loss, and why the others are not.

What comes out is data: ``demote`` carries it out, and a dry run prints it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ckstore.config import DemotePolicy
from ckstore.errors import ConflictError, NotFoundError
from ckstore.format.fidelity import EXACT_FIDELITY
from ckstore.format.header import ManifestHeader
from ckstore.format.manifest import Manifest
from ckstore.lossy_warnings import named_nothing, tensor_words
from ckstore.quant.settings import Residual
from ckstore.store.manifests import DroppedError
from ckstore.store.parts import Parts
from ckstore.store.references import Reference, header_or_none, load_whole, resolve

DemoteAction = Literal["demote", "keep"]


@dataclass(frozen=True, slots=True)
class DemoteEntry:
    """One checkpoint of a demotion.

    Attributes:
        seq: Its number in the run.
        step: The trainer's step.
        action: ``"demote"`` or ``"keep"``.
        reason: Why, in a sentence.
        fidelity: As it is told afterwards; before, in a dry run.
        bytes_state: Plain bytes of its tensors.
        stored_before: Bytes of the frames of its own chunks.
        stored_after: The same afterwards, and in a dry run what is expected; equal where nothing is done.
        worst_rel_rms: The greatest RMS error of a tensor, in the RMS of its values; in a dry run the one to expect.
        is_done: Whether it was demoted now.
        is_final: Whether it was tried and came to nothing, as it would again by the same policy.
    """

    seq: int
    step: int
    action: DemoteAction
    reason: str
    fidelity: str
    bytes_state: int
    stored_before: int
    stored_after: int
    worst_rel_rms: float = 0.0
    is_done: bool = False
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class DemoteReport:
    """What a demotion planned or did, the newest checkpoint first.

    Attributes:
        run: The run.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint of the run.
        fidelity: What is asked for, by its name.
        packs_before: Bytes of the packs that the run's checkpoints need.
        packs_after: The same afterwards; packs that are needed no more are freed when the store is collected.
        bytes_written: Bytes of new packs.
        warnings: Rules of the fidelity that name nothing in any checkpoint that is, or would be, demoted; and of what
            was tried, which tensors stayed exact and why, and which hold NaN or infinity.
    """

    run: str
    is_dry_run: bool
    entries: tuple[DemoteEntry, ...]
    packs_before: int
    packs_after: int
    bytes_written: int
    warnings: tuple[str, ...] = ()
    fidelity: str = ""


def plan_warnings(parts: Parts, residual: Residual, entries: Sequence[DemoteEntry]) -> tuple[str, ...]:
    """Return a warning for each rule that names nothing in any checkpoint that is to be demoted."""
    paths: dict[str, None] = {}
    for entry in entries if residual.rules else ():
        if entry.action == "demote":
            # One that was dropped since has nothing that could be named.
            with contextlib.suppress(NotFoundError):
                tree = load_whole(parts, resolve(parts, f"seq:{entry.seq}")).tree
                paths |= dict.fromkeys(tensor_words(tree))
    return tuple(named_nothing(residual, list(paths))) if paths else ()


def plan_demotion(
    parts: Parts, wanted: DemotePolicy, refs: Sequence[Reference] = (), passed_over: Collection[int] = ()
) -> list[DemoteEntry]:
    """Choose what is to be demoted; the newest checkpoint comes first.

    Args:
        parts: The store.
        wanted: Which checkpoints stay exact.
        refs: Demote these, whatever the rules say, and no others; even the newest one.
        passed_over: Seqs that were tried before in vain.

    Raises:
        NotFoundError: One of these is not there.
        ConflictError: One of these carries a tag.
    """
    named = {resolve(parts, ref).seq for ref in refs}
    tags: dict[int, list[str]] = {}
    for tag, record in parts.tags.all().items():
        tags.setdefault(record.seq, []).append(tag)
    headers = [header for name in parts.manifests.listing().names if (header := header_or_none(parts.manifests, name))]
    newest = [header.seq for header in reversed(headers) if not header.is_archival]
    entries = []
    for header in reversed(headers):
        reason = _reason_to_keep(header, wanted, newest, tags.get(header.seq, []), named)
        if not reason and header.seq in passed_over:
            reason = "it was tried before"
        if header.seq in named and header.seq in tags:
            raise _tagged(parts, header.seq, header.step, tags[header.seq])
        manifest = load_whole(parts, header.name)
        stored = own_nbytes(manifest)
        action: DemoteAction = "keep" if reason else "demote"
        why = reason or (
            "it was asked for" if named else f"{newest.index(header.seq) if header.seq in newest else 0} newer"
        )
        facts = (header.seq, header.step, action, why, header.fidelity, header.bytes_state, stored, stored)
        entries.append(DemoteEntry(*facts, worst_rel_rms=max((loss.rel_rms for loss in manifest.losses), default=0.0)))
    return entries


def _reason_to_keep(
    header: ManifestHeader, wanted: DemotePolicy, newest: Sequence[int], tags: Sequence[str], named: set[int]
) -> str:
    """Return why a checkpoint stays as it is; empty: it does not."""
    if header.fidelity != EXACT_FIDELITY:
        return "it was stored with a loss already"
    if named:
        return "" if header.seq in named else "it was not asked for"
    if tags:
        return f"it carries the tag {tags[0]!r}"
    if header.is_archival:
        return "it was brought back from the trash"
    if header.seq in newest[: wanted.keep_newest]:
        return f"it is among the newest {wanted.keep_newest}"
    if wanted.keep_every and header.seq % wanted.keep_every == 0:
        return f"every {wanted.keep_every}th stays exact"
    return ""


def own_nbytes(manifest: Manifest) -> int:
    """Return the bytes of the frames that hold a checkpoint's own chunks."""
    own = {chunk.chunk_id for chunk in manifest.chunks}
    return sum(frame.frame_nbytes for frame in manifest.frames if frame.chunk_id in own)


def packs_nbytes(parts: Parts) -> int:
    """Return the bytes of all packs that the checkpoints of the run need."""
    packs: dict[bytes, int] = {}
    for name in parts.manifests.listing().names:
        try:
            manifest = load_whole(parts, name)
        except DroppedError:
            continue
        packs.update({pack.pack_id: pack.nbytes for pack in manifest.packs})
    return sum(packs.values())


def _tagged(parts: Parts, seq: int, step: int, tags: Sequence[str]) -> ConflictError:
    return ConflictError(
        f"seq {seq} (step {step}) carries the tag {tags[0]!r}, and what carries one stays exact",
        where=parts.backend.root,
        todo="`ckstore untag` it first if it is to be demoted",
        tags=list(tags),
    )
