"""Protects the config bytes of a delta: what they mean, and which of them a reader refuses."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.codec import chunk_codec
from ckstore.codec.byte_codecs import require_elements
from ckstore.errors import MalformedError, UnsupportedError


def planes_of(source: np.ndarray, base: np.ndarray, width: int, config: bytes) -> np.ndarray:
    planes = np.empty(source.nbytes, np.uint8)
    chunk_codec.subtract_base(source.data.cast("B"), base.data.cast("B"), planes.data, width=width, config=config)
    return planes.reshape(width, -1)


def test_float_and_integer_deltas_come_back() -> None:
    source, base = np.array([1.0, -1.0, 0.0], "<f4"), np.array([1.0, 1.0, -0.0], "<f4")
    as_floats = planes_of(source, base, 4, chunk_codec.delta_config(is_float=True))
    as_integers = planes_of(source, base, 4, chunk_codec.delta_config(is_float=False))
    assert as_floats.tolist() != as_integers.tolist()
    for planes, config in ((as_floats, chunk_codec.FLOATS), (as_integers, chunk_codec.INTEGERS)):
        place = base.copy().data.cast("B")
        chunk_codec.add_base([plane.data for plane in planes], place, place, width=4, config=config)
        assert place.tobytes() == source.tobytes()


def test_delta_estimate_equals_that_of_its_planes() -> None:
    base = np.random.default_rng(1).integers(0, 1 << 31, 5000, np.uint32)
    bits = chunk_codec.delta_bits((base + 5).data.cast("B"), base.data.cast("B"), width=4, config=chunk_codec.INTEGERS)
    assert bits == [0.0, 0.0, 0.0, 0.0]
    assert planes_of(base + 5, base, 4, chunk_codec.INTEGERS)[:, 0].tolist() == [10, 0, 0, 0]


@pytest.mark.parametrize("config", [b"", b"\x02", b"\x00\x00", b"\xff"])
def test_configs_of_newer_writers_are_unsupported(config: bytes) -> None:
    with pytest.raises(UnsupportedError):
        chunk_codec.require_delta_config(config)


@pytest.mark.parametrize(("nbytes", "width"), [(0, 4), (6, 4), (8, 3), (8, 0), (16, 16)])
def test_wrong_element_width_or_length_is_malformed(nbytes: int, width: int) -> None:
    with pytest.raises(MalformedError):
        require_elements(nbytes, width)
