"""The warnings of a lossy commit: rules that match nothing, policies without effect, and NaN or infinity.

Quantization reports NaN and infinity in the tensors that it quantizes. All other tensors (small ones, vectors,
keyframes, unknown optimizers) are stored without reading their values, so they are checked here: a lossy policy must
not hide that a run has diverged.

Invariants:
- Only elements of the tensor are checked, not other bytes of its storage.
- Additional memory is one piece, except for strided tensors in storages that are read from files.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.config import Residual, TensorSettings
from ckstore.format.tensors import TensorSpec, byte_strides_of, count_of, extent_of
from ckstore.format.tree import Node, Path, TensorNode, format_path, leaves_of
from ckstore.quant.error_stats import is_finite
from ckstore.quant.planning import Candidates, memory_shape
from ckstore.state.capture import Captured

_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Kind:
    """How to recognize NaN and infinity in one dtype.

    Args:
        dtype: The numpy dtype that an element's parts are read as.
        mask: Bits to compare; 0 if numpy knows the float type.
        wrong: The value of these bits in NaN and, if the type has it, infinity.
        parts: 2 for complex numbers, else 1.
    """

    dtype: str
    mask: int = 0
    wrong: int = 0
    parts: int = 1

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.parts * np.dtype(self.dtype).itemsize


_HALF = _Kind("<u2", 0x7C00, 0x7C00)
_SINGLE, _DOUBLE = _Kind("<f4"), _Kind("<f8")

_KINDS: Mapping[str, _Kind] = {
    "float16": _HALF,
    "bfloat16": _Kind("<u2", 0x7F80, 0x7F80),
    "float32": _SINGLE,
    "float64": _DOUBLE,
    "complex32": replace(_HALF, parts=2),
    "complex64": replace(_SINGLE, parts=2),
    "complex128": replace(_DOUBLE, parts=2),
    "float8_e4m3fn": _Kind("u1", 0x7F, 0x7F),
    "float8_e5m2": _Kind("u1", 0x7C, 0x7C),
    "float8_e4m3fnuz": _Kind("u1", 0xFF, 0x80),
    "float8_e5m2fnuz": _Kind("u1", 0xFF, 0x80),
    "float8_e8m0fnu": _Kind("u1", 0xFF, 0xFF),
    "<f2": _HALF,
    "<f4": _SINGLE,
    "<f8": _DOUBLE,
    "<c8": replace(_SINGLE, parts=2),
    "<c16": replace(_DOUBLE, parts=2),
    ">f4": _Kind(">f4"),
    ">f8": _Kind(">f8"),
}


def is_diverged(captured: Captured, spec: TensorSpec) -> bool:
    """Return True if a tensor contains NaN or infinity."""
    kind = _KINDS.get(spec.dtype)
    nbytes = count_of(spec.shape) * (kind.width if kind else 0)
    if kind is None or not nbytes:
        return False
    storage = captured.storages[spec.storage]
    if memory_shape(replace(spec, offset=0), kind.width, nbytes) is None:
        return _is_wrong_strided(captured, spec, kind)
    end = spec.offset + nbytes
    pieces = [(start, min(end, start + _PIECE_NBYTES)) for start in range(spec.offset, end, _PIECE_NBYTES)]
    return any(_is_wrong(np.frombuffer(storage.read(*piece), kind.dtype), kind) for piece in pieces)


def _is_wrong_strided(captured: Captured, spec: TensorSpec, kind: _Kind) -> bool:
    """Return True if a tensor whose elements have gaps or overlap contains NaN or infinity."""
    strides = byte_strides_of(spec.library, spec.strides, kind.width)
    # Repeated elements are checked once.
    shape = tuple(length if step else 1 for length, step in zip(spec.shape, strides, strict=True))
    low, high = extent_of(shape, strides, kind.width)
    plain = captured.storages[spec.storage].read(spec.offset + low, spec.offset + high)
    part_nbytes = kind.width // kind.parts
    every: NDArray[Any] = np.ndarray(
        (*shape, kind.parts), kind.dtype, plain, offset=-low, strides=(*strides, part_nbytes)
    )
    height = max(1, _PIECE_NBYTES * shape[0] // (kind.width * count_of(shape)))
    return any(_is_wrong(every[start : start + height], kind) for start in range(0, shape[0], height))


def _is_wrong(values: NDArray[Any], kind: _Kind) -> bool:
    if not kind.mask:
        return not is_finite(values)
    return bool(((values & values.dtype.type(kind.mask)) == kind.wrong).any())


_NAMED_COUNT = 3
_COMPARED_COUNT = 1000


def rules_warnings(residual: Residual, tree: Node) -> list[str]:
    """Return a warning for each rule that matches nothing in the state, with the nearest path."""
    return named_nothing(residual, tensor_words(tree))


def tensor_words(tree: Node) -> list[str]:
    """Return the dotted paths of all tensors."""
    return [format_path(path) for path, leaf in leaves_of(tree) if isinstance(leaf, TensorNode)]


def named_nothing(residual: Residual, paths: Sequence[str]) -> list[str]:
    """Return a warning for each rule that matches none of these dotted paths."""
    warnings = []
    for glob in residual.globs_without(paths):
        near = difflib.get_close_matches(glob, paths[:_COMPARED_COUNT], n=1, cutoff=0.0)
        meant = f"; the nearest path is {near[0]}" if near else ""
        warnings.append(f"the rule for {glob!r} matches nothing in this state{meant}")
    return warnings


def no_effect_warnings(residual: Residual, captured: Captured) -> list[str]:
    """Return a warning if a lossy policy finds nothing to quantize, unless a rule of it excludes the tensors."""
    if Candidates(captured, replace(residual, rules=(), tensors=TensorSettings())).tensors:
        return []
    if residual.rules and Candidates(captured, residual).tensors:
        return []
    what = f"no matrix of {residual.nelements_min} floats or more was recognized as a weight or an Adam moment"
    todo = "name weights by a rule, or commit a ckstore.TrainState"
    return [f"the fidelity {residual.name!r} found nothing to quantize, so everything is exact: {what}; {todo}"]


def tensor_paths(tree: Node) -> dict[Path, int]:
    """Return the first path of each tensor, with its index."""
    first: dict[int, Path] = {}
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, TensorNode):
            first.setdefault(leaf.tensor, path)
    return {path: tensor for tensor, path in first.items()}


def diverged_warnings(captured: Captured, quantized: Collection[int], earlier: Sequence[str]) -> list[str]:
    """Return a warning if a float tensor that was not quantized contains NaN or infinity.

    Args:
        captured: The state.
        quantized: Storages that were quantized.
        earlier: Warnings that were given already.
    """
    named = {warning.partition(" was stored exactly: ")[0] for warning in earlier}
    wrong: list[str] = []
    for path, tensor in tensor_paths(captured.tree).items():
        spec, word = captured.tensors[tensor], format_path(path)
        if spec.storage not in quantized and word not in named and is_diverged(captured, spec):
            wrong.append(word)
    if not wrong:
        return []
    more = f" and {len(wrong) - _NAMED_COUNT} more" if len(wrong) > _NAMED_COUNT else ""
    verb = "holds" if len(wrong) == 1 else "hold"
    return [f"{', '.join(wrong[:_NAMED_COUNT])}{more} {verb} NaN or infinity: the run may have diverged"]
