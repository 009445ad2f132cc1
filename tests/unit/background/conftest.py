"""The fixtures of tests that stage, hand over and commit in a saver; none of them waits for a disk."""

from __future__ import annotations

import pytest

from support.saver_fixtures import *  # noqa: F403 - fixtures are found by their names


@pytest.fixture
def folder(fast_folder):
    """Where a store may be made, in memory."""
    return fast_folder / "store"
