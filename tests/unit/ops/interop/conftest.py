"""A store to import into."""

from __future__ import annotations

import pytest

import ckstore


@pytest.fixture
def store(tmp_path):
    with ckstore.open(tmp_path / "store") as opened:
        yield opened
