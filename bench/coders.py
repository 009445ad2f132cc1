"""Coders of single tensors under one roof: what each is given, what it makes, and how it is timed.

A coder has a form without a base, one with a base, or both. Where it has both, the caller says which one a
tensor takes. Whatever a coder does to its own input (zipnn reorders it in place) happens to a copy that is
made before the clock starts.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench import entropy
from bench.training import Arrays

SMALL_NBYTES = 64 << 10
CHUNK_NBYTES = 4 << 20


@dataclass(frozen=True)
class Piece:
    """The bit patterns of one tensor, or of all small ones of a role together, and those of its base.

    Attributes:
        words: ``uint32`` for fp32, ``uint16`` for bf16; one-dimensional.
        base: As many words of the older state, or None.
    """

    path: str
    role: str
    words: np.ndarray
    base: np.ndarray | None = None

    @cached_property
    def bound_full(self) -> float:
        """Bytes that ideal order-0 coding of its planes takes."""
        return entropy.full_nbytes(self.words)

    @cached_property
    def bound(self) -> float:
        """The same, or that of the difference from its base if it is less."""
        full = self.bound_full
        return full if self.base is None else min(full, entropy.delta_nbytes(self.words, self.base))

    @cached_property
    def is_xor_better(self) -> bool:
        """Whether ideal coding of the exclusive or with the base takes less than that of the tensor."""
        return self.base is not None and entropy.xor_nbytes(self.words, self.base) < self.bound_full


def words_of(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of fp32 or bf16 values, flat, without a copy where the memory allows it."""
    return np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")


def pieces_of(arrays: Arrays, base: Arrays | None = None) -> list[Piece]:
    """Cut a state into what is coded as one: large tensors alone, small ones of a role joined."""
    pieces: list[Piece] = []
    small: dict[str, list[str]] = {}
    for path, values in arrays.items():
        role = path.partition("/")[0]
        if values.nbytes < SMALL_NBYTES:
            small.setdefault(f"{role}, {values.itemsize} bytes", []).append(path)
        else:
            older = None if base is None else words_of(base[path])
            pieces.append(Piece(path, role, words_of(values), older))
    for name, paths in small.items():
        joined = np.concatenate([words_of(arrays[path]) for path in paths])
        older = None if base is None else np.concatenate([words_of(base[path]) for path in paths])
        pieces.append(Piece(f"small ones of {name}", name.partition(",")[0], joined, older))
    return pieces


Words = np.ndarray
Base = Any
"""Words where there is a base, else None: a form that needs one is never called without."""


@dataclass(frozen=True)
class StoragePlan:
    """One way to code a tensor.

    Attributes:
        encode: (words or what ``prepare`` made of them, base) -> anything with a length in bytes.
        decode: (what ``encode`` made, base, destination) -> the plain bytes: the destination or memory of its own.
        prepare: Makes, before the clock starts, what ``encode`` may destroy.
    """

    encode: Callable[[Any, Base], Any]
    decode: Callable[[Any, Base, Words], Any]
    prepare: Callable[[Words], Any] = lambda words: words


@dataclass(frozen=True)
class Coder:
    """A tool with its forms.

    Attributes:
        chooses: It decides between its forms by itself; the form with a base stands for both.
        needs_base: Without a base it would only repeat another coder.
    """

    name: str
    full: StoragePlan | None = None
    delta: StoragePlan | None = None
    chooses: bool = False
    needs_base: bool = False

    def form_for(self, piece: Piece) -> StoragePlan:
        """Return the form that is better for a tensor; a coder that cannot tell is told, for free, by entropies."""
        if piece.base is None or self.delta is None:
            assert self.full is not None
            return self.full
        if self.full is None or self.chooses:
            return self.delta
        return self.delta if piece.is_xor_better else self.full


@dataclass
class Timing:
    """What one coder did with a whole state."""

    plain_nbytes: int = 0
    stored_nbytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    encode_cpu_seconds: float = 0.0
    decode_cpu_seconds: float = 0.0
    by_role: dict[str, list[int]] = field(default_factory=dict)
    """Plain and stored bytes."""

    def facts(self) -> dict[str, object]:
        """Return what belongs into a record."""
        speeds = {
            "decode": self.plain_nbytes / 1e9 / self.decode_seconds,
            "encode_by_cpu_time": self.plain_nbytes / 1e9 / max(1e-9, self.encode_cpu_seconds),
            "decode_by_cpu_time": self.plain_nbytes / 1e9 / max(1e-9, self.decode_cpu_seconds),
        }
        ratios = {role: plain / max(1, stored) for role, (plain, stored) in self.by_role.items()}
        return {
            "ratio": self.plain_nbytes / max(1, self.stored_nbytes),
            "stored_nbytes": self.stored_nbytes,
            "ratio_by_role": ratios,
            **speeds,
        }


def measure(coder: Coder, pieces: Sequence[Piece], forms: Sequence[StoragePlan]) -> Timing:
    """Encode all pieces, then decode them all, and compare; only the coder's own calls are timed.

    Raises:
        AssertionError: What came back is not what went in.
    """
    timing, stored = Timing(), []
    for piece, form in zip(pieces, forms, strict=True):
        given = form.prepare(piece.words)
        began, used = time.perf_counter(), time.process_time()
        made = form.encode(given, piece.base)
        timing.encode_cpu_seconds += time.process_time() - used
        timing.encode_seconds += time.perf_counter() - began
        stored.append(made)
        timing.plain_nbytes += piece.words.nbytes
        timing.stored_nbytes += len(made)
        role = timing.by_role.setdefault(piece.role, [0, 0])
        role[0] += piece.words.nbytes
        role[1] += len(made)
    for piece, form, made in zip(pieces, forms, stored, strict=True):
        destination = np.zeros_like(piece.words)
        destination.fill(1)
        began, used = time.perf_counter(), time.process_time()
        plain = form.decode(made, piece.base, destination)
        timing.decode_cpu_seconds += time.process_time() - used
        timing.decode_seconds += time.perf_counter() - began
        if not np.array_equal(as_words(plain, piece.words.dtype), piece.words):
            raise AssertionError(f"{coder.name} brings back other values of {piece.path} than it was given")
    return timing


def as_words(plain: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return decoded bytes or values as bit patterns."""
    values = plain if isinstance(plain, np.ndarray) else np.frombuffer(plain, np.uint8)
    return values.reshape(-1).view(dtype)


@contextmanager
def one_core() -> Iterator[None]:
    """Keep every thread of this process on one core, and memory that is freed with the process.

    Without the latter most peers would mainly be measured at getting zeroed pages for their results.
    """
    cores = os.sched_getaffinity(0)
    core = max(cores)
    libc = ctypes.CDLL(None)
    keep_freed, map_from = -1, -3
    libc.mallopt(map_from, 32 << 20)
    libc.mallopt(keep_freed, 1 << 30)
    _pin({core})
    try:
        yield
    finally:
        _pin(cores)


def _pin(cores: Iterable[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except OSError:
            # The thread has ended meanwhile.
            continue
