"""The fixtures of tests with real savers; none of them waits for a disk but those that say so."""

from __future__ import annotations

import pytest

from support.altered_savers import AlteredSavers
from support.saver_fixtures import *  # noqa: F403 - fixtures are found by their names


@pytest.fixture
def folder(fast_folder):
    """Where a store may be made, in memory."""
    return fast_folder / "store"


@pytest.fixture
def altered(monkeypatch, fast_folder):
    """Start programs in the place of savers."""
    return AlteredSavers(monkeypatch, fast_folder)
