"""What the verbs of a store return: ``Info`` for an existing checkpoint, ``Receipt`` for a new one.

Both are made from a manifest, without reading tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, overload

from ckstore.clock import Clock, utc_text
from ckstore.display import duration, html_table, metrics_text, one_line, size
from ckstore.errors import BoundError, counted
from ckstore.format.header import ManifestHeader

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Info:
    """One checkpoint in the history of a run.

    Attributes:
        step: The trainer's step.
        seq: Commit number within the run; the highest is the newest.
        checkpoint_id: BLAKE3-256 of the logical manifest, 64 hex digits.
        run: Name of the run.
        time_ns: Commit time in nanoseconds since 1970 UTC.
        parent: The seq that the committing handle had restored or committed before, or None.
        origin_id: Checkpoint id that rewind, undelete or demote made this checkpoint from, or None.
        generation: How many times its manifest was replaced.
        is_archival: True if it was restored from the trash; ``latest`` skips it.
        fidelity: ``"exact"``, or the name of the lossy fidelity; ``Store.contents`` shows the errors.
        metrics: Metrics given to the commit.
        tags: Its tags, sorted.
        bytes_state: Uncompressed bytes of all tensors.
        bytes_stored: Bytes of all frames that a restore needs.
        bytes_written: Bytes of the packs that its commit wrote.
        tensor_count: Number of tensors in the state.
        chunk_count: Number of chunks in the state.
        chunks_new: Chunks that its commit wrote.
        chunks_reused: Chunks that were stored before.
        depth_max: Largest chain depth of its frames; 0 for a keyframe.
        warnings: Warnings of the restore that returned it; otherwise empty.
        tiers: Tiers that hold its packs; ``"local"`` is the store itself.
        form: ``"whole"`` for a checkpoint. For a point of a journal, which steps of training lead to it:
            ``"journal, 17 steps after 1200"``. Then step, time, metrics and bytes are the point's, and everything else
            is that of its keyframe, the checkpoint of step 1200. For a checkpoint in replay form, where its training
            begins: ``"replay, from step 1200"``.
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
    form: str = "whole"

    def __repr__(self) -> str:
        facts = [f"step {self.step}", f"seq {self.seq}", f"run {self.run}", utc_text(self.time_ns)]
        facts += [size(self.bytes_state), *([] if self.fidelity == "exact" else [self.fidelity])]
        facts += [] if self.form == "whole" else [self.form]
        facts += [metrics_text(self.metrics)] if self.metrics else []
        facts += [f"tags {' '.join(self.tags)}"] if self.tags else []
        return f"<ckstore.Info: {one_line(', '.join(facts))}>"

    def _repr_html_(self) -> str:
        rows = zip(HEADINGS, cells_of(self), strict=True)
        return html_table(f"step {self.step} (seq {self.seq}) of run {self.run}", (), [*rows])

    @classmethod
    def of(
        cls,
        header: ManifestHeader,
        *,
        tags: Sequence[str] = (),
        warnings: Sequence[str] = (),
        tiers: Sequence[str] = ("local",),
    ) -> Info:
        """Return the Info of a manifest's header."""
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


HEADINGS = ("seq", "step", "time", "state", "written", "metrics", "tags", "fidelity")


def cells_of(info: Info) -> tuple[object, ...]:
    """Return the cells of a checkpoint in a table for a notebook."""
    sizes = size(info.bytes_state), size(info.bytes_written)
    words = metrics_text(info.metrics), " ".join(info.tags), info.fidelity
    return (info.seq, info.step, utc_text(info.time_ns), *sizes, *words)


class Log(list[Info]):
    """A list of checkpoints that notebooks show as a table. Otherwise an ordinary list."""

    def __init__(self, infos: Iterable[Info] = (), *, title: str = "") -> None:
        super().__init__(infos)
        self._title = title

    @overload
    def __getitem__(self, index: SupportsIndex) -> Info: ...
    @overload
    def __getitem__(self, index: slice) -> Log: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Info | Log:
        if isinstance(index, slice):
            return Log(super().__getitem__(index), title=self._title)
        return super().__getitem__(index)

    def _repr_html_(self) -> str:
        title = f"{self._title}: {counted(len(self), 'checkpoint')}" if self._title else ""
        return html_table(title, HEADINGS, [cells_of(info) for info in self])


def require_exact(header: ManifestHeader, where: object) -> None:
    """Raise unless a checkpoint was stored without loss.

    Raises:
        BoundError: It is lossy.
    """
    if header.fidelity != "exact":
        raise BoundError(
            f"step {header.step} (seq {header.seq}) is not exact: it was stored with fidelity {header.fidelity!r}",
            where=where,
            todo="restore it without exact=True, or choose an exact checkpoint; `ckstore ls` shows every fidelity",
            fidelity=header.fidelity,
        )


class Stopwatch:
    """Measures wall seconds per stage. The times of a stage that is entered more than once add up."""

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
        """Return the seconds since this stopwatch was created."""
        return self._clock.monotonic() - self._begun


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of a durable checkpoint.

    Attributes:
        step: The trainer's step.
        seq: Commit number within the run; 0 for a point of a journal.
        checkpoint_id: BLAKE3-256 of the logical manifest, 64 hex digits; empty for a point of a journal.
        bytes_state: Uncompressed bytes of all tensors; shared storage counts once.
        bytes_written: Bytes of the new packs, including headers and padding.
        chunks_new: Chunks written by this commit.
        chunks_reused: Chunks that an earlier checkpoint, or an earlier part of this state, already stores.
        chunks_delta: New chunks stored as the difference from a base.
        chunks_derived: New chunks stored as the rounding of another chunk of the same state.
        chunks_lossy: New chunks stored quantized.
        fidelity: ``"exact"``, or the name of the lossy fidelity.
        lossy_count: Number of storages that were changed by quantization.
        worst_rel_rms: Largest RMS error of a storage, relative to the RMS of its values.
        worst_path: Path of the tensor with that error.
        worst_spike: Largest |update| / lr that the next Adam step could make; 0.0 if unknown.
        bytes_bases: Heap bytes that hold delta bases for the next commit (``base_cache="memory"``). They belong to the
            saver for a background commit, else to this process, and come on top of the arena and
            ``memory_nbytes_max``.
        bytes_bases_peak: Largest value of ``bytes_bases`` during the commit.
        bytes_bases_staged: Bytes in the arena that hold delta bases for the next commit.
        point: Number of the record, if this is a point of a journal, else 0.
        seconds: Wall seconds per stage (stage, plan, write, flush, publish, verify), and ``total``.
        engine: Engine that wrote the packs: ``"uring"`` or ``"pwrite"``.
        warnings: Sentences for the user; empty if there is nothing to report.
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
    point: int = 0

    def __repr__(self) -> str:
        facts = [f"step {self.step}", f"point {self.point}" if self.point else f"seq {self.seq}"]
        written = f"{size(self.bytes_state)} stored as {size(self.bytes_written)}"
        facts += [f"{written} ({self.ratio:.3g}x)" if self.bytes_written else written]
        facts += [duration(self.seconds["total"])] if "total" in self.seconds else []
        facts += [] if self.fidelity == "exact" else [self.fidelity]
        facts += [counted(len(self.warnings), "warning")] if self.warnings else []
        return f"<ckstore.Receipt: {one_line(', '.join(facts))}>"

    @property
    def ratio(self) -> float:
        """``bytes_state`` divided by ``bytes_written``; infinite if nothing was written."""
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
        """Return the receipt of a published manifest."""
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
    """Return the path of the first tensor in a storage."""
    from ckstore.format.tree import TensorNode, format_path, leaves_of

    for path, leaf in leaves_of(manifest.tree):
        if isinstance(leaf, TensorNode) and manifest.tensors[leaf.tensor].storage == storage:
            return format_path(path)
    return ""
