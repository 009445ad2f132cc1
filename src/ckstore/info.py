"""What is known of a checkpoint without reading its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckstore.errors import BoundError
from ckstore.format.header import ManifestHeader


@dataclass(frozen=True, slots=True)
class Info:
    """One entry of a run's history.

    Attributes:
        step: The trainer's step.
        seq: Its number in the run; the highest one is the newest.
        checkpoint_id: BLAKE3-256 of the logical manifest, 64 hex digits.
        run: The run.
        time_ns: When it was committed, nanoseconds since 1970 UTC.
        parent: The seq that the committing handle had restored or committed before, or None.
        origin_id: The checkpoint id this entry was made from by rewind, undelete or demote, or None.
        generation: How often its manifest was replaced.
        is_archival: It was brought back from the trash; ``latest`` skips it.
        fidelity: ``"exact"``, or the name of the policy by which it was stored with a loss; ``contents`` says how much.
        metrics: As given to commit.
        tags: Names that people gave it, sorted.
        bytes_state: Plain bytes of all tensors.
        bytes_stored: Bytes of all frames it needs.
        bytes_written: Bytes of packs that its commit wrote.
        tensor_count: Tensors in its state.
        chunk_count: Chunks of its state.
        chunks_new: Chunks that its commit wrote.
        chunks_reused: Chunks that were there already.
        depth_max: Longest chain of bases; 0 for a keyframe.
        warnings: What restoring it met; empty otherwise.
        tiers: Where its packs lie; ``"local"`` is the store itself.
    """

    step: int
    seq: int
    checkpoint_id: str
    run: str
    time_ns: int
    parent: int | None
    origin_id: str | None
    generation: int
    is_archival: bool
    fidelity: str
    metrics: dict[str, float]
    tags: tuple[str, ...]
    bytes_state: int
    bytes_stored: int
    bytes_written: int
    tensor_count: int
    chunk_count: int
    chunks_new: int
    chunks_reused: int
    depth_max: int
    warnings: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ("local",)

    @classmethod
    def of(
        cls,
        header: ManifestHeader,
        *,
        tags: Sequence[str] = (),
        warnings: Sequence[str] = (),
        tiers: Sequence[str] = ("local",),
    ) -> Info:
        """Make it from a manifest's header."""
        return cls(
            step=header.step,
            seq=header.seq,
            checkpoint_id=header.checkpoint_id.hex(),
            run=header.run,
            time_ns=header.time_ns,
            parent=header.parent,
            origin_id=None if header.origin_id is None else header.origin_id.hex(),
            generation=header.generation,
            is_archival=header.is_archival,
            fidelity=header.fidelity,
            metrics=dict(header.metrics),
            tags=tuple(tags),
            bytes_state=header.bytes_state,
            bytes_stored=header.bytes_stored,
            bytes_written=header.bytes_written,
            tensor_count=header.tensor_count,
            chunk_count=header.chunk_count,
            chunks_new=header.chunks_new,
            chunks_reused=header.chunks_reused,
            depth_max=header.depth_max,
            warnings=tuple(warnings),
            tiers=tuple(tiers),
        )


def require_exact(header: ManifestHeader, where: object) -> None:
    """Refuse a checkpoint that is not, bit for bit, what was committed.

    Raises:
        BoundError: It is not.
    """
    if header.fidelity != "exact":
        raise BoundError(
            f"step {header.step} (seq {header.seq}) was stored with a loss: its fidelity is {header.fidelity!r}",
            where=where,
            todo="restore it without exact=True, or another checkpoint; `ckstore ls` shows the fidelity of each",
            fidelity=header.fidelity,
        )
