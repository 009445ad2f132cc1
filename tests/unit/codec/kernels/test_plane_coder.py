"""Protects the plane coder: every implementation makes the same bytes, and no payload can harm a decoder.

The implementations are numpy and every native instruction set of this processor. All accept or refuse the same
mutated payloads, decode them to the same bytes, and write only to the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from ckstore.codec.kernels import rans_reference, reference

BLOCK = rans_reference.BLOCK_NBYTES
GUARD = 64
Plane = np.ndarray

on_native = pytest.importorskip("ckstore._native", reason="the extension is not built")

NATIVE = on_native.coder_loops()
ENCODERS: dict[str, Callable[[Plane, Plane], int]] = {
    **{loops: partial(on_native.encode_plane_by, loops) for loops in NATIVE},
    "numpy": reference.encode_plane,
}
DECODERS: dict[str, Callable[[Plane, Plane], bool]] = {
    **{loops: partial(on_native.decode_plane_by, loops) for loops in NATIVE},
    "numpy": reference.decode_plane,
}


def skewed(nbytes: int, seed: int = 0, p: float = 0.3) -> Plane:
    return np.minimum(np.random.default_rng(seed).geometric(p, nbytes), 255).astype(np.uint8)


def extreme(nbytes: int) -> Plane:
    plane = np.full(nbytes, 200, np.uint8)
    plane[nbytes // 3] = 3
    return plane


def changing(nbytes: int) -> Plane:
    """Return parts of different kinds, so that blocks are constant, raw, and with old and new tables."""
    rng = np.random.default_rng(5)
    repository = [
        skewed(BLOCK, 1),
        skewed(BLOCK, 2),
        np.zeros(BLOCK, np.uint8),
        rng.integers(0, 256, BLOCK, dtype=np.uint8),
        skewed(BLOCK, 3),
        skewed(BLOCK, 4, 0.02),
        np.arange(nbytes, dtype=np.uint32).astype(np.uint8) // 4,
    ]
    return np.resize(np.concatenate(repository), nbytes)


LENGTHS = [0, 1, 2, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, BLOCK // 2 - 1, BLOCK // 2, BLOCK // 2 + 1]
LENGTHS += [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 63, BLOCK + 64, 2 * BLOCK - 1, 2 * BLOCK + 1]
PLANES: dict[str, Callable[[], Plane]] = {
    **{f"skewed {n}": lambda n=n: skewed(n, n) for n in LENGTHS},
    "all alike": lambda: np.full(BLOCK + 5, 77, np.uint8),
    "two symbols, one of them once": lambda: extreme(BLOCK + 100),
    "two symbols, one of them once, few": lambda: extreme(900),
    "256 equally likely": lambda: np.resize(np.arange(256, dtype=np.uint8), BLOCK),
    "256, one of them likelier": lambda: np.where(
        skewed(BLOCK) > 1, np.resize(np.arange(256, dtype=np.uint8), BLOCK), 9
    ),
    "32 symbols": lambda: np.minimum(skewed(BLOCK + 77), 31).astype(np.uint8) + 100,
    "33 symbols": lambda: np.concatenate([np.arange(33, dtype=np.uint8), np.minimum(skewed(5000), 32)]),
    "a symbol the sample misses": lambda: np.concatenate([skewed(BLOCK - 1), np.array([250], np.uint8)]),
    "blocks of every mode": lambda: changing(8 * BLOCK + 100),
}


def encoded_by(encode: Callable[[Plane, Plane], int], plane: Plane) -> bytes:
    bound = reference.plane_bound(plane.size)
    room = np.full(bound + GUARD, 0x5A, np.uint8)
    nbytes = encode(plane, room[:bound])
    assert nbytes <= bound
    assert (room[bound:] == 0x5A).all()
    return room[:nbytes].tobytes()


def decoded_by(decode: Callable[[Plane, Plane], bool], payload: bytes, nbytes: int) -> bytes | None:
    room = np.full(nbytes + 2 * GUARD, 0x5A, np.uint8)
    is_right = decode(np.frombuffer(payload, np.uint8), room[GUARD : GUARD + nbytes])
    assert (room[:GUARD] == 0x5A).all()
    assert (room[GUARD + nbytes :] == 0x5A).all()
    return room[GUARD : GUARD + nbytes].tobytes() if is_right else None


@pytest.mark.parametrize("name", PLANES)
def test_all_implementations_make_and_read_the_same_bytes(name: str) -> None:
    plane = PLANES[name]()
    payloads = {twin: encoded_by(encode, plane) for twin, encode in ENCODERS.items()}
    assert len(set(payloads.values())) == 1
    payload = payloads["numpy"]
    for twin, decode in DECODERS.items():
        assert decoded_by(decode, payload, plane.size) == plane.tobytes(), twin
        assert decoded_by(decode, payload + b"\0", plane.size) is None, twin
        assert decoded_by(decode, payload[:-1], plane.size) is None or not payload, twin


def test_random_alphabets_and_lengths_come_back() -> None:
    rng = np.random.default_rng(11)
    for _ in range(300):
        nbytes, symbols = int(rng.integers(0, 6000)), int(rng.integers(1, 257))
        shares = rng.dirichlet(np.full(symbols, rng.choice([0.02, 0.3, 5.0])))
        plane = rng.permutation(256)[rng.choice(symbols, nbytes, p=shares)].astype(np.uint8)
        payload = encoded_by(ENCODERS["portable"], plane)
        for loops in NATIVE:
            assert encoded_by(ENCODERS[loops], plane) == payload, loops
            assert decoded_by(DECODERS[loops], payload, nbytes) == plane.tobytes(), loops


def test_blocks_of_every_mode_are_made() -> None:
    payload, modes, at = encoded_by(ENCODERS[NATIVE[0]], changing(8 * BLOCK)), set(), 0
    while at < len(payload):
        modes.add(payload[at])
        at += 4 + int.from_bytes(payload[at + 1 : at + 4], "little")
    assert modes == {0, 1, 2, 3}


def test_a_coded_plane_comes_close_to_its_entropy() -> None:
    for p in (0.02, 0.3, 0.9, 0.99):
        plane = skewed(4 * BLOCK, 7, p)
        shares = np.bincount(plane, minlength=256) / plane.size
        shares = shares[shares > 0]
        entropy_nbytes = float(-(shares * np.log2(shares)).sum()) * plane.size / 8
        # Each block has 64 states, and each table at most 2 bytes per symbol.
        assert len(encoded_by(ENCODERS[NATIVE[0]], plane)) < 1.005 * entropy_nbytes + 4 * (260 + 32 + 2 * shares.size)


def test_every_quotient_is_right() -> None:
    # The vector loops divide floats: two symbols of every possible share are coded in both orders.
    rng = np.random.default_rng(3)
    for freq in range(1, 4096, 3):
        plane = (rng.random(64 * 64) < freq / 4096).astype(np.uint8)
        assert len({encoded_by(ENCODERS[loops], plane) for loops in NATIVE}) == 1, freq


@pytest.mark.parametrize("twin", ENCODERS)
def test_wrong_buffer_size_raises_value_error(twin: str) -> None:
    plane = skewed(1000)
    with pytest.raises(ValueError, match="length"):
        ENCODERS[twin](plane, np.empty(reference.plane_bound(1000) - 1, np.uint8))
    with pytest.raises(ValueError, match="buffer"):
        ENCODERS[twin](plane, np.frombuffer(bytes(reference.plane_bound(1000)), np.uint8))
    with pytest.raises(ValueError, match="buffer"):
        DECODERS[twin](plane, np.frombuffer(bytes(10), np.uint8))


def mutations(count: int, seed: int) -> Iterator[tuple[bytes, int]]:
    """Yield hostile payloads and the length to decode: bytes changed, cut, repeated, swapped, or invented."""
    rng = np.random.default_rng(seed)
    planes = [skewed(n, n) for n in (64, 700, 1500, 4096 + 17)]
    planes += [extreme(1400), np.full(300, 4, np.uint8), skewed(3000, 1, 0.01), np.arange(999).astype(np.uint8)]
    valid = [(encoded_by(ENCODERS["portable"], plane), plane.size) for plane in planes]
    for _ in range(count):
        content, nbytes = valid[rng.integers(len(valid))]
        payload = bytearray(content)
        kind = int(rng.integers(8))
        if kind < 4:
            # Headers, tables and states are at the front, where a change has most effect.
            reach = len(payload) if kind < 2 else min(len(payload), 400)
            for place in rng.integers(0, reach, rng.integers(1, 4)):
                payload[place] = int(rng.integers(256))
        elif kind == 4:
            payload = payload[: rng.integers(len(payload))]
        elif kind == 5:
            nbytes = max(0, nbytes + int(rng.integers(-130, 130)))
        elif kind == 6:
            # The right length for another content: a valid header with a body of noise.
            payload[4:] = rng.bytes(len(payload) - 4)
        else:
            payload = bytearray(rng.bytes(int(rng.integers(0, 1200))))
            payload[:1] = bytes([int(rng.integers(4))])
        yield bytes(payload), nbytes


def same_verdict(payload: bytes, nbytes: int, twins: Sequence[str]) -> bool:
    found = {decoded_by(DECODERS[twin], payload, nbytes) for twin in twins}
    assert len(found) == 1
    return found != {None}


@pytest.mark.deep
def test_native_decoders_agree_on_mutated_payloads(sample) -> None:
    count = sample.count(200_000, parts=40)
    verdicts = [same_verdict(payload, nbytes, NATIVE) for payload, nbytes in mutations(count, sample.seed(3))]
    assert len(verdicts) == count >= (200_000 if sample.is_whole else 5000)
    # A change in the final fill bytes cannot be detected here. Nearly all other changes are.
    assert 0 < sum(verdicts) < 0.3 * count


def test_numpy_and_native_agree_on_mutated_payloads() -> None:
    for payload, nbytes in mutations(300, 2):
        same_verdict(payload, nbytes, (NATIVE[0], "numpy"))


def test_invalid_tables_are_refused() -> None:
    plane = skewed(2000, 8)
    payload = encoded_by(ENCODERS["portable"], plane)
    assert payload[0] == 2
    first = 4 + 32
    for low, high in ((0, 0), (0, 16), (255, 255), (payload[first] + 1, payload[first + 1])):
        hostile = payload[:first] + bytes([low % 256, high]) + payload[first + 2 :]
        for twin, decode in DECODERS.items():
            assert decoded_by(decode, hostile, plane.size) is None, twin


def test_block_without_a_previous_table_is_refused() -> None:
    plane = np.concatenate([skewed(BLOCK, 1), skewed(BLOCK, 1)])
    payload = encoded_by(ENCODERS[NATIVE[0]], plane)
    second = 4 + int.from_bytes(payload[1:4], "little")
    assert payload[second] == 3
    for twin in NATIVE:
        assert decoded_by(DECODERS[twin], payload[second:], BLOCK) is None


def test_instruction_sets_are_listed_fastest_first() -> None:
    assert [name for name in ("avx512", "avx2", "portable") if name in NATIVE] == NATIVE
    plane = skewed(1000)
    room = np.empty(reference.plane_bound(1000), np.uint8)
    assert room[: on_native.encode_plane(plane, room)].tobytes() == encoded_by(ENCODERS["numpy"], plane)
    with pytest.raises(ValueError, match="no loops of that name"):
        on_native.encode_plane_by("sse9", plane, room)
