"""Protects the memory of devices: what is kept there stays within its bound, and is let go when nothing wants it."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.device_bases import DeviceBases
from ckstore.ids import ChunkId

ONE, TWO, THREE = (ChunkId(bytes([number]) * 32) for number in range(3))


def tensor(nbytes=100):
    return np.zeros(nbytes, np.uint8)


@pytest.fixture
def bases():
    found = DeviceBases()
    found.begin(None)
    return found


def test_what_a_commit_made_is_there_for_the_next_one_and_for_no_other(bases):
    made = tensor()
    bases.keep(ONE, made)
    assert bases.take(ONE) is None
    bases.follow({ONE})
    assert bases.nbytes == 100
    assert bases.take(ONE) is made
    assert bases.take(ONE) is None
    assert bases.nbytes == 0


def test_nothing_is_kept_that_the_next_commit_does_not_want(bases):
    bases.keep(ONE, tensor())
    bases.keep(TWO, tensor())
    bases.follow({TWO, THREE})
    assert bases.take(ONE) is None
    assert bases.take(TWO) is not None


def test_a_failed_commit_lets_go_of_what_it_made(bases):
    bases.keep(ONE, tensor())
    bases.follow({ONE})
    bases.keep(TWO, tensor())
    assert bases.nbytes == 200
    bases.forget_drafts()
    assert bases.nbytes == 100
    bases.forget()
    assert bases.nbytes == 0
    assert bases.take(ONE) is None


def test_equal_chunks_are_kept_and_counted_once(bases):
    bases.keep(ONE, tensor())
    bases.keep(ONE, tensor())
    assert bases.nbytes == 100


def test_no_more_is_kept_than_was_allowed(bases):
    bases.begin(250)
    for chunk_id in (ONE, TWO, THREE):
        bases.keep(chunk_id, tensor())
    bases.follow({ONE, TWO, THREE})
    assert bases.nbytes == 200
    bases.begin(150)
    assert bases.nbytes == 100
    bases.begin(0)
    bases.keep(THREE, tensor())
    assert bases.nbytes == 0
