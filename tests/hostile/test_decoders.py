"""Protects readers from hostile payloads: mutations of valid input for every decoder, 240,000 in a deep run.

Each input decodes to exactly its destination, or is refused as corrupt or unsupported. Bytes next to the destination
and the base do not change. A refused delta that is decoded onto its base leaves the base unchanged.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import CodecStep
from ckstore.config import Compression
from ckstore.errors import CorruptError, UnsupportedError

GUARD = b"\x5a" * 64
CONFIGS = [b"", b"\x00", b"\x01", b"\x02", b"\x00\x00"]


@dataclass(frozen=True, slots=True)
class Seed:
    """A valid frame from which hostile ones are made."""

    name: str
    steps: tuple[CodecStep, ...]
    width: int
    nbytes: int
    payload: bytes
    base: bytes | None


def coded(plane: np.ndarray) -> bytes:
    room = np.empty(kernels.plane_bound(plane.size), np.uint8)
    return room[: kernels.encode_plane(plane.copy(), room)].tobytes()


def planes_by_hand(planes: list[tuple[int, bytes]]) -> bytes:
    return b"".join(struct.pack("<BI", mode, len(stored)) for mode, stored in planes) + b"".join(
        stored for _, stored in planes
    )


def sparse(plane: np.ndarray) -> bytes:
    """Shorter than ckstore would store this way."""
    bits, others = coded(np.packbits(plane != 0, bitorder="little")), coded(plane[plane != 0])
    return struct.pack("<BII", 0, np.count_nonzero(plane), len(bits)) + bits + others


def every_plane_mode(count: int) -> bytes:
    """Four planes: raw, constant, coded, sparse."""
    rng = np.random.default_rng(1)
    skewed = np.minimum(rng.geometric(0.2, count), 255).astype(np.uint8)
    rare = np.where(rng.random(count) < 0.1, skewed, 0).astype(np.uint8)
    return planes_by_hand([(0, rng.bytes(count)), (1, b"\x07"), (3, coded(skewed)), (4, sparse(rare))])


def seeds(scratch: chunk_codec.Scratch) -> list[Seed]:
    rng = np.random.default_rng(2)
    count = 700
    base = (rng.standard_normal(count) * 0.02).astype(np.float32)
    chunk = (base + rng.standard_normal(count) * 1e-5).astype(np.float32)
    near, far = (memoryview(side.tobytes()) for side in (chunk, base))
    text = memoryview(b"the quick brown fox; " * 60)
    masters = memoryview(base.tobytes())
    found = []

    def add(name: str, encoded: chunk_codec.Encoded | None, nbytes: int, other: memoryview | None = None) -> None:
        assert encoded is not None, name
        content = b"".join(encoded.parts)
        found.append(Seed(name, encoded.steps, encoded.width, nbytes, content, None if other is None else bytes(other)))

    def full(plain: memoryview, width: int, compression: Compression) -> chunk_codec.Encoded:
        return chunk_codec.encode(plain, width=width, is_float=width > 1, compression=compression, scratch=scratch)

    add("weights", full(near, 4, "fast"), near.nbytes)
    add("lz4", full(text, 1, "fast"), text.nbytes)
    add("zstd", full(text, 1, "best"), text.nbytes)
    add("const", full(memoryview(bytes(400)), 4, "fast"), 400)
    add("plain", chunk_codec.Encoded((), [near], 4), near.nbytes)
    delta = chunk_codec.encode_delta(near, far, width=4, is_float=True, compression="fast", scratch=scratch)
    add("delta", delta, near.nbytes, far)
    by_hand = memoryview(every_plane_mode(count))
    add("modes", chunk_codec.Encoded(((2, b"\x01"),), [by_hand], 4), 4 * count)
    add("delta of modes", chunk_codec.Encoded(((5, b"\x01"), (2, b"\x00")), [by_hand], 4), 4 * count, far)
    zstd = full(text, 1, "best")
    add("delta in zstd", chunk_codec.Encoded(((5, b"\x00"), *zstd.steps), zstd.parts, 1), text.nbytes, text)
    halves = chunk_codec.Encoded(((6, b"\x01"),), [memoryview(b"\x00")], 2)
    add("rounded", halves, masters.nbytes // 2, masters)
    return found


def mutated(seed: Seed, rng: np.random.Generator) -> Seed:
    """Change the payload; sometimes the length, the width, the steps or the base."""
    payload, kind = bytearray(seed.payload), int(rng.integers(12))
    nbytes, width, steps, base = seed.nbytes, seed.width, seed.steps, seed.base
    if kind < 6 and payload:
        # Tables, headers and states are at the beginning, where changes have the greatest effect.
        reach = len(payload) if kind < 3 else min(len(payload), 64)
        for place in rng.integers(0, reach, rng.integers(1, 5)):
            payload[place] = rng.integers(256) if kind % 2 else payload[place] ^ (1 << rng.integers(8))
    elif kind == 6:
        del payload[rng.integers(len(payload) + 1) :]
    elif kind == 7:
        payload[rng.integers(len(payload) + 1) :] = rng.bytes(int(rng.integers(0, 300)))
    elif kind == 8:
        nbytes = max(0, nbytes + int(rng.integers(-40, 40)))
    elif kind == 9:
        width = int(rng.choice([0, 1, 2, 3, 4, 8, 16, 255]))
    elif kind == 10:
        chosen = [(int(rng.integers(0, 8)), CONFIGS[rng.integers(len(CONFIGS))]) for _ in range(rng.integers(0, 4))]
        steps = tuple(chosen)
    else:
        base = None if rng.random() < 0.3 else rng.bytes(int(rng.integers(0, 2 * nbytes + 2)))
    return Seed(seed.name, steps, width, nbytes, bytes(payload), base)


def survives(hostile: Seed, onto_base: bool, scratch: chunk_codec.Scratch) -> str:
    """Decode, and return the outcome."""
    room = bytearray(GUARD + bytes(hostile.nbytes) + GUARD)
    destination = memoryview(room)[len(GUARD) : len(GUARD) + hostile.nbytes]
    base = None if hostile.base is None else memoryview(hostile.base)
    is_onto = onto_base and base is not None and base.nbytes == hostile.nbytes
    if is_onto and base is not None:
        destination[:] = base
        base = destination
    try:
        chunk_codec.decode(
            memoryview(hostile.payload),
            hostile.steps,
            width=hostile.width,
            destination=destination,
            scratch=scratch,
            base=base,
        )
        outcome = "decoded"
    except CorruptError:
        outcome = "corrupt"
    except UnsupportedError:
        outcome = "unsupported"
    assert room.startswith(GUARD)
    assert room.endswith(GUARD)
    if is_onto and outcome != "decoded" and hostile.steps[:1] != ((6, b"\x01"),):
        assert destination == hostile.base, "a base was harmed"
    return outcome


def attack(count: int, seed: int) -> Counter[str]:
    scratch, rng = chunk_codec.Scratch(1 << 14), np.random.default_rng(seed)
    valid, outcomes = seeds(scratch), Counter[str]()
    for number in range(count):
        start = valid[number % len(valid)]
        hostile = mutated(start, rng)
        outcomes[survives(hostile, number % 3 == 0, scratch)] += 1
        if number % 5000 == 0:
            # The scratch memory and its contexts still work afterwards.
            assert all(survives(whole, False, scratch) == "decoded" for whole in valid)
    return outcomes


@pytest.mark.deep
def test_hostile_payloads_stay_within_destination(sample, note) -> None:
    outcomes = attack(sample.count(240_000, parts=40), sample.seed(2))
    note(f"fuzz: {sum(outcomes.values())} hostile payloads, {dict(sorted(outcomes.items()))}")
    assert set(outcomes) == {"decoded", "corrupt", "unsupported"}
    assert sum(outcomes.values()) >= (240_000 if sample.is_whole else 6000)
