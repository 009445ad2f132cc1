"""Protects roundings of a base: only exact ones are recognized, and wrong payloads are refused."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.codec import chunk_codec
from ckstore.errors import MalformedError, UnsupportedError

MASTERS = np.random.default_rng(1).standard_normal(5000).astype("<f4")
HALVES = MASTERS.astype("<f2")
BF16 = ((MASTERS.view("<u4") + 0x7FFF + (MASTERS.view("<u4") >> 16 & 1)) >> 16).astype("<u2")


def flat(elements: np.ndarray) -> memoryview:
    return memoryview(elements.tobytes())


def test_both_roundings_are_found_and_decoded() -> None:
    for chunk, config in ((BF16, chunk_codec.BF16), (HALVES, chunk_codec.FP16)):
        assert chunk_codec.rounding_config(flat(chunk), flat(MASTERS)) == config
        destination = memoryview(bytearray(chunk.nbytes))
        payload = memoryview(chunk_codec.ROUNDED_PAYLOAD)
        chunk_codec.round_base(payload, flat(MASTERS), destination, width=2, config=config)
        assert destination.tobytes() == chunk.tobytes()


@pytest.mark.parametrize("place", [0, 2500, 4999])
def test_one_differently_rounded_element_is_none(place: int) -> None:
    chunk = BF16.copy()
    chunk[place] += 1
    assert chunk_codec.rounding_config(flat(chunk), flat(MASTERS)) is None


def test_stochastic_rounding_and_truncation_are_none() -> None:
    assert chunk_codec.rounding_config(flat((MASTERS.view("<u4") >> 16).astype("<u2")), flat(MASTERS)) is None


@pytest.mark.parametrize(("chunk_nbytes", "base_nbytes"), [(0, 0), (3, 6), (4, 4), (4, 16), (2, 0)])
def test_impossible_lengths_are_none(chunk_nbytes: int, base_nbytes: int) -> None:
    assert chunk_codec.rounding_config(memoryview(bytes(chunk_nbytes)), memoryview(bytes(base_nbytes))) is None


@pytest.mark.parametrize("config", [b"", b"\x00", b"\x03", b"\x01\x00"])
def test_configs_of_newer_writers_are_unsupported(config: bytes) -> None:
    with pytest.raises(UnsupportedError):
        chunk_codec.require_rounding_config(config)


@pytest.mark.parametrize(
    ("payload", "nbytes", "width"),
    [(b"", 4, 2), (b"\x01", 4, 2), (b"\x00\x00", 4, 2), (b"\x00", 0, 2), (b"\x00", 3, 2), (b"\x00", 4, 4)],
)
def test_other_payloads_and_elements_are_malformed(payload: bytes, nbytes: int, width: int) -> None:
    with pytest.raises(MalformedError):
        chunk_codec.round_base(
            memoryview(payload),
            memoryview(bytes(2 * nbytes)),
            memoryview(bytearray(nbytes)),
            width=width,
            config=chunk_codec.BF16,
        )
