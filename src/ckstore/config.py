"""Policy and limits: frozen dataclasses with units in their names, and nothing that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckstore.errors import UsageError
from ckstore.quant.settings import Residual

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Compression = Literal["none", "fast", "best"]
Fidelity = Literal["exact", "near", "small"] | Residual
BaseCache = Literal["none", "memory"]
EngineName = Literal["auto", "uring", "pwrite"]
OnBusy = Literal["wait", "skip", "replace"]

NAMED_RESIDUALS: Mapping[str, Callable[[], Residual]] = {"near": Residual.near, "small": Residual.small}
"""Fidelities that a word says."""

_RESIDUALS = "a ckstore.Residual, such as ckstore.Residual.near() or .small()"

STAGING_THREADS_MAX = 8
"""More threads than this gain nothing: a few fill the memory's bandwidth."""


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
        delta: Code tensors against the previous commit or the last keyframe where a sample says that it pays.
        read_amplification_max: Bound on the bytes that a restore reads, in those of a checkpoint stored whole.
        base_cache: Where bases come from: ``"none"`` reads them back from the store, ``"memory"`` keeps the plain bytes
            of those that the next commit will want: up to the size of the state, twice that while a commit runs. A
            background commit leaves them where they were staged, which takes the arena a second state; a keyframe that
            later ones go on to be coded against lies on the saver's heap beside it. It is told by
            ``Receipt.bytes_bases``, ``bytes_bases_peak`` and ``bytes_bases_staged``.
        base_cache_nbytes_max: Bound on those bytes on the heap, at any time; None: none but that. Bases beyond it are
            read back. A staged state that is longer than this is not kept in the arena either.
        fidelity: ``"exact"``: what is restored equals what was committed, bit for bit. A ``Residual``, such as
            ``Residual.near()`` or ``Residual.small()``, loses something, within bounds that are measured and recorded;
            ``"near"`` and ``"small"`` are short for these two.
        verify_encoded: Decode every frame and compare its identity with its source's before the source is let go.
            Without it faulty memory and coders are found out by a restore, not by the commit.
        verify_restored: What a restore checks of each chunk: its ``"blake3"`` identity, or only the
            ``"xxh3"`` checksum of the stored bytes.
        threads: Threads that hash and code; None: one per core, at most eight.
        memory_nbytes_max: Bound on buffers and scratch space, beyond the state itself; bases that are kept and samples
            (0.4% of the state each, for the last commit and its keyframe) come on top. The process that saves in the
            background keeps its write buffers, 96 MiB at most, from one commit to the next.
        on_busy: What a background commit does while an earlier one is still being written: ``"wait"`` for it;
            ``"skip"``, which stores nothing and says so; ``"replace"`` a staged one that still waits for its turn, for
            which there is room for two states; one that ``Pending.wait_staged`` or ``is_staged`` has said to be staged
            will be published, and is waited for, as is the first one where there is no room for a second.
        staging_threads: Threads that copy the state for a background commit, while the caller waits; None: as many as
            reach the memory's bandwidth, at most eight. Behind a guard half of them copy until somebody waits: 1 or 2
            leave training all processors but one.
        arena_nbytes_max: Bound on the shared memory that states are staged in; None: what the state needs, twice that
            with ``base_cache="memory"``, and once more for a state that waits for its turn (``"replace"``).
        saver_nice: Added to the niceness of the saver process, so that training comes first. With 19 it has at most
            1.5% of a processor that training wants whole, and all of those that are idle; where training leaves none
            idle for long, a lower one has commits written sooner. Another one than before counts from when nothing is
            being written. A saver of any niceness but 0
            codes on one thread fewer than there are processors, if that leaves one, and takes only processors that
            nobody else wants while a state is copied and between commits. Where the host takes processors away, as
            from a machine or container that uses more than its quota, it rests between chunks for as long as it works,
            at most: a commit may take twice as long, and ``on_busy="skip"`` skip more of them. All of this is left out
            while ``result()``, a full arena, ``wait`` or ``close`` wait for the saver; for its niceness, where the
            system lets a process raise its priority (root, ``ulimit -e``).
        debug_guard: Take checksums of what is copied behind the guard, and of its source when the guard is entered;
            a commit whose state was changed in between fails and names the tensor. A state is staged, and published,
            only when that was compared: at the next step of its optimizer, the next commit, or by
            ``Pending.wait_staged`` or ``result``; a trainer that is killed before loses it. The memory of devices is
            fetched twice more for it, while the call and the step wait. What lies between tensors that share memory
            counts as theirs.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    compression: Compression = "fast"
    delta: bool = True
    read_amplification_max: float = 1.6
    base_cache: BaseCache = "none"
    base_cache_nbytes_max: int | None = None
    fidelity: Fidelity = "exact"
    verify_encoded: bool = True
    verify_restored: Literal["blake3", "xxh3"] = "blake3"
    threads: int | None = None
    memory_nbytes_max: int = 192 * MIB
    on_busy: OnBusy = "wait"
    staging_threads: int | None = None
    arena_nbytes_max: int | None = None
    saver_nice: int = 19
    debug_guard: bool = False

    def __post_init__(self) -> None:
        self._check_background()
        _check_choice("compression", self.compression, ("none", "fast", "best"))
        _check_choice("base_cache", self.base_cache, ("none", "memory"))
        if self.base_cache_nbytes_max is not None and self.base_cache_nbytes_max < 0:
            raise UsageError(
                "base_cache_nbytes_max must not be negative",
                where=f"Policy(base_cache_nbytes_max={self.base_cache_nbytes_max!r})",
            )
        if not 1 <= self.read_amplification_max <= 1000:
            raise UsageError(
                "read_amplification_max must be between 1 and 1000",
                where=f"Policy(read_amplification_max={self.read_amplification_max!r})",
            )
        self._take_fidelity()
        _check_choice("verify_restored", self.verify_restored, ("blake3", "xxh3"))
        if self.threads is not None and not 1 <= self.threads <= 256:
            raise UsageError("threads must be between 1 and 256", where=f"Policy(threads={self.threads!r})")
        if self.memory_nbytes_max < 56 * MIB:
            raise UsageError(
                "memory_nbytes_max must be at least 56 MiB",
                where=f"Policy(memory_nbytes_max={self.memory_nbytes_max!r})",
            )

    def _take_fidelity(self) -> None:
        if isinstance(self.fidelity, Residual) or self.fidelity == "exact":
            return
        if not isinstance(self.fidelity, str) or self.fidelity not in NAMED_RESIDUALS:
            raise UsageError(
                f"fidelity must be 'exact', 'near', 'small', or {_RESIDUALS}",
                where=f"Policy(fidelity={self.fidelity!r})",
            )
        # Frozen: what has a name is what the name stands for, from here on.
        object.__setattr__(self, "fidelity", NAMED_RESIDUALS[self.fidelity]())

    def _check_background(self) -> None:
        _check_choice("on_busy", self.on_busy, ("wait", "skip", "replace"))
        if self.staging_threads is not None and not 1 <= self.staging_threads <= 64:
            raise UsageError(
                "staging_threads must be between 1 and 64", where=f"Policy(staging_threads={self.staging_threads!r})"
            )
        if not 0 <= self.saver_nice <= 19:
            raise UsageError("saver_nice must be between 0 and 19", where=f"Policy(saver_nice={self.saver_nice!r})")
        if self.arena_nbytes_max is not None and self.arena_nbytes_max <= 0:
            raise UsageError(
                "arena_nbytes_max must be positive", where=f"Policy(arena_nbytes_max={self.arena_nbytes_max!r})"
            )

    @property
    def staging_thread_count(self) -> int:
        """Threads that copy a state for a background commit."""
        if self.staging_threads is not None:
            return self.staging_threads
        return max(1, min(STAGING_THREADS_MAX, len(os.sched_getaffinity(0))))

    @property
    def residual(self) -> Residual | None:
        """What may be lost; None: nothing."""
        return self.fidelity if isinstance(self.fidelity, Residual) else None

    @property
    def thread_count(self) -> int:
        """Threads that hash and code."""
        if self.threads is not None:
            return self.threads
        return max(1, min(8, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class RepackPolicy:
    """How ``repack`` stores the checkpoints of a run.

    Args:
        keyframes: How many of the newest checkpoints need no other one to be restored.
        compression: How much time is spent on coding.
        read_amplification_max: The most that a restore of an older one may read, in keyframes.
        saving_min: The share of the bytes that rewriting must save, on disk or, for the newest, in what a restore
            reads; what saves less stays as it is.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    keyframes: int = 1
    compression: Literal["fast", "best"] = "fast"
    read_amplification_max: float = 1.6
    saving_min: float = 0.03

    def __post_init__(self) -> None:
        _check_choice("compression", self.compression, ("fast", "best"))
        _check_range("keyframes", self.keyframes, 0, 1_000_000)
        _check_range("read_amplification_max", self.read_amplification_max, 1, 1000)
        _check_range("saving_min", self.saving_min, 0, 1)


@dataclass(frozen=True, slots=True)
class DemotePolicy:
    """Which checkpoints of a run ``demote`` stores anew with a loss; tagged ones and the newest one never are.

    Args:
        keep_newest: So many of the newest checkpoints stay exact.
        keep_every: Of the others, those stay exact whose number in the run (seq) is a multiple of this; 0: none.
        fidelity: How the others are stored; ``Residual.near()``, which is made for resuming, if nothing is said.
        compression: How much time is spent on what stays exact in them.
        saving_min: The share of its bytes that demoting a checkpoint must save; what saves less stays as it is.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    keep_newest: int = 3
    keep_every: int = 10
    fidelity: Residual = field(default_factory=Residual.near)
    compression: Literal["fast", "best"] = "fast"
    saving_min: float = 0.03

    def __post_init__(self) -> None:
        if not isinstance(self.fidelity, Residual):
            raise UsageError(f"fidelity must be {_RESIDUALS}", where=f"DemotePolicy(fidelity={self.fidelity!r})")
        _check_choice("compression", self.compression, ("fast", "best"), "DemotePolicy")
        _check_range("keep_newest", self.keep_newest, 1, 1_000_000, "DemotePolicy")
        _check_range("keep_every", self.keep_every, 0, 1_000_000, "DemotePolicy")
        _check_range("saving_min", self.saving_min, 0, 1, "DemotePolicy")


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


def _check_choice(name: str, given: object, choices: tuple[str, ...], kind: str = "Policy") -> None:
    if given not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise UsageError(f"{name} must be one of {listed}", where=f"{kind}({name}={given!r})")


def _check_range(name: str, given: float, least: float, most: float, kind: str = "RepackPolicy") -> None:
    if not least <= given <= most:
        raise UsageError(f"{name} must be between {least} and {most}", where=f"{kind}({name}={given!r})")
