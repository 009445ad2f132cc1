"""Where the bytes of a checkpoint go: for each tensor and group what it takes, beside its order-0 entropy.

The entropy is that of the byte planes of each chunk, whole and, where it has a base, of the difference: what a coder
needs that counts the bytes of a plane once for all of the chunk. It is a yardstick and not a limit: coders that count
anew within a chunk, or find repeats and runs, need less. It is taken from a sample of each chunk, or from all elements.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckstore.codec import chunk_codec, kernels
from ckstore.concurrency import Turns, run_in_turns
from ckstore.config import Limits, Policy, fit_memory
from ckstore.format.manifest import ChunkSpec, Manifest
from ckstore.format.tree import Path, format_path
from ckstore.ops.inspect.coding import ChunkCoding, Coding, TensorCoding, chunk_codings, coding_of, first_tensors
from ckstore.ops.stored_checkpoint import StoredState, reader_nbytes, stored_state
from ckstore.results import Info
from ckstore.store.repository import Repository


@dataclass(frozen=True, slots=True)
class Share:
    """What some tensors take together; bits are per element.

    Attributes:
        elements: How many elements.
        nbytes: Plain bytes.
        stored_nbytes: Bytes of frames.
        full_nbytes: Bytes at the bound without a base.
        bound_nbytes: Bytes at the bound in the better form of each chunk: whole, or against its base.
    """

    elements: int
    nbytes: int
    stored_nbytes: int
    full_nbytes: float
    bound_nbytes: float

    @property
    def stored_bits(self) -> float:
        """Bits per element, as stored."""
        return 8 * self.stored_nbytes / max(1, self.elements)

    @property
    def full_bits(self) -> float:
        """Bits per element at the bound without a base."""
        return 8 * self.full_nbytes / max(1, self.elements)

    @property
    def bound_bits(self) -> float:
        """Bits per element at the bound."""
        return 8 * self.bound_nbytes / max(1, self.elements)


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor; of tensors that share memory only the first is listed.

    Attributes:
        delta_bits: Bits per element at the bound against the base; None where it has none.
    """

    coding: TensorCoding
    share: Share
    delta_bits: float | None


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The tensors of a group: a first key of the state, and what the optimizer keeps by its kind."""

    key: str
    tensor_count: int
    share: Share
    modes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """Where the bytes of a checkpoint go.

    Attributes:
        info: Which checkpoint.
        coding: How it is coded, and why.
        is_exact: Bounds were taken from all elements, not from samples.
        groups: In the order of the state.
        tensors: In the order of the state.
        total: All of them.
    """

    info: Info
    coding: Coding
    is_exact: bool
    groups: tuple[GroupStats, ...]
    tensors: tuple[TensorStats, ...]
    total: Share


@dataclass(frozen=True, slots=True)
class _Bound:
    """Bits per element of one chunk: whole, and less its base."""

    full: float
    delta: float | None = None

    @property
    def least(self) -> float:
        """The better of the two."""
        return self.full if self.delta is None else min(self.full, self.delta)


_NOTHING = _Bound(0.0)


def stats_of(
    repository: Repository,
    manifest: Manifest,
    info: Info,
    policy: Policy,
    *,
    is_exact: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Stats:
    """Decode every chunk of a checkpoint and measure it.

    Args:
        repository: The store.
        manifest: The checkpoint.
        info: What is known of it.
        policy: Threads and memory.
        is_exact: Look at every element instead of a sample.
        on_progress: Called with plain bytes done and plain bytes in all.

    Raises:
        CorruptError: Something of it is damaged.
    """
    codings = chunk_codings(repository, manifest)
    coding = coding_of(repository, manifest, info)
    bounds = _Measuring(repository, manifest, codings, is_exact, on_progress).run(policy)
    tensors = tuple(
        _tensor_stats(manifest, storage, row, bounds)
        for (_, storage, _), row in zip(first_tensors(manifest), coding.tensors, strict=True)
    )
    paths = [path for path, _, _ in first_tensors(manifest)]
    total = _sum(tensor.share for tensor in tensors)
    return Stats(info, coding, is_exact, tuple(_groups(paths, tensors)), tensors, total)


@dataclass(slots=True)
class _Measuring:
    repository: Repository
    manifest: Manifest
    codings: Sequence[ChunkCoding]
    is_exact: bool
    on_progress: Callable[[int, int], None] | None
    _bounds: dict[int, _Bound] = field(init=False, default_factory=dict)

    def run(self, policy: Policy) -> list[_Bound]:
        """Measure every chunk, on as many threads as the policy and its memory allow."""
        chunks, limits = self.manifest.chunks, self.repository.limits
        # What the store reads lies together: by pack and offset.
        order = sorted(range(len(chunks)), key=lambda i: (self.codings[i].frame.pack, self.codings[i].frame.offset))
        thread_count, _ = fit_memory(
            policy.thread_count,
            _thread_nbytes(limits),
            1,
            buffers_wanted=0,
            buffers_min=0,
            memory_nbytes_max=policy.memory_nbytes_max,
        )
        probes: list[_Probe | None] = [None] * thread_count
        total, done, counting = sum(chunk.nbytes for chunk in chunks), [0], threading.Lock()
        with stored_state(self.repository, self.manifest) as state:

            def step(turn: int, thread: int) -> None:
                index = order[turn]
                probe = probes[thread] = probes[thread] or _Probe(limits, is_exact=self.is_exact)
                self._bounds[index] = self._measure(state, index, probe)
                with counting:
                    done[0] += chunks[index].nbytes
                    if self.on_progress is not None:
                        self.on_progress(done[0], total)

            run_in_turns(len(order), thread_count, step, Turns(), on_failure=lambda: None)
        return [self._bounds[index] for index in range(len(chunks))]

    def _measure(self, state: StoredState, index: int, probe: _Probe) -> _Bound:
        chunk, coding = self.manifest.chunks[index], self.codings[index]
        if coding.kind == "rounded":
            return _NOTHING
        plain = state.chunk(index)
        full = probe.full_bits(plain, chunk)
        if coding.kind != "delta":
            return _Bound(full)
        return _Bound(full, probe.delta_bits(plain, state.base(index), chunk))


def _thread_nbytes(limits: Limits) -> int:
    return reader_nbytes(limits) + limits.chunk_nbytes_max


class _Probe:
    """Measures the entropy of byte planes; belongs to one thread."""

    def __init__(self, limits: Limits, *, is_exact: bool) -> None:
        nbytes_max = limits.chunk_nbytes_max if is_exact else chunk_codec.SAMPLE_NBYTES
        self._is_exact = is_exact
        self._planes = memoryview(bytearray(nbytes_max))
        self._sample = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))
        self._base_sample = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))
        self._counts = np.zeros(256, np.uint32)

    def full_bits(self, plain: memoryview, chunk: ChunkSpec) -> float:
        """Return bits per element of a chunk without a base."""
        width = chunk.element_width
        taken = self._taken(plain, width, self._sample)
        planes = self._planes[: len(taken)]
        kernels.split_planes(taken, planes, width, chunk.is_float and width > 1)
        return self._entropy(planes, width)

    def delta_bits(self, plain: memoryview, base: memoryview, chunk: ChunkSpec) -> float:
        """Return bits per element of a chunk less its base."""
        width = chunk.element_width
        taken, base_taken = self._taken(plain, width, self._sample), self._taken(base, width, self._base_sample)
        planes = self._planes[: len(taken)]
        kernels.split_delta(taken, base_taken, planes, width, chunk.is_float)
        return self._entropy(planes, width)

    def _taken(self, plain: memoryview, width: int, sample: memoryview) -> memoryview:
        return plain if self._is_exact else sample[: chunk_codec.sample_of(plain, width, sample)]

    def _entropy(self, planes: memoryview, width: int) -> float:
        count = len(planes) // width
        bits = 0.0
        for index in range(width):
            kernels.histogram(planes[index * count : (index + 1) * count], self._counts.data.cast("B"))
            bits += _entropy_of(self._counts[self._counts > 0], count, is_sample=not self._is_exact)
        return bits


def _entropy_of(counts: np.ndarray[tuple[int], np.dtype[np.uint32]], count: int, *, is_sample: bool) -> float:
    shares = counts / count
    bits = float(-(shares * np.log2(shares)).sum())
    if not is_sample:
        return bits
    # A sample of a few thousand looks less random than it is (Miller and Madow).
    return min(8.0, bits + (len(counts) - 1) / (2 * count * math.log(2)))


def _tensor_stats(manifest: Manifest, storage: int, coding: TensorCoding, bounds: Sequence[_Bound]) -> TensorStats:
    pieces = [
        (bounds[piece.chunk], piece.nbytes // manifest.chunks[piece.chunk].element_width)
        for piece in manifest.storages[storage].pieces
    ]
    share = Share(
        elements=coding.elements,
        nbytes=coding.nbytes,
        stored_nbytes=coding.stored_nbytes,
        full_nbytes=sum(bound.full * elements for bound, elements in pieces) / 8,
        bound_nbytes=sum(bound.least * elements for bound, elements in pieces) / 8,
    )
    deltas = [(bound.delta, elements) for bound, elements in pieces if bound.delta is not None]
    mean = sum(bits * elements for bits, elements in deltas) / max(1, sum(elements for _, elements in deltas))
    return TensorStats(coding, share, mean if deltas else None)


def _sum(shares: Iterable[Share]) -> Share:
    rows = list(shares)
    return Share(
        elements=sum(row.elements for row in rows),
        nbytes=sum(row.nbytes for row in rows),
        stored_nbytes=sum(row.stored_nbytes for row in rows),
        full_nbytes=sum(row.full_nbytes for row in rows),
        bound_nbytes=sum(row.bound_nbytes for row in rows),
    )


def _groups(paths: Sequence[Path], tensors: Sequence[TensorStats]) -> Iterable[GroupStats]:
    members: dict[str, list[TensorStats]] = {}
    for path, tensor in zip(paths, tensors, strict=True):
        members.setdefault(group_of(path), []).append(tensor)
    for key, rows in members.items():
        modes = tuple(sorted({row.coding.mode for row in rows}))
        yield GroupStats(key, len(rows), _sum(row.share for row in rows), modes)


def group_of(path: Path) -> str:
    """Return the group of a tensor: its first key, and below an optimizer's ``state`` the kind of moment.

    ``model.layers.0.weight`` is of ``model``, ``optimizer.state.7.exp_avg`` of ``optimizer.state.*.exp_avg``.
    """
    for index, key in enumerate(path[:-2]):
        if key == "state":
            return format_path((*path[: index + 1], "*", path[-1]))
    return format_path(path[:1])
