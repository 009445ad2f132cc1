"""The case quantize_device: quantizing weights and moments on a GPU, beside the host, and beside copying their floats.

A round takes every chunk once, on one thread. *codes* is what a device does until codes and errors are known, with all
that comes to the host for it; *chunks* adds what the host does: the payload, and the reconstruction that is hashed.
Hashing, the check of what was written and disks are no part of it. Bytes are those of the floats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.measure import Participant, Result, Sample, interleave, tell
from bench.workbench import Bench, gigabytes_per_second

TARGET = 20.0
"""GB/s of floats that quantizing on a device should reach: then it takes less time than copying them would."""

NBYTES_MAX = 240_000_000
SIDE = 1024
ROLES = "bwmv"


@dataclass(frozen=True)
class Chunk:
    """The same elements of a weight, its base and its moments: floats of the host, and tensors of a device."""

    plain: dict[str, memoryview]
    there: dict[str, Any]


def quantize_device(bench: Bench) -> Result:
    """Quantize weights and moments where they lie on a GPU, and on the host; GB/s of floats."""
    result = Result("quantize_device", "GB/s", is_higher_better=True)
    result.setting = {"rounds": bench.rounds, "threads": 1, "target": TARGET}
    reason = no_gpu_reason()
    if reason:
        tell(f"  quantize_device is left out: {reason}")
        result.unusable["GPU"] = reason
        return result
    chunks = list(chunks_on("cuda", min(bench.nbytes, NBYTES_MAX)))
    result.setting["nbytes"] = sum(12 * SIDE * SIDE for _ in chunks)
    interleave(result, participants(chunks), bench.rounds)
    result.add_ratios(["chunks, near()"], ["host, near()"])
    return result


def no_gpu_reason() -> str:
    """Return why nothing can be measured on a GPU, or nothing."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "there is no CUDA GPU here"


def chunks_on(device: str, nbytes: int) -> Iterator[Chunk]:
    """Yield so many bytes of chunks whose changes few directions describe, and whose moments do not all follow them."""
    import torch

    rng = np.random.default_rng(1)
    for _ in range(max(1, nbytes // (12 * SIDE * SIDE))):
        sizes = np.exp(0.5 * (rng.standard_normal((SIDE, 1)) + rng.standard_normal((1, SIDE))))
        few = rng.standard_normal((SIDE, 12)) @ rng.standard_normal((12, SIDE)) / 3.5
        noise, base = rng.standard_normal((2, SIDE, SIDE))
        first = (0.9 * few + 0.4 * noise) * sizes * 1e-4
        values = {
            "b": base * 0.02,
            "w": base * 0.02 + first,
            "m": first,
            "v": np.square(sizes * 1e-4 * (1 + noise / 8)),
        }
        floats = {role: np.ascontiguousarray(values[role], np.float32).reshape(-1) for role in ROLES}
        there = {role: torch.from_numpy(floats[role]).to(device) for role in ROLES}
        yield Chunk({role: memoryview(floats[role].view(np.uint8)) for role in ROLES}, there)


def participants(chunks: list[Chunk]) -> dict[str, Participant]:
    """Return what is measured, by name."""
    from ckstore.codec.scratch import Scratch
    from ckstore.quant.settings import Residual

    scratch, into = Scratch(), [memoryview(bytearray(4 * SIDE * SIDE)) for _ in "wvm"]
    near, small = Residual.near().tensors, Residual.small().tensors
    return {
        "copy to the host": _timed(chunks, _copy),
        "codes, near()": _timed(chunks, lambda chunk: codes(chunk, near)),
        "codes, small()": _timed(chunks, lambda chunk: codes(chunk, small)),
        "chunks, near()": _timed(chunks, lambda chunk: encode_there(chunk, near, scratch, into)),
        "chunks, small()": _timed(chunks, lambda chunk: encode_there(chunk, small, scratch, into)),
        "host, near()": _timed(chunks, lambda chunk: encode_here(chunk, near, scratch, into)),
    }


def _timed(chunks: list[Chunk], work: Callable[[Chunk], object]) -> Participant:
    def run() -> Sample:
        # The first use of a device loads code, and the allocator's memory is kept.
        work(chunks[0])
        began = time.perf_counter()
        for chunk in chunks:
            work(chunk)
        return Sample(gigabytes_per_second(12 * SIDE * SIDE * len(chunks), time.perf_counter() - began))

    return run


def _copy(chunk: Chunk) -> list[Any]:
    return [chunk.there[role].cpu() for role in "wmv"]


def codes(chunk: Chunk, settings: Any) -> list[float]:
    """Find codes on the device, what they decode to, its sums, and what it is off by; return the greatest errors."""
    from ckstore.kernels import on_gpu
    from ckstore.quant import on_device
    from ckstore.quant.geometry import Grid
    from ckstore.quant.grid import Steps
    from ckstore.quant.lowrank_forms import CHANGE, QUOTIENT, ROOT

    grid, there, weights, first = Grid(SIDE * SIDE, SIDE, 0), chunk.there, settings.weights, settings.first
    steps = Steps(weights.step, weights.dead_zone, weights.levels_max, weights.scale)
    changes, _ = on_gpu.float_changes(there["w"], there["b"])
    quotients, _ = on_gpu.float_quotients(there["m"], there["v"], first.clip)
    seconds, _ = on_gpu.float_values(there["v"])
    off = []
    for role, form, values, part, base, otherwise in (
        ("w", CHANGE, changes, weights, there["b"], lambda: on_device.make_grid(changes, grid, steps)),
        ("v", ROOT, seconds, settings.second, None, lambda: on_device.make_second(seconds, grid, settings.second)),
        ("m", QUOTIENT, quotients, first, there["v"], lambda: on_device.make_first(quotients, grid, first)),
    ):
        outer = on_device.make_outer(form, values, grid, part.low_rank, limit=first.clip)
        if outer is not None:
            made, _ = on_device.rebuilt_outer(outer, base, values)
        else:
            made = on_device.rebuilt_grid(otherwise(), grid, there[role], base, is_second=role != "w")
        on_gpu.sums_of_words(made)
        off.append(float(on_gpu.to_host(on_gpu.measure_values(there[role], made))[0]))
    return off


def encode_there(chunk: Chunk, settings: Any, scratch: Any, into: list[memoryview]) -> list[Any]:
    """Make of a chunk on a device what a commit stores of it."""
    from ckstore import lossy_on_device
    from ckstore.lossy_forms import ChunkShape

    shape, there = ChunkShape("float32", SIDE), chunk.there
    place = lossy_on_device.Place(there["w"], shape, scratch, into[0])
    weight = lossy_on_device.encode_weights(place, there["b"], chunk.plain["b"], settings.weights)
    place = replace(place, plain=there["v"], reconstruction=into[1])
    second = lossy_on_device.encode_second_moment(place, settings.second)
    assert second is not None, "second moments like these can be quantized"
    place = replace(place, plain=there["m"], reconstruction=into[2])
    first = lossy_on_device.encode_first_moment(place, there["v"], second.became, into[1], settings.first)
    return [weight, second, first]


def encode_here(chunk: Chunk, settings: Any, scratch: Any, into: list[memoryview]) -> list[Any]:
    """Make of a chunk in host memory what a commit stores of it."""
    from ckstore import lossy_forms

    shape, plain = lossy_forms.ChunkShape("float32", SIDE), chunk.plain
    weight = lossy_forms.encode_weights(
        *(plain["w"], plain["b"], shape, settings.weights), scratch=scratch, reconstruction=into[0]
    )
    second = lossy_forms.encode_second_moment(
        *(plain["v"], shape, settings.second), scratch=scratch, reconstruction=into[1]
    )
    first = lossy_forms.encode_first_moment(
        *(plain["m"], plain["v"], into[1], shape, settings.first), scratch=scratch, reconstruction=into[2]
    )
    return [weight, second, first]


CASES: dict[str, Callable[[Bench], Result]] = {"quantize_device": quantize_device}
