"""Protects the promises of a backend: one suite, run on memory and on folders with every engine."""

import pytest

from ckstore.io.local import LocalBackend
from ckstore.io.memory import MemoryBackend
from support.suites import BackendSuite


class TestMemory(BackendSuite):
    @pytest.fixture
    def backend(self):
        return MemoryBackend()


class TestLocalPwrite(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path):
        backend = LocalBackend(tmp_path, engine="pwrite")
        yield backend
        backend.close()


@pytest.mark.uring
class TestLocalUring(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path):
        backend = LocalBackend(tmp_path, engine="uring")
        yield backend
        backend.close()


class TestLocalThroughPageCache(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path):
        backend = LocalBackend(tmp_path, engine="auto", try_direct=False)
        assert not backend.is_direct
        yield backend
        backend.close()
