"""What is known of a checkpoint without reading its tensors.

What a commit gives back, and the stopwatch that fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckstore.clock import Clock
from ckstore.errors import BoundError
from ckstore.format.header import ManifestHeader
from ckstore.format.manifest import Manifest
from ckstore.format.tree import TensorNode, format_path, leaves_of


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


class Stopwatch:
    """Wall seconds per stage; a stage that is entered again adds up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun = clock.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Measure one stage."""
        begun = self._clock.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self._clock.monotonic() - begun

    def total(self) -> float:
        """Return seconds since this stopwatch was made."""
        return self._clock.monotonic() - self._begun


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of a durable checkpoint.

    Attributes:
        step: The trainer's step.
        seq: The checkpoint's number in its run.
        checkpoint_id: BLAKE3-256 of the logical manifest, 64 hex digits.
        bytes_state: Plain bytes of all tensors, shared storage counted once.
        bytes_written: Bytes of new packs, headers and padding included.
        chunks_new: Chunks written by this commit.
        chunks_reused: Chunks that an earlier checkpoint, or an earlier place in this state, had already.
        chunks_delta: New chunks stored as the difference from a base.
        chunks_derived: New chunks stored as the rounding of another one of the same state.
        chunks_lossy: New chunks stored as codes, with a loss.
        fidelity: ``"exact"``, or the name of the policy by which something was lost.
        lossy_count: Storages that are not what was committed.
        worst_rel_rms: The greatest RMS error of any of them, in the RMS of its values.
        worst_path: The tensor that has it.
        worst_spike: Largest |update| / lr that a next step of Adam could make; 0.0 where that is not known.
        bytes_bases: Plain bytes that are held on the heap for the next commit, where ``base_cache`` is ``"memory"``: of
            the saver for a background commit, else of this process; the arena and ``memory_nbytes_max`` do not count
            them.
        bytes_bases_peak: The most that were held of them at once during the commit.
        bytes_bases_staged: Plain bytes that are held for the next commit where they were staged, in the arena.
        seconds: Wall seconds per stage (stage, plan, write, flush, publish, verify) and in ``total``.
        engine: What wrote the packs: ``"uring"`` or ``"pwrite"``.
        warnings: What the caller should look at, each a sentence.
    """

    step: int
    seq: int
    checkpoint_id: str
    bytes_state: int
    bytes_written: int
    chunks_new: int
    chunks_reused: int
    chunks_delta: int
    chunks_derived: int
    seconds: dict[str, float]
    engine: str
    warnings: tuple[str, ...] = ()
    chunks_lossy: int = 0
    fidelity: str = "exact"
    lossy_count: int = 0
    worst_rel_rms: float = 0.0
    worst_path: str = ""
    worst_spike: float = 0.0
    bytes_bases: int = 0
    bytes_bases_peak: int = 0
    bytes_bases_staged: int = 0

    @property
    def ratio(self) -> float:
        """How many times smaller the commit was than the state; infinite where nothing had to be written."""
        return self.bytes_state / self.bytes_written if self.bytes_written else float("inf")

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        watch: Stopwatch,
        *,
        engine: str,
        warnings: Sequence[str],
        chunks_delta: int,
        chunks_derived: int,
        chunks_lossy: int = 0,
        bytes_bases: tuple[int, int, int] = (0, 0, 0),
    ) -> Receipt:
        """Make the receipt of a published manifest."""
        header = manifest.header
        worst = max(manifest.losses, key=lambda loss: loss.rel_rms, default=None)
        return cls(
            step=header.step,
            seq=header.seq,
            checkpoint_id=header.checkpoint_id.hex(),
            bytes_state=header.bytes_state,
            bytes_written=header.bytes_written,
            chunks_new=header.chunks_new,
            chunks_reused=header.chunks_reused,
            chunks_delta=chunks_delta,
            chunks_derived=chunks_derived,
            seconds={**watch.seconds, "total": watch.total()},
            engine=engine,
            warnings=tuple(warnings),
            chunks_lossy=chunks_lossy,
            fidelity=header.fidelity,
            lossy_count=len(manifest.losses),
            worst_rel_rms=0.0 if worst is None else worst.rel_rms,
            worst_path="" if worst is None else _path_of(manifest, worst.storage),
            worst_spike=max((loss.spike or 0.0 for loss in manifest.losses), default=0.0),
            bytes_bases=bytes_bases[0],
            bytes_bases_peak=bytes_bases[1],
            bytes_bases_staged=bytes_bases[2],
        )


def _path_of(manifest: Manifest, storage: int) -> str:
    """Return the path of the first tensor that views a storage."""
    for path, leaf in leaves_of(manifest.tree):
        if isinstance(leaf, TensorNode) and manifest.tensors[leaf.tensor].storage == storage:
            return format_path(path)
    return ""
