"""Protects the promises of an engine: one suite for all, and equal files from all."""

import pytest

from ckstore.io.direct_io import PwriteEngine
from ckstore.io.engine_choice import choose_engine
from ckstore.io.local import LocalBackend
from support.suites import BLOCK, EngineSuite, random_pieces, write_pack


class TestPwrite(EngineSuite):
    @pytest.fixture
    def engine(self):
        return PwriteEngine()


@pytest.mark.uring
class TestUring(EngineSuite):
    @pytest.fixture
    def engine(self, tmp_path):
        return choose_engine("uring", str(tmp_path))[0]


@pytest.mark.uring
def test_both_engines_write_the_same_file(tmp_path):
    pieces = random_pieces(5, 80, 3 * BLOCK)
    for name in ("pwrite", "uring"):
        backend = LocalBackend(tmp_path, engine=name)
        write_pack(backend, name, pieces)
        backend.close()
    assert (tmp_path / "pwrite").read_bytes() == (tmp_path / "uring").read_bytes()
