"""Make the modules beside these tests importable, and a store to import into."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ckstore

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store(tmp_path):
    with ckstore.open(tmp_path / "store") as opened:
        yield opened
