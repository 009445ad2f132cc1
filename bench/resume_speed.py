"""The speed of encoding and decoding residuals on one core: ckstore's forms and ExCP.

Bytes are those of the state: weights and both moments of every tensor that is not stored exactly. Encoding covers
everything from plain bytes to payload, including the reconstruction and its errors; decoding is the inverse. Hashing
and disks are not included. Processor time of one thread is measured, and the best round counts, because other programs
only make it slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import resume_baselines as baselines
from bench.resume_training import Trained
from bench.training import Arrays

Speeds = dict[str, dict[str, float]]


def speeds(trained: Trained, *, rounds: int) -> Speeds:
    """Return MB/s of encoding and decoding by policy."""
    from ckstore.config import Residual

    before, state = (trained.state(step) for step in trained.plan.chain[-2:])
    matrices = [name for name in baselines.names_of(state) if state[f"w/{name}"].ndim == 2]
    nbytes = 12 * sum(state[f"w/{name}"].size for name in matrices)
    found: Speeds = {}
    for name, residual in (("near()", Residual.near()), ("small()", Residual.small())):
        times = [_run(residual, state, before, matrices) for _ in range(rounds)]
        found[name] = {
            "encode_MB_s": nbytes / 1e6 / min(encode for encode, _ in times),
            "decode_MB_s": nbytes / 1e6 / min(decode for _, decode in times),
        }
    make = baselines.Excp()
    taken = min(_timed(lambda: make(state, before)) for _ in range(min(rounds, 2)))
    found["ExCP, re-created, without its 7-Zip"] = {"encode_MB_s": nbytes / 1e6 / taken}
    return found


def show(found: Any) -> None:
    """Print the speeds."""
    table = Table(title="one core, MB/s of state by processor time", title_justify="left")
    for heading in ("", "encode", "decode"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in found.items():
        decode = f"{row['decode_MB_s']:.0f}" if "decode_MB_s" in row else ""
        table.add_row(name, f"{row['encode_MB_s']:.0f}", decode)
    Console().print(table)


def _timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _run(residual: Any, state: Arrays, before: Arrays, matrices: list[str]) -> tuple[float, float]:
    """Encode and decode every matrix once; return the seconds of both."""
    from ckstore.codec.byte_codecs import Scratch
    from ckstore.quant import chunk_codec

    scratch, settings = Scratch(), residual.tensors
    encode = decode = 0.0
    for name in matrices:
        parts = {role: _bytes(state[f"{role}/{name}"]) for role in "wmv"}
        base = _bytes(before[f"w/{name}"])
        shape = chunk_codec.ChunkShape.of(state[f"w/{name}"].shape, "float32")
        into = {role: memoryview(bytearray(len(parts[role]))) for role in "wmv"}
        for start in range(0, len(base), scratch.chunk_nbytes_max):
            piece = slice(start, start + scratch.chunk_nbytes_max)
            at = chunk_codec.ChunkShape("float32", shape.row_nelements, start // 4 % shape.row_nelements)
            w, m, v, b = parts["w"][piece], parts["m"][piece], parts["v"][piece], base[piece]
            near_w, near_m, near_v = (into[role][piece] for role in "wmv")
            began = time.thread_time()
            made = chunk_codec.encode_weights(w, b, at, settings.weights, scratch=scratch, reconstruction=near_w)
            weight = _kept(made)
            made = chunk_codec.encode_second_moment(v, at, settings.second, scratch=scratch, reconstruction=near_v)
            second = _kept(made)
            made = chunk_codec.encode_first_moment(
                m, v, near_v, at, settings.first, scratch=scratch, reconstruction=near_m
            )
            first = _kept(made)
            middle = time.thread_time()
            out = memoryview(bytearray(len(w)))
            began, encode = time.thread_time(), encode + middle - began
            for (payload, steps), plain_base in ((weight, b), (second, None), (first, near_v)):
                given = plain_base if chunk_codec.base_nbytes_of(steps, len(w)) else None
                chunk_codec.decode(payload, steps, width=4, destination=out, scratch=scratch, base=given)
            decode += time.thread_time() - began
            assert out == near_m, f"{name} does not decode to what was made of it"
    return encode, decode


def _kept(made: Any) -> tuple[memoryview, Any]:
    """Copy payload and steps, because the scratch memory is reused."""
    assert made is not None, "the bench's states can be quantized"
    return memoryview(b"".join(bytes(part) for part in made.encoded.parts)), made.encoded.steps


def _bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).data.cast("B")
