"""Protects chunk ids: a chunk that is hashed in pieces has the id and checksum of the whole chunk."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.commit.pipeline import PIECE_NBYTES, identity_and_checksum
from ckstore.format.wire import xxh3_64
from ckstore.hashing import chunk_id_of


@pytest.mark.parametrize(
    "nbytes", [0, 1, 1023, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 5 * PIECE_NBYTES + 77, 4 << 20]
)
def test_pieces_have_the_identity_of_the_whole_chunk(nbytes):
    plain = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).data
    assert identity_and_checksum(plain, None) == (chunk_id_of(plain), xxh3_64(plain))
