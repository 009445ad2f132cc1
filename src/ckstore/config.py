"""Policy and limits: frozen dataclasses with units in their names, and nothing that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from ckstore.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Compression = Literal["none", "fast", "best"]
Fidelity = Literal["exact"]
EngineName = Literal["auto", "uring", "pwrite"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that readers enforce before they allocate; recorded in ``store.json``."""

    chunk_nbytes_max: int = 4 * MIB
    pack_nbytes_max: int = 64 * GIB
    manifest_nbytes_max: int = 1 * GIB
    depth_max: int = 64
    """Longest chain of bases of one frame."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one commit is stored; every field has a default that is safe.

    Args:
        compression: ``"none"`` stores plain bytes; ``"fast"`` splits floating-point elements into byte
            planes and codes the planes that pay; ``"best"`` spends more time on the same.
        fidelity: ``"exact"``: what is restored equals what was committed, bit for bit.
        verify_encoded: Decode every frame and compare it with its source before the source is let go. Without
            it, a state that changes while it is committed makes a frame that cannot be restored, and later commits
            of the same bytes refer to it.
        verify_restored: What a restore checks of each chunk: its ``"blake3"`` identity, or only the
            ``"xxh3"`` checksum of the stored bytes.
        threads: Threads that hash and code; None: one per core, at most eight.
        memory_nbytes_max: Bound on buffers and scratch space, beyond the state itself.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    compression: Compression = "fast"
    fidelity: Fidelity = "exact"
    verify_encoded: bool = True
    verify_restored: Literal["blake3", "xxh3"] = "blake3"
    threads: int | None = None
    memory_nbytes_max: int = 192 * MIB

    def __post_init__(self) -> None:
        _check_choice("compression", self.compression, ("none", "fast", "best"))
        _check_choice("fidelity", self.fidelity, ("exact",))
        _check_choice("verify_restored", self.verify_restored, ("blake3", "xxh3"))
        if self.threads is not None and not 1 <= self.threads <= 256:
            raise UsageError("threads must be between 1 and 256", where=f"Policy(threads={self.threads!r})")
        if self.memory_nbytes_max < 48 * MIB:
            raise UsageError(
                "memory_nbytes_max must be at least 48 MiB",
                where=f"Policy(memory_nbytes_max={self.memory_nbytes_max!r})",
            )

    @property
    def thread_count(self) -> int:
        """Threads that hash and code."""
        if self.threads is not None:
            return self.threads
        return max(1, min(8, len(os.sched_getaffinity(0))))


def _check_choice(field: str, given: object, choices: tuple[str, ...]) -> None:
    if given not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise UsageError(f"{field} must be one of {listed}", where=f"Policy({field}={given!r})")
