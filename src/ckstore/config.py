"""Every setting of a store, in frozen dataclasses that check their values when they are created.

- ``Policy`` says how a commit is stored. ``Residual`` and the ``*Settings`` classes describe lossy checkpoints.
- ``RepackPolicy`` and ``DemotePolicy`` say how existing checkpoints are rewritten. ``Limits`` bounds what readers
  allocate.
- ``policy_row`` and ``policy_of`` convert a policy to plain values and back, for messages and ``config.json``.
- The ``check_*`` functions check the arguments of a commit before anything is read or written.

Invariants:
- Nothing here reads a tensor or an environment variable.
- Quantizer steps have no physical unit. Weights are measured in the RMS of a row's change, first moments in the square
  root of the second moment. One setting therefore fits models of every size.
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

from ckstore.display import changed_fields, repr_of_changes
from ckstore.errors import MalformedError, UsageError, shown_object

LEVELS_MAX = 127
"""Maximum number of quantizer levels on each side of zero."""

EXACT: Literal["exact"] = "exact"


def _check_one_of(settings: object, field: str, given: object, choices: tuple[str, ...]) -> None:
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
    """Store a matrix as a sum of a few outer products. Training changes weights along few directions at a time.

    Args:
        step: Quantizer step of the coefficients; larger is smaller and less accurate. The unit is the RMS of the change
            for weights, the square root of the second moment for first moments, and the product of the row and column
            factors for second moments.
        rank_max: Maximum number of outer products, 1 to 256. Raise it if matrices fall back to the grid too often.
        error_max: Largest share of the energy that the products may miss. Above it the matrix is stored on the grid.

    Raises:
        UsageError: A field has an invalid value.
    """

    step: float = 1.0
    rank_max: int = 64
    error_max: float = 0.5

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        _check_bounds(self, "step", self.step, 1e-3, 100.0)
        _check_bounds(self, "rank_max", self.rank_max, 1, 256)
        _check_bounds(self, "error_max", self.error_max, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """How the change of a weight since its base is quantized: uniform steps with a dead zone around zero.

    Args:
        step: Quantizer step, in the RMS of the change. Raise it for smaller checkpoints with larger errors.
        dead_zone: Changes below this many steps become zero; 0.5 is plain rounding. Raise it for smaller checkpoints.
        levels_max: Number of steps on each side of zero, at most 127. Larger changes are stored exactly.
        scale: ``"row"`` scales the step by each row's RMS. ``"chunk"`` uses one step for the whole chunk, which has the
            smallest squared error.
        low_rank: Try outer products first; None: always use the grid.

    Raises:
        UsageError: A field has an invalid value.
    """

    step: float = 0.5
    dead_zone: float = 0.6
    levels_max: int = 63
    scale: Literal["row", "chunk"] = "row"
    low_rank: LowRank | None = None

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        _check_bounds(self, "step", self.step, 1e-3, 100.0)
        _check_bounds(self, "dead_zone", self.dead_zone, 0.5, 10.0)
        _check_bounds(self, "levels_max", self.levels_max, 1, LEVELS_MAX)
        _check_one_of(self, "scale", self.scale, ("row", "chunk"))


@dataclass(frozen=True, slots=True)
class SecondMomentSettings:
    """How a second moment is quantized. A nonzero value never becomes zero.

    Args:
        form: ``"rank1"`` stores one factor per row and one per column. ``"log"`` also stores the quotient that the
            factors miss, on a logarithmic grid; it is larger and more accurate.
        log_step: Step of the logarithmic grid, in powers of two of the *square root* of the moment.
        low_rank: Try outer products first; None: always use ``form``.

    Raises:
        UsageError: A field has an invalid value.
    """

    form: Literal["rank1", "log"] = "rank1"
    log_step: float = 0.5
    low_rank: LowRank | None = None

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        _check_one_of(self, "form", self.form, ("rank1", "log"))
        _check_bounds(self, "log_step", self.log_step, 1.0 / 64, 4.0)


@dataclass(frozen=True, slots=True)
class FirstMomentSettings:
    """How a first moment is quantized, after division by the square root of the second moment.

    Args:
        form: ``"grid"`` uses uniform steps with a dead zone. ``"ternary"`` uses one level on each side of zero.
            ``"dropped"`` stores zeros.
        step: Quantizer step, in the square root of the second moment. Raise it for smaller checkpoints.
        dead_zone: Quotients below this many steps become zero.
        clip: Larger quotients are clipped to this value. Where the second moment is zero the first one becomes zero; if
            that would lose much of it, both moments are stored exactly.
        low_rank: Try outer products first; None: always use ``form``.

    Raises:
        UsageError: A field has an invalid value.
    """

    form: Literal["grid", "ternary", "dropped"] = "grid"
    step: float = 0.5
    dead_zone: float = 0.6
    clip: float = 8.0
    low_rank: LowRank | None = None

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        _check_one_of(self, "form", self.form, ("grid", "ternary", "dropped"))
        _check_bounds(self, "step", self.step, 1e-3, 100.0)
        _check_bounds(self, "dead_zone", self.dead_zone, 0.5, 10.0)
        _check_bounds(self, "clip", self.clip, 1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """How a weight and its two Adam moments are stored; each of the three can be ``"exact"``."""

    weights: WeightSettings | Literal["exact"] = WeightSettings()
    first: FirstMomentSettings | Literal["exact"] = FirstMomentSettings()
    second: SecondMomentSettings | Literal["exact"] = SecondMomentSettings()

    __repr__ = repr_of_changes


Rule = tuple[str, "TensorSettings | Literal['exact']"]


@dataclass(frozen=True, slots=True)
class Residual:
    """A lossy fidelity for ``Policy(fidelity=...)``: how tensors are quantized, and which errors are allowed.

    Start from ``Residual.near()`` or ``Residual.small()`` and change fields by their arguments or with
    ``dataclasses.replace``.

    Args:
        name: Name of this fidelity in reports.
        tensors: Settings of tensors that no rule matches.
        rules: Pairs of a glob and settings. A glob matches the dotted path of a leaf or of a container around it; the
            first matching rule counts, and a receipt warns of globs that match nothing. Any glob but ``*`` also makes
            the matrices it matches count as weights, even if no key of the state says so.
        max_rel_rms: Largest RMS error of a tensor, relative to the RMS of its values; None: no bound.
        max_abs: Largest error of any element of a weight; None: no bound.
        bits_per_parameter: Bits that a weight and its moments may take together, per parameter. Their steps are scaled
            by 1/8 to 16 until they need at most this many; if that is not enough, a bound is exceeded. None: no target.
        on_bound: What to do if a bound cannot be met: ``"raise"`` a BoundError, or store the tensor ``"exact"``.
        keyframe_every: Every n-th checkpoint, and the first one of a run, is exact in weights and moments, so that
            chains stay short. Lower it for shorter chains, raise it for smaller runs.
        nelements_min: Tensors with fewer elements, and one-dimensional tensors, stay exact.

    Raises:
        UsageError: A field has an invalid value.
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

    def __repr__(self) -> str:
        named = NAMED_RESIDUALS.get(self.name)
        start = "Residual" if named is None else f"Residual.{self.name}"
        return f"{start}({changed_fields(self, None if named is None else named())})"

    def __post_init__(self) -> None:
        for bound in ("max_rel_rms", "max_abs", "bits_per_parameter"):
            value = getattr(self, bound)
            if value is not None:
                _check_bounds(self, bound, value, 0.0, 1e30)
        _check_one_of(self, "on_bound", self.on_bound, ("raise", "exact"))
        _check_bounds(self, "keyframe_every", self.keyframe_every, 1, 1 << 30)
        _check_bounds(self, "nelements_min", self.nelements_min, 1, 1 << 40)
        for rule in self.rules:
            is_rule = isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)
            if not is_rule or not (rule[1] == EXACT or isinstance(rule[1], TensorSettings)):
                raise UsageError(
                    "each rule must be a pair of a glob and TensorSettings or 'exact'",
                    where=f"Residual(rules={rule!r})",
                )

    def settings_for(self, paths: Iterable[str]) -> TensorSettings | Literal["exact"]:
        """Return the settings of the tensor that has these dotted paths."""
        words = list(paths)
        for glob, settings in self.rules:
            if any(_matches(path, glob) for path in words):
                return settings
        return self.tensors

    def names(self, path: str) -> bool:
        """Return True if a rule with a glob other than ``*`` says how the tensor at a dotted path is quantized."""
        glob, settings = next((rule for rule in self.rules if _matches(path, rule[0])), ("", EXACT))
        return bool(glob.strip("*?")) and settings != EXACT

    def globs_without(self, paths: Iterable[str]) -> list[str]:
        """Return the globs of the rules that match none of these dotted paths of leaves."""
        words = list(paths) if self.rules else []
        return [glob for glob, _ in self.rules if not any(_matches(path, glob) for path in words)]

    @staticmethod
    def near(**changes: object) -> Residual:
        """Return the fidelity for resuming, meant to train on like exact state: about 50 times smaller."""
        # Higher ranks cost more bytes than they save: near() of 96 / 96 / 64 in bench/resume_gap, see docs/BENCH.md.
        settings = TensorSettings(
            WeightSettings(step=0.5, low_rank=LowRank(step=0.7, rank_max=80, error_max=0.2)),
            FirstMomentSettings(step=0.5, low_rank=LowRank(step=0.15, rank_max=80, error_max=0.2)),
            SecondMomentSettings(low_rank=LowRank(step=0.25, rank_max=16, error_max=1.0)),
        )
        return _with_changes(Residual("near", settings), changes)

    @staticmethod
    def small(**changes: object) -> Residual:
        """Return the fidelity for history and evaluation, not for resuming: about 100 times smaller."""
        settings = TensorSettings(
            WeightSettings(step=2.0, low_rank=LowRank(step=1.5, error_max=0.6)),
            FirstMomentSettings(form="ternary", step=1.5, low_rank=LowRank(step=0.4, error_max=0.6)),
            SecondMomentSettings(low_rank=LowRank(step=1.0, error_max=1.0)),
        )
        return _with_changes(Residual("small", settings), changes)


def _matches(path: str, glob: str) -> bool:
    """Return True if a glob matches a leaf or a container around it."""
    return fnmatchcase(path, glob) or fnmatchcase(path, f"{glob}.*")


def _with_changes(residual: Residual, changes: dict[str, object]) -> Residual:
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
"""Fidelities that a policy can name by a word."""

_RESIDUALS = "a ckstore.Residual, such as ckstore.Residual.near() or .small()"

MEMORY_NBYTES_MIN = 56 * MIB
"""The smallest ``memory_nbytes_max`` that a policy accepts."""

STAGING_THREADS_MAX = 8
"""Eight threads saturate the memory bandwidth; more gain nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that readers enforce before they allocate memory. ``store.json`` records those of a store.

    Attributes:
        chunk_nbytes_max: Largest chunk.
        pack_nbytes_max: Largest pack.
        manifest_nbytes_max: Largest manifest.
        depth_max: Largest chain depth of a frame.
    """

    chunk_nbytes_max: int = 4 * MIB
    pack_nbytes_max: int = 64 * GIB
    manifest_nbytes_max: int = 1 * GIB
    depth_max: int = 64


@dataclass(frozen=True, slots=True)
class Policy:
    """How one commit is stored. Every default is safe.

    Args:
        compression: ``"none"`` stores plain bytes. ``"fast"`` splits floating-point numbers into byte planes and
            compresses the planes that shrink. ``"best"`` spends more CPU time for somewhat smaller packs; use it where
            storage costs more than CPU.
        delta: Store a tensor as its difference from the previous commit or the last keyframe, where a sample shows that
            this is smaller. Set it to False to store every new chunk without a base, for the fastest restores.
        read_amplification_max: How many bytes a restore may read, as a multiple of a checkpoint that is stored without
            deltas. Lower it for faster restores, raise it for smaller deltas.
        base_cache: Where delta bases come from. ``"none"`` reads them back from the store. ``"memory"`` keeps them in
            memory, up to the size of the state and twice that during a commit; use it where reading is slow. For a
            background commit the arena then holds one more state, and the saver keeps the last keyframe on its heap.
            ``Receipt.bytes_bases``, ``bytes_bases_peak`` and ``bytes_bases_staged`` report the memory used.
        base_cache_nbytes_max: Upper bound on the heap bytes of ``base_cache="memory"``; None: no bound. Bases that do
            not fit are read back from the store. A staged state larger than the bound is not kept in the arena either.
        fidelity: ``"exact"`` restores every bit. A ``Residual`` such as ``Residual.near()`` or ``Residual.small()`` is
            lossy within bounds that are measured and recorded; ``"near"`` and ``"small"`` are short for these two.
            With a journal every commit is exact, because steps are replayed from it.
        verify_encoded: Decode every frame and compare it with what was hashed, before the source bytes are released. If
            it is False, faulty memory or a faulty coder is found by a restore instead of by the commit.
        verify_restored: What a restore checks for each chunk: its ``"blake3"`` chunk id, or only the ``"xxh3"``
            checksum of the stored bytes, which is faster.
        threads: Threads that hash and compress; None: one per core, at most eight. Lower it to leave cores to training.
        memory_nbytes_max: Upper bound on buffers and scratch memory, at least 56 MiB. It does not include the state,
            cached bases, and samples (0.4% of the state each, for the last commit and for its keyframe). A commit uses
            at least one thread and three write buffers, even if that is more: up to 66 MiB, 74 MiB with ``delta``,
            122 MiB with a lossy ``fidelity``. The saver keeps its write buffers, at most 96 MiB, between commits.
        on_busy: What a background commit does while an earlier one is still being written. ``"wait"`` waits for it.
            ``"skip"`` stores nothing and reports that. ``"replace"`` replaces the staged commit that has not started;
            the arena then needs room for a second state, and without that room the commit waits. A commit that
            ``Pending.wait_staged`` or ``is_staged`` has reported as staged is never replaced.
        staging_threads: Threads that copy the state for a background commit while the caller waits; None: enough for
            the memory bandwidth, at most eight. Half of them copy the guarded tensors in the background until
            ``optimizer.step`` waits; with 1 or 2, that copying uses one core.
        arena_nbytes_max: Upper bound on the shared memory that states are staged in; None: the size of the state, once
            more with ``base_cache="memory"``, and once more with ``on_busy="replace"``.
        saver_nice: Nice value of the saver process, 0 to 19. Higher values leave more CPU to training and make commits
            slower; a new value takes effect when no commit is being written. With any value but 0 the saver uses one
            thread fewer than there are cores, and runs in the idle class while a state is copied. While the trainer
            waits for a commit (``result()``, ``close()``, a full arena), the saver runs at normal priority if the
            system allows it (root, ``ulimit -e``).
        debug_guard: Checksum the guarded tensors when the guard is entered and when they are copied. A commit whose
            state changed in between fails and names the tensor. Use it to find a missing guard; it reads device memory
            twice more while the trainer waits. The commit counts as staged only after the comparison: at the next
            optimizer step, at the next commit, or in ``Pending.wait_staged`` or ``result``. A trainer that is killed
            before then loses it. Memory between tensors that share storage is compared as well.

    Raises:
        UsageError: A field has an invalid value.
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

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        self._check_background()
        _check_one_of(self, "compression", self.compression, ("none", "fast", "best"))
        _check_one_of(self, "base_cache", self.base_cache, ("none", "memory"))
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
        self._resolve_fidelity()
        _check_one_of(self, "verify_restored", self.verify_restored, ("blake3", "xxh3"))
        if self.threads is not None and not 1 <= self.threads <= 256:
            raise UsageError("threads must be between 1 and 256", where=f"Policy(threads={self.threads!r})")
        if self.memory_nbytes_max < MEMORY_NBYTES_MIN:
            raise UsageError(
                "memory_nbytes_max must be at least 56 MiB",
                where=f"Policy(memory_nbytes_max={self.memory_nbytes_max!r})",
            )

    def _resolve_fidelity(self) -> None:
        if isinstance(self.fidelity, Residual) or self.fidelity == "exact":
            return
        if not isinstance(self.fidelity, str) or self.fidelity not in NAMED_RESIDUALS:
            raise UsageError(
                f"fidelity must be 'exact', 'near', 'small', or {_RESIDUALS}",
                where=f"Policy(fidelity={self.fidelity!r})",
            )
        # The dataclass is frozen, so the name is replaced by its Residual through object.__setattr__.
        object.__setattr__(self, "fidelity", NAMED_RESIDUALS[self.fidelity]())

    def _check_background(self) -> None:
        _check_one_of(self, "on_busy", self.on_busy, ("wait", "skip", "replace"))
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
        """The lossy fidelity, or None for an exact policy."""
        return self.fidelity if isinstance(self.fidelity, Residual) else None

    @property
    def thread_count(self) -> int:
        """Threads that hash and compress."""
        if self.threads is not None:
            return self.threads
        return max(1, min(8, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class RepackPolicy:
    """How ``repack`` stores the checkpoints of a run.

    Args:
        keyframes: How many of the newest checkpoints are stored without a base, so that they restore fastest.
        compression: ``"fast"``, or ``"best"`` for more CPU time and somewhat smaller packs.
        read_amplification_max: How many bytes a restore of an older checkpoint may read, as a multiple of a keyframe.
        saving_min: Share of its bytes that rewriting a checkpoint must save: bytes on disk, and for the newest ones
            bytes that a restore reads. A checkpoint that would save less is not rewritten.

    Raises:
        UsageError: A field has an invalid value.
    """

    keyframes: int = 1
    compression: Literal["fast", "best"] = "fast"
    read_amplification_max: float = 1.6
    saving_min: float = 0.03

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        _check_one_of(self, "compression", self.compression, ("fast", "best"))
        _check_range(self, "keyframes", self.keyframes, 0, 1_000_000)
        _check_range(self, "read_amplification_max", self.read_amplification_max, 1, 1000)
        _check_range(self, "saving_min", self.saving_min, 0, 1)


DemotedForm = Literal["lossy", "replay"]


@dataclass(frozen=True, slots=True)
class DemotePolicy:
    """Which checkpoints of a run ``demote`` rewrites as lossy ones. It never rewrites the newest one or tagged ones.

    Args:
        keep_newest: This many of the newest checkpoints stay exact, at least 1.
        keep_every: Of the older ones, checkpoints whose seq is a multiple of this stay exact; 0: none.
        fidelity: How the rest is stored. The default, ``Residual.near()``, is meant for resuming.
        compression: Compression of the tensors that stay exact: ``"fast"``, or ``"best"`` for more CPU time.
        saving_min: Share of its bytes that demoting a checkpoint must save; otherwise it stays exact.
        form: ``"lossy"``, or ``"replay"``: nothing but hashes of the tensors is kept, and your training code makes the
            checkpoint again, bit for bit, from one that stays whole. ``demote(replay=...)`` proves that first.

    Raises:
        UsageError: A field has an invalid value.
    """

    keep_newest: int = 3
    keep_every: int = 10
    fidelity: Residual = field(default_factory=Residual.near)
    compression: Literal["fast", "best"] = "fast"
    saving_min: float = 0.03
    form: DemotedForm = "lossy"

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        if not isinstance(self.fidelity, Residual):
            raise UsageError(f"fidelity must be {_RESIDUALS}", where=f"DemotePolicy(fidelity={self.fidelity!r})")
        _check_one_of(self, "compression", self.compression, ("fast", "best"))
        _check_one_of(self, "form", self.form, ("lossy", "replay"))
        _check_range(self, "keep_newest", self.keep_newest, 1, 1_000_000)
        _check_range(self, "keep_every", self.keep_every, 0, 1_000_000)
        _check_range(self, "saving_min", self.saving_min, 0, 1)


def _check_range(settings: object, field: str, given: float, least: float, most: float) -> None:
    if not least <= given <= most:
        where = f"{type(settings).__name__}({field}={given!r})"
        raise UsageError(f"{field} must be between {least} and {most}", where=where)


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
_KIND_KEY = "kind"
_DELETED_KINDS = ("PrunedMoments", "PrunedWeights")
"""Settings of ExCP, which is no longer written. The ``config.json`` of an older store can name them."""


def policy_row(policy: Policy) -> dict[str, Any]:
    """Return a policy as a dict of plain values."""
    return {field.name: plain_of(getattr(policy, field.name)) for field in dataclasses.fields(policy)}


def policy_of(row: Mapping[str, Any], *, where: object = None) -> Policy:
    """Return the policy that ``policy_row`` has written.

    Raises:
        MalformedError: It has an unknown field or an invalid value.
    """
    try:
        return Policy(**{name: value_of(value) for name, value in row.items()})
    except (UsageError, TypeError, KeyError, AttributeError) as problem:
        raise MalformedError(f"a policy cannot be read ({problem})", where=where) from None


def plain_of(value: Any) -> Any:
    """Return a setting as plain values: a dataclass becomes a dict with its class name, a tuple becomes a list."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        facts = {field.name: plain_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_KIND_KEY: type(value).__name__, **facts}
    return [plain_of(part) for part in value] if isinstance(value, tuple) else value


def value_of(row: Any) -> Any:
    """Return the setting that ``plain_of`` has written.

    Raises:
        KeyError: The class is unknown.
        TypeError: A field is unknown.
        UsageError: A value is invalid, or the class was removed.
    """
    if isinstance(row, Mapping):
        if row[_KIND_KEY] in _DELETED_KINDS:
            raise UsageError(f"{row[_KIND_KEY]} no longer exists; use Residual.near() or Residual.small()")
        facts = {name: value_of(value) for name, value in row.items() if name != _KIND_KEY}
        return _KINDS[row[_KIND_KEY]](**facts)
    return tuple(value_of(part) for part in row) if isinstance(row, list | tuple) else row


STEP_MAX = 10**18 - 1

NameKind = Literal["run", "tag", "tier"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_name(name: str, kind: NameKind) -> str:
    """Return ``name`` if it is a valid name of a run, a tag or a tier.

    A tag cannot be ``latest`` or consist of digits, because these are other kinds of references.

    Raises:
        UsageError: The name is not valid.
    """
    if not isinstance(name, str) or not is_name(name):
        raise UsageError(
            f"not a valid {kind} name: it must match [A-Za-z0-9][A-Za-z0-9._-]{{0,127}} and not contain '..'",
            where=repr(name)[:200],
            todo="choose another name",
        )
    if kind == "tag" and (name == "latest" or name.isdigit()):
        raise UsageError(
            f"a tag cannot be named {name!r}, because that is another kind of reference",
            where=repr(name),
            todo="choose another",
        )
    return name


def is_name(name: str) -> bool:
    """Return True if ``name`` has only characters that a run, a tag or a tier may have."""
    return _NAME.fullmatch(name) is not None and ".." not in name


METRICS_NBYTES_MAX = 48 << 10
"""Bytes of metric names and values together, so that they fit into the 64 KiB header of a manifest."""


def check_step(step: SupportsIndex) -> int:
    """Return the step as an int; raise UsageError if it is not an integer or out of range."""
    if isinstance(step, bool):
        raise UsageError("a step must be an integer", where=f"step={shown_object(step)}")
    try:
        number = operator.index(step)
    except TypeError:
        raise UsageError("a step must be an integer", where=f"step={shown_object(step)}") from None
    if not 0 <= number <= STEP_MAX:
        raise UsageError(f"a step must be between 0 and {STEP_MAX}", where=f"step={shown_object(step)}")
    return number


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as plain floats; raise UsageError for invalid names and values."""
    checked: dict[str, float] = {}
    if (
        sum(len(name.encode(errors="replace")) + 12 for name in metrics or () if isinstance(name, str))
        > METRICS_NBYTES_MAX
    ):
        raise UsageError(f"there are more than {METRICS_NBYTES_MAX} bytes of metrics", todo="put them into the state")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not 0 < len(name) <= 128 or ":" in name or not _is_unicode(name):
            raise UsageError(
                "a metric name must be Unicode text of 1 to 128 characters without ':'", where=shown_object(name)
            )
        try:
            # float() would accept a string, but a string here is more likely a mistake.
            if isinstance(value, (str, bytes)):
                raise TypeError
            checked[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            shown = shown_object(value)[:80]
            raise UsageError("a metric must be a number", where=f"metrics[{name!r}] = {shown}") from None
    return checked


def _is_unicode(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def check_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Return tags as a tuple (a single string is one tag); raise UsageError for invalid names."""
    return tuple(check_name(name, "tag") for name in ((tags,) if isinstance(tags, str) else tags))


def check_policy(policy: object) -> None:
    """Raise UsageError if ``policy`` is neither a Policy nor None."""
    if policy is not None and not isinstance(policy, Policy):
        shown = shown_object(policy)[:80]
        raise UsageError(
            "policy must be a ckstore.Policy",
            where=f"policy={shown}",
            todo="pass ckstore.Policy(...)",
        )
