"""Policy and limits: frozen dataclasses with units in their names, and nothing that reads the environment.

What a person asks of residual checkpoints: steps for each part of the state, and bounds that are held.

Invariants:
- Everything is frozen and checked where it is made; nothing here reads a tensor.
- Steps have no physical unit: those of weights count the RMS of a row's change, those of first moments the root of
  the second moment. What works for one size of model works for another.

A policy as plain dicts, lists and numbers, and back: what a message or a settings file can hold.

Check what a trainer hands to a commit, before anything is read or written.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, SupportsIndex

from ckstore.errors import MalformedError, UsageError, shown_object

__all__ = [
    "EXACT",
    "LEVELS_MAX",
    "FirstMomentSettings",
    "LowRank",
    "Residual",
    "SecondMomentSettings",
    "TensorSettings",
    "WeightSettings",
]

LEVELS_MAX = 127
"""Most levels on either side of zero."""

EXACT: Literal["exact"] = "exact"


def _check_setting(settings: object, field: str, given: object, choices: tuple[str, ...]) -> None:
    if given not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise UsageError(f"{field} must be one of {listed}", where=f"{type(settings).__name__}({field}={given!r})")


def _check_bounds(settings: object, field: str, given: object, least: float, most: float) -> None:
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool) and not math.isnan(given)
    if not is_number or not least <= given <= most:  # type: ignore[operator]
        raise UsageError(
            f"{field} must be between {least} and {most}", where=f"{type(settings).__name__}({field}={given!r})"
        )


@dataclass(frozen=True, slots=True)
class LowRank:
    """How a matrix is told as a sum of a few outer products; training moves weights along few directions at a time.

    Args:
        step: Width of a step of the transform's coefficients: of weights in the RMS of the change, of first moments in
            the root of the second moment, of second moments in the product of their row's and column's factors.
        rank_max: Most outer products.
        error_max: Share of the energy that may be left over; above it the grid is taken.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    step: float = 1.0
    rank_max: int = 64
    error_max: float = 0.5

    def __post_init__(self) -> None:
        _check_bounds(self, "step", self.step, 1e-3, 100.0)
        _check_bounds(self, "rank_max", self.rank_max, 1, 256)
        _check_bounds(self, "error_max", self.error_max, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """How the change of a weight since its base is quantized: uniform steps around a dead zone.

    Args:
        step: Width of a step, in the RMS of the change; scales are kept for each row.
        dead_zone: Changes of less than so many steps become zero; 0.5 is plain rounding.
        levels_max: Steps on either side of zero; what lies beyond is stored exactly.
        scale: ``"row"``: steps follow each row's RMS; ``"chunk"``: one step for all, which has the least squared error.
        low_rank: Tried first, where it is given: the rest is for matrices that few directions do not describe.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    step: float = 0.5
    dead_zone: float = 0.6
    levels_max: int = 63
    scale: Literal["row", "chunk"] = "row"
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        _check_bounds(self, "step", self.step, 1e-3, 100.0)
        _check_bounds(self, "dead_zone", self.dead_zone, 0.5, 10.0)
        _check_bounds(self, "levels_max", self.levels_max, 1, LEVELS_MAX)
        _check_setting(self, "scale", self.scale, ("row", "chunk"))


@dataclass(frozen=True, slots=True)
class SecondMomentSettings:
    """How a second moment is quantized; what was not zero never becomes zero.

    Args:
        form: ``"rank1"``: a factor for each row and one for each column; ``"log"``: what the factors leave over goes
            on a grid of logarithms, too.
        log_step: Width of that grid, in powers of two of the *root* of the moment.
        low_rank: Tried first, where it is given: the rest is for matrices that few directions do not describe.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    form: Literal["rank1", "log"] = "rank1"
    log_step: float = 0.5
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        _check_setting(self, "form", self.form, ("rank1", "log"))
        _check_bounds(self, "log_step", self.log_step, 1.0 / 64, 4.0)


@dataclass(frozen=True, slots=True)
class FirstMomentSettings:
    """How a first moment, divided by the root of the second, is quantized.

    Args:
        form: ``"grid"``: uniform steps around a dead zone; ``"ternary"``: the same with one level on either side;
            ``"dropped"``: zero.
        step: Width of a step, in the root of the second moment.
        dead_zone: Less than so many steps become zero.
        clip: Greatest quotient that is kept; what lies beyond is clipped. Where the second moment is zero nothing is
            kept, and where much of the first one stands there, both are stored exactly.
        low_rank: Tried first, where it is given: the rest is for matrices that few directions do not describe.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    form: Literal["grid", "ternary", "dropped"] = "grid"
    step: float = 0.5
    dead_zone: float = 0.6
    clip: float = 8.0
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        _check_setting(self, "form", self.form, ("grid", "ternary", "dropped"))
        _check_bounds(self, "step", self.step, 1e-3, 100.0)
        _check_bounds(self, "dead_zone", self.dead_zone, 0.5, 10.0)
        _check_bounds(self, "clip", self.clip, 1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """How a weight and its moments are stored; each part may stay exact."""

    weights: WeightSettings | Literal["exact"] = WeightSettings()
    first: FirstMomentSettings | Literal["exact"] = FirstMomentSettings()
    second: SecondMomentSettings | Literal["exact"] = SecondMomentSettings()


Rule = tuple[str, "TensorSettings | Literal['exact']"]


@dataclass(frozen=True, slots=True)
class Residual:
    """A fidelity that loses something, for ``Policy(fidelity=...)``: how much, and what must not be exceeded.

    Take ``Residual.near()`` or ``Residual.small()``, and change what should be different with
    ``dataclasses.replace`` or the arguments of these.

    Args:
        name: What reports call it.
        tensors: How tensors are stored that no rule names.
        rules: Globs over dotted paths of leaves, or of what they are in, and how the tensors there are stored; the
            first match counts, and a receipt warns of globs that match nothing. A glob of more than
            ``*`` also makes weights of matrices that no key says are some.
        max_rel_rms: Greatest RMS error of a tensor, in the RMS of its values; None: no bound.
        max_abs: Greatest error of any element of a weight; None: no bound.
        bits_per_parameter: Bits that all tensors of a parameter are to take together: their steps are scaled, by 1/8 to
            16, until they take about so many and not more. What takes more even then breaks a bound. None: as it comes.
        on_bound: What happens where a bound cannot be met: ``"raise"`` a BoundError, or store the tensor ``"exact"``.
        keyframe_every: One checkpoint in so many is exact as a whole, weights and moments, so that chains end; so is
            the first one of a run.
        nelements_min: Tensors of fewer elements, and those of one dimension, stay exact.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    name: str = "own"
    tensors: TensorSettings = TensorSettings()
    rules: tuple[Rule, ...] = ()
    max_rel_rms: float | None = None
    max_abs: float | None = None
    bits_per_parameter: float | None = None
    on_bound: Literal["raise", "exact"] = "exact"
    keyframe_every: int = 20
    nelements_min: int = 4096

    def __post_init__(self) -> None:
        for bound in ("max_rel_rms", "max_abs", "bits_per_parameter"):
            value = getattr(self, bound)
            if value is not None:
                _check_bounds(self, bound, value, 0.0, 1e30)
        _check_setting(self, "on_bound", self.on_bound, ("raise", "exact"))
        _check_bounds(self, "keyframe_every", self.keyframe_every, 1, 1 << 30)
        _check_bounds(self, "nelements_min", self.nelements_min, 1, 1 << 40)
        for rule in self.rules:
            is_rule = isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)
            if not is_rule or not (rule[1] == EXACT or isinstance(rule[1], TensorSettings)):
                raise UsageError("a rule is a glob and TensorSettings or 'exact'", where=f"Residual(rules={rule!r})")

    def settings_for(self, paths: Iterable[str]) -> TensorSettings | Literal["exact"]:
        """Return how a tensor is stored that is known by these dotted paths."""
        words = list(paths)
        for glob, settings in self.rules:
            if any(_is_meant(path, glob) for path in words):
                return settings
        return self.tensors

    def names(self, path: str) -> bool:
        """Whether a rule says how the tensor at a dotted path is quantized, and does not say it of everything."""
        glob, settings = next((rule for rule in self.rules if _is_meant(path, rule[0])), ("", EXACT))
        return bool(glob.strip("*?")) and settings != EXACT

    def globs_without(self, paths: Iterable[str]) -> list[str]:
        """Return the globs of rules that name none of the leaves at these dotted paths."""
        words = list(paths) if self.rules else []
        return [glob for glob, _ in self.rules if not any(_is_meant(path, glob) for path in words)]

    @staticmethod
    def near(**changes: object) -> Residual:
        """Return the fidelity whose resumes nobody should be able to tell from exact ones: 20 to 60 times smaller."""
        # More directions cost more than they bring: near() of 96 / 96 / 64 in bench/resume_gap, and docs/BENCH.md.
        settings = TensorSettings(
            WeightSettings(step=0.5, low_rank=LowRank(step=0.7, rank_max=80, error_max=0.2)),
            FirstMomentSettings(step=0.5, low_rank=LowRank(step=0.15, rank_max=80, error_max=0.2)),
            SecondMomentSettings(low_rank=LowRank(step=0.25, rank_max=16, error_max=1.0)),
        )
        return _changed(Residual("near", settings), changes)

    @staticmethod
    def small(**changes: object) -> Residual:
        """Return the fidelity for history and evaluation: 50 to 120 times smaller."""
        settings = TensorSettings(
            WeightSettings(step=2.0, low_rank=LowRank(step=1.5, error_max=0.6)),
            FirstMomentSettings(form="ternary", step=1.5, low_rank=LowRank(step=0.4, error_max=0.6)),
            SecondMomentSettings(low_rank=LowRank(step=1.0, error_max=1.0)),
        )
        return _changed(Residual("small", settings), changes)


def _is_meant(path: str, glob: str) -> bool:
    """Whether a glob names a leaf, or something that the leaf is in."""
    return fnmatchcase(path, glob) or fnmatchcase(path, f"{glob}.*")


def _changed(residual: Residual, changes: dict[str, object]) -> Residual:
    unknown = changes.keys() - set(Residual.__dataclass_fields__)
    if unknown:
        raise UsageError(f"Residual has no field {sorted(unknown)[0]!r}", where=f"Residual.{residual.name}(...)")
    return replace(residual, **changes)  # type: ignore[arg-type]


KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Compression = Literal["none", "fast", "best"]
Fidelity = Literal["exact", "near", "small"] | Residual
BaseCacheName = Literal["none", "memory"]
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
    base_cache: BaseCacheName = "none"
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


_KINDS = {
    kind.__name__: kind
    for kind in (
        FirstMomentSettings,
        LowRank,
        Residual,
        SecondMomentSettings,
        TensorSettings,
        WeightSettings,
    )
}
_KIND = "kind"
_DELETED_KINDS = ("PrunedMoments", "PrunedWeights")
"""Settings of ExCP, which is no longer written; ``config.json`` of an existing store may name them."""


def policy_row(policy: Policy) -> dict[str, Any]:
    """Return a policy as plain values."""
    return {field.name: plain_of(getattr(policy, field.name)) for field in dataclasses.fields(policy)}


def policy_of(row: Mapping[str, Any], *, where: object = None) -> Policy:
    """Return the policy of a row.

    Raises:
        MalformedError: It has other fields, or values that a policy cannot have.
    """
    try:
        return Policy(**{name: value_of(value) for name, value in row.items()})
    except (UsageError, TypeError, KeyError, AttributeError) as problem:
        raise MalformedError(f"a policy cannot be read ({problem})", where=where) from None


def plain_of(value: Any) -> Any:
    """Return a setting as plain values: a dataclass becomes a dict that names it, a tuple a list."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        facts = {field.name: plain_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_KIND: type(value).__name__, **facts}
    return [plain_of(part) for part in value] if isinstance(value, tuple) else value


def value_of(row: Any) -> Any:
    """Return the setting that plain values stand for; KeyError, TypeError or UsageError where they stand for none."""
    if isinstance(row, Mapping):
        if row[_KIND] in _DELETED_KINDS:
            raise UsageError(f"{row[_KIND]} no longer exists; use Residual.near() or Residual.small()")
        facts = {name: value_of(value) for name, value in row.items() if name != _KIND}
        return _KINDS[row[_KIND]](**facts)
    return tuple(value_of(part) for part in row) if isinstance(row, list | tuple) else row


STEP_MAX = 10**18 - 1

NameKind = Literal["run", "tag", "tier"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_name(name: str, kind: NameKind) -> str:
    """Return ``name`` when it may name a run, a tag or a tier.

    A tag named ``latest`` or made of digits alone would be read as another kind of reference.

    Raises:
        UsageError: It may not.
    """
    if not isinstance(name, str) or not is_name(name):
        raise UsageError(
            f"{kind} names match [A-Za-z0-9][A-Za-z0-9._-]{{0,127}} and hold no '..'",
            where=repr(name)[:200],
            todo="choose another name",
        )
    if kind == "tag" and (name == "latest" or name.isdigit()):
        raise UsageError("this tag would be read as another kind of reference", where=repr(name), todo="choose another")
    return name


def is_name(name: str) -> bool:
    """Say whether the letters of ``name`` are safe for a run, a tag or a tier."""
    return _NAME.fullmatch(name) is not None and ".." not in name


METRICS_NBYTES_MAX = 48 << 10
"""Names and numbers together, so that they fit into a manifest's header of 64 KiB."""


def check_step(step: SupportsIndex) -> int:
    """Return the step as an int; UsageError if it is none, or out of range."""
    if isinstance(step, bool):
        raise UsageError("a step is an integer", where=f"step={shown_object(step)}")
    try:
        number = operator.index(step)
    except TypeError:
        raise UsageError("a step is an integer", where=f"step={shown_object(step)}") from None
    if not 0 <= number <= STEP_MAX:
        raise UsageError(f"a step lies between 0 and {STEP_MAX}", where=f"step={shown_object(step)}")
    return number


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics with plain floats; UsageError for names and values that are none."""
    checked: dict[str, float] = {}
    if (
        sum(len(name.encode(errors="replace")) + 12 for name in metrics or () if isinstance(name, str))
        > METRICS_NBYTES_MAX
    ):
        raise UsageError(f"there are more than {METRICS_NBYTES_MAX} bytes of metrics", todo="store them as state")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not 0 < len(name) <= 128 or ":" in name or not _is_unicode(name):
            raise UsageError(
                "a metric's name is Unicode text of 1 to 128 characters without ':'", where=shown_object(name)
            )
        try:
            # A string would convert too, and would more likely be a mistake than a number.
            if isinstance(value, (str, bytes)):
                raise TypeError
            checked[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            shown = shown_object(value)[:80]
            raise UsageError("a metric is a number", where=f"metrics[{name!r}] = {shown}") from None
    return checked


def _is_unicode(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def check_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Return tags as a tuple, a single string as one tag; UsageError for names that cannot be tags."""
    return tuple(check_name(name, "tag") for name in ((tags,) if isinstance(tags, str) else tags))


def check_policy(policy: object) -> None:
    """Raise UsageError for what is no policy, before a state is looked at."""
    if policy is not None and not isinstance(policy, Policy):
        shown = shown_object(policy)[:80]
        raise UsageError(
            "a policy is a ckstore.Policy", where=f"policy={shown}", todo="as in ckstore.Policy(compression='fast')"
        )
