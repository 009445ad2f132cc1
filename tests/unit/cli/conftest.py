"""A store that tests may read but not change."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """A store that no test changes."""
    from support.cli_stores import make_store

    return make_store(tmp_path_factory.mktemp("shelf") / "store")


@pytest.fixture
def store(shelf, tmp_path):
    """A copy of it that a test may change."""
    import shutil

    return Path(shutil.copytree(shelf, tmp_path / "store"))


@pytest.fixture
def call(capsys):
    """Run a command in this process; return exit code, stdout and stderr."""
    from ckstore.cli.main import run

    def call_it(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call_it
