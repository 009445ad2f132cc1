"""How each tensor of a checkpoint is coded, what it takes, and how that compares with its order-0 entropy.

``coding_of`` reads the headers of frames. ``stats_of`` also decodes every chunk and measures the entropy of its byte
planes: without a base and, for deltas, of the difference. Entropy is what a coder needs that uses one frequency table
per plane and chunk. It is a yardstick, not a limit: coders that adapt within a chunk, or find repeats, need less. It is
measured on a sample of each chunk, or on all elements.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.chunk_codec import CODECS, QUANTIZED_STEPS
from ckstore.concurrency import Turns, run_in_turns
from ckstore.config import Limits, Policy
from ckstore.display import repr_of_summary
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, decode_frame_header
from ckstore.format.location import StorageDecision
from ckstore.format.manifest import ChunkSpec, FrameRef, Manifest
from ckstore.format.tree import Path, TensorNode, format_path, leaves_of
from ckstore.hashing import ChunkId, PackId
from ckstore.io.backend import ReadFile
from ckstore.ops.stored_checkpoint import StoredState, stored_state
from ckstore.results import Info
from ckstore.store.memory_budget import MEASURE
from ckstore.store.pack_reader import open_pack
from ckstore.store.replay_bases import require_stored
from ckstore.store.repository import Repository

CodingKind = Literal["plain", "coded", "delta", "rounded", "quantized"]

NAMES = {
    chunk_codec.DELTA_ID: chunk_codec.DELTA_NAME,
    chunk_codec.ROUNDED_ID: chunk_codec.ROUNDED_NAME,
    **{codec_id: codec.name for codec_id, codec in CODECS.items()},
    **QUANTIZED_STEPS,
}


@dataclass(frozen=True, slots=True)
class ChunkCoding:
    """How one chunk is stored.

    Args:
        steps: Names of the codecs in the order in which they were applied, joined by ``+``; ``"plain"`` for none.
        kind: Without a base, or how the base is used.
        frame: Its location and chain depth.
        frame_nbytes: Bytes of the frame.
    """

    steps: str
    kind: CodingKind
    frame: FrameRef
    frame_nbytes: int


@dataclass(frozen=True, slots=True)
class TensorCoding:
    """How one tensor is stored. Of tensors that share memory only the first is listed.

    Attributes:
        path: Its dotted path.
        dtype: Its element type.
        elements: Number of elements.
        nbytes: Plain bytes.
        stored_nbytes: Its share of the frames of its chunks.
        mode: The decision recorded for it: ``"full"``, ``"delta"``, ``"derived"``, ``"identical"`` (nothing was
            written), ``"residual"`` (with a loss) or ``"unsampled"``. Without a record, the forms of its chunks.
        steps: The codecs of its chunks, each combination once.
        depth: Largest chain depth of its chunks.
        full_bits: Estimated bits per element without a base; None if not estimated.
        previous_bits: The same against the previous checkpoint.
        keyframe_bits: The same against the keyframe.
    """

    path: str
    dtype: str
    elements: int
    nbytes: int
    stored_nbytes: int
    mode: str
    steps: tuple[str, ...]
    depth: int
    full_bits: float | None
    previous_bits: float | None
    keyframe_bits: float | None

    @property
    def stored_bits(self) -> float:
        """Stored bits per element."""
        return 8 * self.stored_nbytes / max(1, self.elements)


@dataclass(frozen=True, slots=True)
class Coding:
    """How a checkpoint is coded.

    Attributes:
        info: The checkpoint.
        base: ``"none"``, ``"previous"`` or ``"keyframe"``; empty if the manifest does not say.
        base_seq: The checkpoint whose chunks serve as bases.
        keyframe_seq: The keyframe of its chain.
        reason: Why, in a sentence.
        tensors: In the order of the state.
    """

    info: Info
    base: str
    base_seq: int | None
    keyframe_seq: int | None
    reason: str
    tensors: tuple[TensorCoding, ...]

    __repr__ = repr_of_summary


def coding_of(repository: Repository, manifest: Manifest, info: Info) -> Coding:
    """Read the frame headers of a checkpoint's chunks, and combine them with the decisions in the manifest.

    Raises:
        CorruptError: A header is damaged, or a pack is missing.
    """
    require_stored(manifest, repository.backend.root, what="measured")
    chunks = chunk_codings(repository, manifest)
    decisions = manifest.decisions
    tensors = tuple(
        _tensor_coding(manifest, path, storage, tensor, chunks) for path, storage, tensor in first_tensors(manifest)
    )
    if decisions is None:
        return Coding(info, "", None, None, "", tensors)
    return Coding(info, decisions.base, decisions.base_seq, decisions.keyframe_seq, decisions.reason, tensors)


def first_tensors(manifest: Manifest) -> Iterator[tuple[Path, int, int]]:
    """Yield, for each storage, the first tensor that views it: path, storage index, tensor index."""
    seen: set[int] = set()
    for path, leaf in leaves_of(manifest.tree):
        if isinstance(leaf, TensorNode):
            storage = manifest.tensors[leaf.tensor].storage
            if storage not in seen:
                seen.add(storage)
                yield path, storage, leaf.tensor


def chunk_codings(repository: Repository, manifest: Manifest) -> list[ChunkCoding]:
    """Read the header of each chunk's frame. Results have the order of the manifest's chunks."""
    frame_of = {frame.chunk_id: frame for frame in manifest.frames}
    frames = [frame_of[ChunkId(chunk.chunk_id)] for chunk in manifest.chunks]
    headers = dict(_headers(repository, manifest, frames))
    return [_chunk_coding(frame, headers[frame.chunk_id]) for frame in frames]


def _headers(
    repository: Repository, manifest: Manifest, frames: Iterable[FrameRef]
) -> Iterator[tuple[ChunkId, FrameHeader]]:
    files: dict[PackId, ReadFile] = {}
    try:
        for frame in sorted(frames, key=lambda frame: (frame.pack, frame.offset)):
            pack = manifest.packs[frame.pack]
            if pack.pack_id not in files:
                files[pack.pack_id] = open_pack(repository, pack)
            file = files[pack.pack_id]
            where = f"{file.name}, offset {frame.offset}"
            content = file.read_at(frame.offset, FRAME_HEADER_NBYTES)
            yield frame.chunk_id, decode_frame_header(content, limits=repository.limits, where=where)
    finally:
        for file in files.values():
            file.close()


def _chunk_coding(frame: FrameRef, header: FrameHeader) -> ChunkCoding:
    ids = [codec_id for codec_id, _ in header.steps]
    kind: CodingKind = "coded" if ids else "plain"
    if ids[:1] == [chunk_codec.DELTA_ID]:
        kind = "delta"
    elif ids[:1] == [chunk_codec.ROUNDED_ID]:
        kind = "rounded"
    elif ids and ids[0] in QUANTIZED_STEPS:
        kind = "quantized"
    steps = "+".join(NAMES.get(codec_id, f"codec {codec_id}") for codec_id in ids)
    return ChunkCoding(steps or "plain", kind, frame, frame.frame_nbytes)


_MODES = {"plain": "full", "coded": "full", "delta": "delta", "rounded": "derived", "quantized": "residual"}


def _tensor_coding(
    manifest: Manifest, path: Path, storage: int, tensor: int, chunks: Sequence[ChunkCoding]
) -> TensorCoding:
    spec = manifest.storages[storage]
    codings = [chunks[piece.chunk] for piece in spec.pieces]
    shares = (
        coding.frame_nbytes * piece.nbytes / manifest.chunks[piece.chunk].nbytes
        for coding, piece in zip(codings, spec.pieces, strict=True)
    )
    choice = manifest.decisions.storages[storage] if manifest.decisions is not None else None
    forms = sorted({_MODES[coding.kind] for coding in codings})
    choice = choice or StorageDecision(0)
    return TensorCoding(
        path=format_path(path),
        dtype=manifest.tensors[tensor].dtype,
        elements=spec.nbytes // spec.element_width,
        nbytes=spec.nbytes,
        stored_nbytes=round(sum(shares)),
        mode=choice.mode_name if choice.mode else " and ".join(forms) or "empty",
        steps=tuple(sorted({coding.steps for coding in codings})),
        depth=max((coding.frame.depth for coding in codings), default=0),
        full_bits=choice.full_bits,
        previous_bits=choice.previous_bits,
        keyframe_bits=choice.keyframe_bits,
    )


@dataclass(frozen=True, slots=True)
class Share:
    """What a set of tensors takes.

    Attributes:
        elements: Number of elements.
        nbytes: Plain bytes.
        stored_nbytes: Bytes of frames.
        full_nbytes: Entropy without a base, in bytes.
        bound_nbytes: Entropy in bytes, for each chunk the lower of without and with its base.
    """

    elements: int
    nbytes: int
    stored_nbytes: int
    full_nbytes: float
    bound_nbytes: float

    @property
    def stored_bits(self) -> float:
        """Stored bits per element."""
        return 8 * self.stored_nbytes / max(1, self.elements)

    @property
    def full_bits(self) -> float:
        """Entropy without a base, in bits per element."""
        return 8 * self.full_nbytes / max(1, self.elements)

    @property
    def bound_bits(self) -> float:
        """The lower entropy, in bits per element."""
        return 8 * self.bound_nbytes / max(1, self.elements)


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor. Of tensors that share memory only the first is listed.

    Attributes:
        coding: How it is stored.
        share: What it takes.
        delta_bits: Entropy of its delta in bits per element; None if it has no base.
    """

    coding: TensorCoding
    share: Share
    delta_bits: float | None


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The tensors of a group: those under one first key, with optimizer state split by kind of moment."""

    key: str
    tensor_count: int
    share: Share
    modes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """What each tensor of a checkpoint takes.

    Attributes:
        info: The checkpoint.
        coding: How it is coded, and why.
        is_exact: Entropy was measured on all elements, not on samples.
        groups: In the order of the state.
        tensors: In the order of the state.
        total: All tensors together.
    """

    info: Info
    coding: Coding
    is_exact: bool
    groups: tuple[GroupStats, ...]
    tensors: tuple[TensorStats, ...]
    total: Share

    __repr__ = repr_of_summary


@dataclass(frozen=True, slots=True)
class _Bound:
    """Entropy of one chunk in bits per element: without a base, and of its delta."""

    full: float
    delta: float | None = None

    @property
    def least(self) -> float:
        """The lower of the two."""
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
    """Decode every chunk of a checkpoint and measure its entropy.

    Args:
        repository: The store.
        manifest: The checkpoint.
        info: Facts about it.
        policy: Threads and memory.
        is_exact: Measure every element instead of a sample.
        on_progress: Called with plain bytes done and the total.

    Raises:
        CorruptError: Part of it is damaged.
    """
    require_stored(manifest, repository.backend.root, what="measured")
    codings = chunk_codings(repository, manifest)
    coding = coding_of(repository, manifest, info)
    bounds = _Measurement(repository, manifest, codings, is_exact, on_progress).run(policy)
    tensors = tuple(
        _tensor_stats(manifest, storage, row, bounds)
        for (_, storage, _), row in zip(first_tensors(manifest), coding.tensors, strict=True)
    )
    paths = [path for path, _, _ in first_tensors(manifest)]
    total = _sum(tensor.share for tensor in tensors)
    return Stats(info, coding, is_exact, tuple(_groups(paths, tensors)), tensors, total)


@dataclass(slots=True)
class _Measurement:
    repository: Repository
    manifest: Manifest
    codings: Sequence[ChunkCoding]
    is_exact: bool
    on_progress: Callable[[int, int], None] | None
    _bounds: dict[int, _Bound] = field(init=False, default_factory=dict)

    def run(self, policy: Policy) -> list[_Bound]:
        """Measure every chunk, with as many threads as the policy's memory allows."""
        chunks, limits = self.manifest.chunks, self.repository.limits
        # Read in the order of packs and offsets.
        order = sorted(range(len(chunks)), key=lambda i: (self.codings[i].frame.pack, self.codings[i].frame.offset))
        thread_count = MEASURE.fit_threads(policy, limits)
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


class _Probe:
    """Measure the entropy of byte planes. Used by one thread."""

    def __init__(self, limits: Limits, *, is_exact: bool) -> None:
        nbytes_max = limits.chunk_nbytes_max if is_exact else chunk_codec.SAMPLE_NBYTES
        self._is_exact = is_exact
        self._planes = memoryview(bytearray(nbytes_max))
        self._sample = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))
        self._base_sample = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))
        self._counts = np.zeros(256, np.uint32)

    def full_bits(self, plain: memoryview, chunk: ChunkSpec) -> float:
        """Return the entropy of a chunk without a base, in bits per element."""
        width = chunk.element_width
        taken = self._sampled(plain, width, self._sample)
        planes = self._planes[: len(taken)]
        kernels.split_planes(taken, planes, width, chunk.is_float and width > 1)
        return self._entropy(planes, width)

    def delta_bits(self, plain: memoryview, base: memoryview, chunk: ChunkSpec) -> float:
        """Return the entropy of a chunk minus its base, in bits per element."""
        width = chunk.element_width
        taken, base_taken = self._sampled(plain, width, self._sample), self._sampled(base, width, self._base_sample)
        planes = self._planes[: len(taken)]
        kernels.split_delta(taken, base_taken, planes, width, chunk.is_float)
        return self._entropy(planes, width)

    def _sampled(self, plain: memoryview, width: int, sample: memoryview) -> memoryview:
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
    # Correct the bias of a small sample, which underestimates entropy (Miller and Madow).
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
    """Return the group of a tensor: its first key; below an optimizer's ``state``, the kind of moment.

    ``model.layers.0.weight`` is in group ``model``, ``optimizer.state.7.exp_avg`` in ``optimizer.state.*.exp_avg``.
    """
    for index, key in enumerate(path[:-2]):
        if key == "state":
            return format_path((*path[: index + 1], "*", path[-1]))
    return format_path(path[:1])
