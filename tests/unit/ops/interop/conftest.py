"""Provide a store to import into, and one child process that loads the files of all tests."""

from __future__ import annotations

import pytest

import ckstore
from ckstore.ops.interop import run
from ckstore.ops.interop.child import Loader


@pytest.fixture
def store(tmp_path):
    with ckstore.open(tmp_path / "store") as opened:
        yield opened


class KeptLoader(Loader):
    """A loader whose child is reused by the next test, so that torch is imported once."""

    def __exit__(self, kind, error, trace):
        """Leave the child running."""


@pytest.fixture(scope="session")
def kept_loader():
    loader = KeptLoader()
    yield loader
    loader.close()


@pytest.fixture(autouse=True)
def one_child_for_all(kept_loader, monkeypatch):
    monkeypatch.setattr(run, "Loader", lambda: kept_loader)
