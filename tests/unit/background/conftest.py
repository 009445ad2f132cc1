"""Load the fixtures for tests that stage, submit and commit in a saver."""

from __future__ import annotations

from support.saver_fixtures import *  # noqa: F403 - fixtures are found by their names
