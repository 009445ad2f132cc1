"""The store as a dict: what should be true after any history of calls.

Invariants:
- An acknowledged entry stays until something asked for drops it.
- ``latest`` is the highest sequence number that is not archival; a step means its newest entry.
- Equality is of bits: types, key order, dtypes, shapes, strides and every byte.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One acknowledged checkpoint."""

    seq: int
    step: int
    state: Any
    metrics: Mapping[str, float] = field(default_factory=dict)
    parent: int | None = None


class ModelStore:
    """What one run of a store should hold."""

    def __init__(self) -> None:
        self.entries: dict[int, ModelEntry] = {}
        self.tags: dict[str, int] = {}
        self.seqs_ever: set[int] = set()

    def commit(
        self, seq: int, step: int, state: Any, *, metrics: Mapping[str, float] | None = None, parent: int | None = None
    ) -> ModelEntry:
        """Take note of an acknowledged commit; its seq must be new and higher than all before."""
        assert seq not in self.seqs_ever, f"seq {seq} was given twice"
        assert seq > max(self.seqs_ever, default=-1), f"seq {seq} is not the highest"
        entry = self.entries[seq] = ModelEntry(seq, step, state, dict(metrics or {}), parent)
        self.seqs_ever.add(seq)
        return entry

    def rewind(self, seq: int, new_seq: int) -> ModelEntry:
        """Take note of an old entry that was published again: it is the parent of the new one."""
        old = self.entries[seq]
        return self.commit(new_seq, old.step, old.state, metrics=old.metrics, parent=seq)

    def delete(self, seqs: set[int]) -> None:
        """Take note of entries that were dropped."""
        for seq in seqs:
            del self.entries[seq]

    @property
    def latest(self) -> ModelEntry | None:
        """The entry a restore without a name returns."""
        return self.entries[max(self.entries)] if self.entries else None

    @property
    def steps(self) -> list[int]:
        """All steps, unique and ascending."""
        return sorted({entry.step for entry in self.entries.values()})

    @property
    def newest_first(self) -> list[ModelEntry]:
        """All entries as ``log`` lists them."""
        return [self.entries[seq] for seq in sorted(self.entries, reverse=True)]

    def of_step(self, step: int) -> list[ModelEntry]:
        """Return all entries of a step, newest first."""
        return [entry for entry in self.newest_first if entry.step == step]

    def best(self, metric: str, mode: str = "min") -> ModelEntry | None:
        """Return the entry with the least or greatest value, the newest of equals."""
        having = [entry for entry in self.newest_first if metric in entry.metrics]
        if not having:
            return None
        sign = 1.0 if mode == "min" else -1.0
        return min(having, key=lambda entry: sign * entry.metrics[metric])


def difference(left: Any, right: Any) -> str | None:
    """Return where and how two states differ, bit for bit, or None."""
    return next(_differences(left, right, "state"), None)


def _differences(left: Any, right: Any, path: str) -> Iterator[str]:
    if type(left) is not type(right):
        yield f"{path}: {type(left).__name__} is not {type(right).__name__}"
    elif isinstance(left, dict):
        if list(left) != list(right) or [type(key) for key in left] != [type(key) for key in right]:
            yield f"{path}: keys {list(left)[:9]} are not {list(right)[:9]}"
            return
        for key in left:
            yield from _differences(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, (list, tuple)) and not _is_torch(left):
        if len(left) != len(right):
            yield f"{path}: {len(left)} items are not {len(right)}"
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from _differences(one, other, f"{path}[{index}]")
    elif isinstance(left, np.ndarray):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            yield f"{path}: {left.dtype}{left.shape} is not {right.dtype}{right.shape}"
        elif left.tobytes() != right.tobytes():
            yield f"{path}: bytes of the array differ"
    elif _is_torch(left) and hasattr(left, "untyped_storage"):
        yield from _tensor_differences(left, right, path)
    elif _bits(left) != _bits(right):
        yield f"{path}: {left!r} is not {right!r}"


def _tensor_differences(left: Any, right: Any, path: str) -> Iterator[str]:
    facts = ("dtype", "shape", "requires_grad")
    if any(getattr(left, fact) != getattr(right, fact) for fact in facts) or left.stride() != right.stride():
        yield f"{path}: {left.dtype}{tuple(left.shape)} is not {right.dtype}{tuple(right.shape)}, or strides differ"
    elif _tensor_bytes(left) != _tensor_bytes(right):
        yield f"{path}: bytes of the tensor differ"


def _tensor_bytes(tensor: Any) -> bytes:
    torch = sys.modules["torch"]
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    nbytes = plain.numel() * plain.element_size()
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(plain.untyped_storage(), plain.storage_offset() * plain.element_size(), (nbytes,), (1,))
    return bytes(raw.numpy().tobytes())


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch"


def _bits(value: Any) -> Any:
    if isinstance(value, float) and not isinstance(value, np.generic):
        return struct.pack("<d", value)
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return value.dtype.str, value.tobytes()
    return value
