"""One interface for coders of single tensors: input, output and timing.

A coder has a form without a base, one with a base, or both. If it has both, the caller chooses one for each tensor.
Some coders modify their input (zipnn reorders it in place); they get a copy that is made before the clock starts.
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
        """Bytes of ideal order-0 coding of its planes."""
        return entropy.full_nbytes(self.words)

    @cached_property
    def bound(self) -> float:
        """The smaller one of that, and of the same for the difference from its base."""
        full = self.bound_full
        return full if self.base is None else min(full, entropy.delta_nbytes(self.words, self.base))

    @cached_property
    def is_xor_better(self) -> bool:
        """Whether ideal coding of the exclusive or with the base takes less than that of the tensor."""
        return self.base is not None and entropy.xor_nbytes(self.words, self.base) < self.bound_full


def words_of(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of fp32 or bf16 values, flat, without a copy where possible."""
    return np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")


def pieces_of(arrays: Arrays, base: Arrays | None = None) -> list[Piece]:
    """Divide a state into pieces: each large tensor, and all small tensors of a role joined."""
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
"""The words of the base. A form that needs a base is never called without one."""


@dataclass(frozen=True)
class Form:
    """One way to code a tensor.

    Attributes:
        encode: (words or the result of ``prepare``, base) -> anything with a length in bytes.
        decode: (result of ``encode``, base, destination) -> the plain bytes: the destination or new memory.
        prepare: Makes, before the clock starts, the copy that ``encode`` may destroy.
    """

    encode: Callable[[Any, Base], Any]
    decode: Callable[[Any, Base, Words], Any]
    prepare: Callable[[Words], Any] = lambda words: words


@dataclass(frozen=True)
class Coder:
    """A tool with its forms.

    Attributes:
        chooses: It chooses between its forms by itself; the form with a base stands for both.
        needs_base: Without a base its result is the same as that of another coder.
    """

    name: str
    full: Form | None = None
    delta: Form | None = None
    chooses: bool = False
    needs_base: bool = False

    def form_for(self, piece: Piece) -> Form:
        """Return the better form for a tensor. If the coder cannot choose, the entropies decide, outside the timing."""
        if piece.base is None or self.delta is None:
            assert self.full is not None
            return self.full
        if self.full is None or self.chooses:
            return self.delta
        return self.delta if piece.is_xor_better else self.full


@dataclass
class Timing:
    """The result of one coder for a whole state."""

    plain_nbytes: int = 0
    stored_nbytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    encode_cpu_seconds: float = 0.0
    decode_cpu_seconds: float = 0.0
    by_role: dict[str, list[int]] = field(default_factory=dict)
    """Plain and stored bytes."""

    def facts(self) -> dict[str, object]:
        """Return the facts for a record."""
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


def measure(coder: Coder, pieces: Sequence[Piece], forms: Sequence[Form]) -> Timing:
    """Encode all pieces, then decode them all, and compare; only the coder's own calls are timed.

    Raises:
        AssertionError: The decoded bytes differ.
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
    """Pin this process to one core, and keep freed memory in the process.

    Otherwise most peers would mainly be measured on page faults for their results.
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
