"""Make the modules beside these tests importable; an arena and threads for those that stage."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from ckstore.saver.arena import Arena
from ckstore.staging.copying import Crew

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fast_folder(tmp_path):
    """Where no disk is waited for: what survives SIGKILL does not depend on the file system."""
    memory = Path("/dev/shm")
    base = memory / f"ckstore-{tmp_path.name}-{time.monotonic_ns()}" if memory.is_dir() else tmp_path / "fast"
    base.mkdir(mode=0o700)
    yield base
    shutil.rmtree(base)


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
