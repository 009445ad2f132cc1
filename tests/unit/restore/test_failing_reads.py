"""Protects restores from failing reads: these are retried, narrowed down, and reported as damage with offset."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.errors import BackendError, CorruptError
from ckstore.io.memory import MemoryBackend
from support.model import difference


def state_of(seed, count=60_000):
    source = np.random.default_rng(seed)
    return {"model": {"w": source.standard_normal(count), "b": source.standard_normal(9)}, "seed": seed}


class FailingReads(MemoryBackend):
    """Answer reads of some pack ranges with a medium error."""

    bad = range(0)
    count = 0

    def open_read(self, name):
        file = super().open_read(name)
        read_at = file.read_at

        def maybe_fail(offset, nbytes):
            if self.count and offset < self.bad.stop and offset + nbytes > self.bad.start:
                self.count -= 1
                raise BackendError("reading failed (EIO)", where=name)
            return read_at(offset, nbytes)

        file.read_at = maybe_fail
        return file


def test_read_that_fails_once_is_retried(caplog):
    backend = FailingReads()
    with ckstore.open(backend) as store:
        store.commit(state_of(1), 1)
        backend.bad, backend.count = range(0, 1 << 30), 1
        assert difference(store.restore(), state_of(1)) is None
        backend.count = 2
        assert difference(store.restore(), state_of(1)) is None


def test_unreadable_bytes_are_damage_with_offset(no_threads_left):
    backend = FailingReads()
    with ckstore.open(backend) as store:
        store.commit(state_of(1), 1)
        backend.bad, backend.count = range(100_000, 100_001), 1 << 30
        with pytest.raises(CorruptError, match="cannot be read") as caught:
            store.restore()
        assert caught.value.offset <= 100_000 < caught.value.offset + 8192
