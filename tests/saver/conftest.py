"""Make the modules beside these tests importable; an arena and threads for those that stage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckstore.saver.arena import Arena
from ckstore.staging.copying import Crew

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def arena():
    """An arena of one slot."""
    made = Arena.create()
    yield made
    made.close()


@pytest.fixture
def crew():
    """Two threads that copy."""
    made = Crew(2)
    yield made
    made.close()
