"""Fixtures of tests with real savers; most use a folder in memory, so that no test waits for a disk."""

from __future__ import annotations

import pytest

from support.altered_savers import AlteredSavers
from support.saver_fixtures import *  # noqa: F403 - fixtures are found by their names


@pytest.fixture
def folder(fast_folder):
    """A folder for a store, in memory."""
    return fast_folder / "store"


@pytest.fixture
def altered(monkeypatch, fast_folder):
    """Replace savers by other programs."""
    return AlteredSavers(monkeypatch, fast_folder)
