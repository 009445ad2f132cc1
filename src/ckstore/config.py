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
        verify_encoded: Decode every frame and compare its identity with its source's before the source is let go.
            Without it faulty memory and coders are found out by a restore, not by the commit.
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
        if self.memory_nbytes_max < 56 * MIB:
            raise UsageError(
                "memory_nbytes_max must be at least 56 MiB",
                where=f"Policy(memory_nbytes_max={self.memory_nbytes_max!r})",
            )

    @property
    def thread_count(self) -> int:
        """Threads that hash and code."""
        if self.threads is not None:
            return self.threads
        return max(1, min(8, len(os.sched_getaffinity(0))))


READ_BUFFERS, READ_BUFFERS_MIN = 20, 4
"""Read buffers wanted, and the fewest that keep a disk and one decoder busy. Measured: 20 gain 3 to 5% over 12."""


def fit_memory(
    thread_count: int,
    worker_nbytes: int,
    buffer_nbytes: int,
    *,
    buffers_wanted: int,
    buffers_min: int,
    memory_nbytes_max: int,
) -> tuple[int, int]:
    """Return how many threads and buffers fit into a bound on memory.

    The fewest buffers that work come first, then threads, and what is left goes to more buffers: a thread more
    is worth more than a buffer more. One thread and ``buffers_min`` buffers are returned even where they do not
    fit, because less cannot work.

    Args:
        thread_count: Threads wanted.
        worker_nbytes: What each of them may use.
        buffer_nbytes: Size of a buffer.
        buffers_wanted: More than these gain nothing.
        buffers_min: Fewer than these do not work.
        memory_nbytes_max: Bound on all of it.
    """
    spare = memory_nbytes_max - buffers_min * buffer_nbytes
    threads = max(1, min(thread_count, spare // worker_nbytes))
    spare = memory_nbytes_max - threads * worker_nbytes
    return threads, max(buffers_min, min(buffers_wanted, spare // buffer_nbytes))


def _check_choice(field: str, given: object, choices: tuple[str, ...]) -> None:
    if given not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise UsageError(f"{field} must be one of {listed}", where=f"Policy({field}={given!r})")
