"""Baselines for residuals: ExCP as published, plain block-wise quantization, and reference points.

ExCP (Li et al., ICML 2024) is implemented from its paper and code, with an ideal order-0 entropy coder that the
original does not have. Each code counts only where the others leave it open: moments only where the weight was kept,
and second moments only where first ones were. Variants: ``factor`` is the multiple of the median below which a change
is pruned, 2.5 or ``min(2.5, alpha / sqrt(mean(v)))``. Codebooks are fp32 (the code uses fp16, in which small second
moments vanish). K-means uses Lloyd's iteration on a histogram. ``ExcpInFrames`` encodes the result like ckstore's
residuals (``excp.py``).

A baseline maps a state to another one, given the reconstruction of the previous checkpoint, and returns the number of
bits by role. Tensors of one dimension always stay exact and are counted with ``EXACT_BITS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench import excp
from bench.resume_training import ROLES
from bench.training import Arrays
from ckstore.codec.byte_codecs import Scratch
from ckstore.quant.chunk_codec import QuantizedChunk
from ckstore.quant.geometry import ChunkShape

Bits = dict[str, float]
"""Role (``w``, ``m``, ``v``) or ``exact`` -> bits of a whole state."""
Maker = Callable[[Arrays, Arrays], tuple[Arrays, Bits]]
"""(state, the previous reconstruction) -> (reconstruction, bits)."""

EXACT_BITS = 66.0
"""Bits of a parameter and its moments, stored exactly by the lossless coder."""
CODEBOOK_BITS = 32
BLOCK = 256
HISTOGRAM_BINS = 8192
LLOYD_STEPS = 25
CHUNK_NELEMENTS = 1 << 20
"""Elements of fp32 in a chunk of a store with default limits."""


def names_of(state: Arrays) -> list[str]:
    """Return the names of the parameters."""
    return [path[2:] for path in state if path.startswith("w/")]


def is_exact(values: np.ndarray) -> bool:
    """Return whether every policy stores this tensor exactly."""
    return values.ndim < 2


def entropy_bits(codes: np.ndarray) -> float:
    """Return the bits of codes under their own frequencies, including a table of 16 bits per symbol."""
    if codes.size == 0:
        return 0.0
    counts = np.bincount(codes.reshape(-1).astype(np.int64))
    counts = counts[counts > 0]
    return float(counts @ np.log2(counts.sum() / counts)) + 16.0 * counts.size


def clusters(values: np.ndarray, count: int) -> np.ndarray:
    """Return the centers of one-dimensional k-means, by Lloyd's iteration on a histogram."""
    low, high = float(values.min()), float(values.max())
    weights, edges = np.histogram(values, HISTOGRAM_BINS, range=(low, high))
    middles = (edges[1:] + edges[:-1]) / 2
    below = np.concatenate([[0], np.cumsum(weights)])
    moments = np.concatenate([[0.0], np.cumsum(weights * middles)])
    centres = np.interp((np.arange(count) + 0.5) / count * below[-1], below[1:], middles)
    for _ in range(LLOYD_STEPS):
        cuts = np.searchsorted(middles, (centres[1:] + centres[:-1]) / 2)
        first, last = np.concatenate([[0], cuts]), np.concatenate([cuts, [middles.size]])
        members = below[last] - below[first]
        means = (moments[last] - moments[first]) / np.maximum(members, 1)
        centres = np.sort(np.where(members > 0, means, centres))
    found: np.ndarray = centres.astype(np.float32)
    return found


@dataclass(frozen=True)
class Excp:
    """The published method.

    Args:
        factor: The multiple of the median that a change must exceed, or its maximum if there is an alpha.
        alpha: The multiple is this divided by the root of the mean second moment.
        beta: First moments of at most this many times their mean magnitude are pruned.
        levels: Levels of a codebook, without zero.
    """

    factor: float = 2.5
    alpha: float | None = None
    beta: float = 2.0
    levels: int = 15

    def __call__(self, state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
        """Prune, cluster, and count bits."""
        made: Arrays = {}
        bits: Bits = dict.fromkeys((*ROLES, "exact"), 0.0)
        for name in names_of(state):
            weight, first, second = (state[f"{role}/{name}"] for role in ROLES)
            if is_exact(weight):
                made |= {f"{role}/{name}": state[f"{role}/{name}"] for role in ROLES}
                bits["exact"] += EXACT_BITS * weight.size
                continue
            change = weight - before[f"w/{name}"]
            factor = self.factor
            if self.alpha is not None:
                factor = min(factor, self.alpha / math.sqrt(float(second.mean())))
            is_kept = np.abs(change) > factor * np.median(np.abs(change))
            has_moments = is_kept & (np.abs(first) > self.beta * np.abs(first).mean())
            near_change, codes = self._clustered(change, is_kept)
            bits["w"] += entropy_bits(codes) + CODEBOOK_BITS * self.levels
            made[f"w/{name}"] = before[f"w/{name}"] + near_change
            for role, values, known in (("m", first, is_kept), ("v", second, has_moments)):
                made[f"{role}/{name}"], codes = self._clustered(values, has_moments)
                bits[role] += entropy_bits(codes[known]) + CODEBOOK_BITS * self.levels
        return made, bits

    def _clustered(self, values: np.ndarray, is_kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        near, codes = np.zeros_like(values), np.zeros(values.shape, np.uint8)
        kept = values[is_kept]
        if kept.size <= self.levels:
            near[is_kept] = kept
            codes[is_kept] = 1 + np.arange(kept.size)
            return near, codes
        centres = clusters(kept, self.levels)
        labels = np.searchsorted((centres[1:] + centres[:-1]) / 2, kept)
        near[is_kept], codes[is_kept] = centres[labels], labels + 1
        return near, codes


@dataclass(frozen=True)
class ExcpInFrames:
    """A chain whose states are decoded from real frames, chunk by chunk, and counted with their real size."""

    pruning: excp.Pruning

    def __call__(self, state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
        """Prune, cluster, and encode."""
        made: Arrays = {}
        bits: Bits = dict.fromkeys((*ROLES, "exact"), 0.0)
        scratch = Scratch(4 * CHUNK_NELEMENTS)
        for name in names_of(state):
            parts = [np.ascontiguousarray(state[f"{role}/{name}"], np.float32) for role in ROLES]
            if is_exact(parts[0]):
                made |= {f"{role}/{name}": state[f"{role}/{name}"] for role in ROLES}
                bits["exact"] += EXACT_BITS * parts[0].size
                continue
            became = [np.empty_like(part) for part in parts]
            base = np.ascontiguousarray(before[f"w/{name}"], np.float32)
            for start in range(0, base.size, CHUNK_NELEMENTS):
                piece = slice(start, start + CHUNK_NELEMENTS)
                shape = ChunkShape.of(base.shape, "float32", start)
                chunks = [part.reshape(-1)[piece] for part in parts]
                rooms = [part.reshape(-1)[piece] for part in became]
                nbytes = self._store(chunks, base.reshape(-1)[piece], rooms, shape, scratch)
                for role, each in zip(ROLES, nbytes, strict=True):
                    bits[role] += 8.0 * each
            made |= {f"{role}/{name}": part for role, part in zip(ROLES, became, strict=True)}
        return made, bits

    def _store(
        self,
        chunks: list[np.ndarray],
        base: np.ndarray,
        rooms: list[np.ndarray],
        shape: ChunkShape,
        scratch: Scratch,
    ) -> list[int]:
        """Write the reconstruction of a weight and its moments to the buffers; return the bytes of their frames."""
        plain = [_bytes_of(chunk) for chunk in chunks]
        reconstructions = [_bytes_of(room) for room in rooms]
        mean = float(np.mean(chunks[2], dtype=np.float64))
        weight = excp.encode_weights(
            plain[0], _bytes_of(base), shape, self.pruning,
            scratch=scratch, reconstruction=reconstructions[0], second_mean=mean,
        )  # fmt: skip
        sizes = [_stored(weight, plain[0], reconstructions[0])]
        keep = self.pruning.kept_moments(chunks[1], rooms[0] != base)
        for chunk, room in zip(plain[1:], reconstructions[1:], strict=True):
            moment = excp.encode_moment(chunk, keep, shape, self.pruning, scratch=scratch, reconstruction=room)
            sizes.append(_stored(moment, chunk, room))
        return sizes


def _bytes_of(values: np.ndarray) -> memoryview:
    return memoryview(values.view(np.uint8))


def _stored(made: QuantizedChunk | None, plain: memoryview, room: memoryview) -> int:
    """Return the bytes of a frame; if encoding does not reduce the size, keep and count the plain chunk."""
    if made is not None:
        return made.encoded.nbytes
    room[:] = plain
    return plain.nbytes


def block_wise(bits: int) -> Maker:
    """Return a baseline that rounds weights and moments to this many bits, scaled by the maximum of each 256 values."""

    def make(state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
        return _each(state, lambda role, values: (_blocks(values, bits, role == "v"), bits + 32 / BLOCK))

    return make


def moments_8_bit(state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
    """Round first moments and the roots of second ones to 8 bits, block-wise; weights stay exact."""

    def change(role: str, values: np.ndarray) -> tuple[np.ndarray, float]:
        if role == "w":
            return values, 32.0
        if role == "m":
            return _blocks(values, 8, False), 8 + 32 / BLOCK
        roots = _blocks(np.sqrt(values), 8, True)
        return roots * roots, 8 + 32 / BLOCK

    return _each(state, change)


def weights_bf16(state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
    """Round weights to bf16; moments stay exact."""

    def change(role: str, values: np.ndarray) -> tuple[np.ndarray, float]:
        if role != "w":
            return values, 32.0
        words = values.view(np.uint32)
        rounded = (words + 0x7FFF + ((words >> 16) & 1)) & np.uint32(0xFFFF0000)
        return rounded.astype(np.uint32).view(np.float32), 16.0

    return _each(state, change)


def weights_one_ulp(state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
    """Move each weight to a neighboring value, or leave it."""
    rng = np.random.default_rng(11)

    def change(role: str, values: np.ndarray) -> tuple[np.ndarray, float]:
        if role != "w":
            return values, 32.0
        moved = values.view(np.int32) + rng.integers(-1, 2, values.shape, np.int32)
        return moved.view(np.float32), 32.0

    return _each(state, change)


def no_moments(state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
    """Reset the optimizer, except for its step."""
    return _each(state, lambda role, values: (values, 32.0) if role == "w" else (np.zeros_like(values), 0.0))


def stale_weights(state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
    """Use the weights of the previous checkpoint, with exact moments."""
    made = {path: before[path] if path.startswith("w/") else values for path, values in state.items()}
    return made, {"w": 0.0, "m": 32.0 * _count(state), "v": 32.0 * _count(state), "exact": 0.0}


def exact(state: Arrays, before: Arrays) -> tuple[Arrays, Bits]:
    """Change nothing."""
    return _each(state, lambda role, values: (values, 32.0))


def _blocks(values: np.ndarray, bits: int, is_positive: bool) -> np.ndarray:
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK, np.float32)
    padded[: values.size] = values.reshape(-1)
    rows = padded.reshape(-1, BLOCK)
    top = (1 << bits) - 1 if is_positive else (1 << (bits - 1)) - 1
    scales = np.abs(rows).max(axis=1, keepdims=True) / top
    near = np.rint(np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0)) * scales
    found: np.ndarray = near.reshape(-1)[: values.size].reshape(values.shape).astype(np.float32)
    return found


def _each(state: Arrays, change: Callable[[str, np.ndarray], tuple[np.ndarray, float]]) -> tuple[Arrays, Bits]:
    made: Arrays = {}
    bits: Bits = dict.fromkeys((*ROLES, "exact"), 0.0)
    for path, values in state.items():
        role = path[0]
        if is_exact(values):
            made[path] = values
            bits["exact"] += EXACT_BITS / 3 * values.size
            continue
        made[path], each = change(role, values)
        bits[role] += each * values.size
    return made, bits


def _count(state: Arrays) -> int:
    return sum(values.size for path, values in state.items() if path.startswith("w/"))
