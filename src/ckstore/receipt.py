"""What a commit gives back, and the stopwatch that fills it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckstore.clock import Clock
from ckstore.format.manifest import Manifest


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
    ) -> Receipt:
        """Make the receipt of a published manifest."""
        header = manifest.header
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
        )
