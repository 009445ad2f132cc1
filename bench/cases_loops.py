"""The plane coder with every instruction set that this processor supports."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from bench import coders
from bench.measure import Participant, Result, Sample, interleave
from bench.workbench import Bench, gigabytes_per_second
from ckstore.codec.kernels import plane_bound, reference

PLANE_NBYTES = 1 << 20
"""Elements of one byte plane in a 4 MiB chunk of fp32."""

SPARSE_SHARE = 0.05
"""Share of bytes that differ from the most common one, as in the high planes of deltas."""

SAMPLE_SECONDS = 0.05

T = TypeVar("T")
Plane = np.ndarray
Planes = dict[str, Plane]
Encode = Callable[[Plane, Plane], int]
Decode = Callable[[Plane, Plane], bool]


def coder_loops(bench: Bench) -> Result:
    """Encode a dense plane (exponents of weights) and a sparse one on one core, with every instruction set."""
    # Imported here, because ckstore can be installed without the extension.
    from ckstore import _native

    result = Result("coder_loops", "GB/s", is_higher_better=True, columns=("stored_nbytes",))
    result.setting = {"plane_nbytes": PLANE_NBYTES, "rounds": bench.rounds, "cores": 1, "values": "synthetic"}
    bits = np.empty(-(-PLANE_NBYTES // 8), np.uint8)
    participants: dict[str, Participant] = {}
    native, planes = _native.coder_loops(), _planes()
    for loops in [*native, "numpy"]:
        dense: tuple[Encode, Decode] = reference.encode_plane, reference.decode_plane
        sparse: tuple[Encode, Decode] = reference.encode_sparse, partial(_with_bits, reference.decode_sparse, bits)
        if loops != "numpy":
            dense = partial(_native.encode_plane_by, loops), partial(_native.decode_plane_by, loops)
            decode = partial(_native.decode_sparse_by, loops)
            sparse = partial(_native.encode_sparse_by, loops), partial(_with_bits, decode, bits)
        for kind, (encode, decode_plane) in {"dense": dense, "sparse": sparse}.items():
            plane = planes[kind]
            participants[f"{loops}, {kind}: encode"] = partial(_encoding, encode, plane)
            participants[f"{loops}, {kind}: decode"] = partial(_decoding, encode, decode_plane, plane)
    with coders.one_core():
        interleave(result, participants, bench.rounds)
    for kind in ("dense", "sparse"):
        for direction in ("encode", "decode"):
            names = [f"{loops}, {kind}: {direction}" for loops in [*native, "numpy"]]
            result.add_ratios(names[:1], names)
    return result


def _planes() -> Planes:
    rng = np.random.default_rng(0)
    words = (0.02 * rng.standard_normal(PLANE_NBYTES)).astype(np.float32).view(np.uint32)
    exponents = ((words << np.uint32(1)) >> np.uint32(24)).astype(np.uint8)
    others = np.minimum(rng.geometric(0.5, PLANE_NBYTES), 255)
    return {
        "dense": exponents,
        "sparse": np.where(rng.random(PLANE_NBYTES) < SPARSE_SHARE, others, 0).astype(np.uint8),
    }


def _with_bits(decode: Callable[[Plane, Plane, Plane], bool], bits: Plane, payload: Plane, plane: Plane) -> bool:
    return decode(payload, plane, bits)


def _seconds_of(call: Callable[[], T]) -> tuple[float, T]:
    """Call a function repeatedly for a while; return the seconds of one call, and its result."""
    calls, began = 0, time.perf_counter()
    while True:
        returned = call()
        calls += 1
        seconds = time.perf_counter() - began
        if seconds > SAMPLE_SECONDS:
            return seconds / calls, returned


def _encoding(encode: Encode, plane: Plane) -> Sample:
    room = np.zeros(plane_bound(plane.nbytes), np.uint8)
    seconds, nbytes = _seconds_of(lambda: encode(plane, room))
    return Sample(gigabytes_per_second(plane.nbytes, seconds), {"stored_nbytes": nbytes})


def _decoding(encode: Encode, decode: Decode, plane: Plane) -> Sample:
    room, back = np.empty(plane_bound(plane.nbytes), np.uint8), np.zeros(plane.nbytes, np.uint8)
    payload = room[: encode(plane, room)]
    seconds, is_right = _seconds_of(lambda: decode(payload, back))
    if not is_right or not np.array_equal(back, plane):
        raise AssertionError("a plane did not come back")
    return Sample(gigabytes_per_second(plane.nbytes, seconds), {"stored_nbytes": payload.nbytes})


CASES: dict[str, Callable[[Bench], Result]] = {"coder_loops": coder_loops}
