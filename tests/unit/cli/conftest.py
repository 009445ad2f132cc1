"""Provide a store that tests may read, a copy that they may change, and a function that runs commands."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def readonly_store(tmp_path_factory):
    """A store that no test changes."""
    from support.cli_stores import make_store

    return make_store(tmp_path_factory.mktemp("readonly_store") / "store")


@pytest.fixture
def store(readonly_store, tmp_path):
    """A copy of the read-only store that a test may change."""
    import shutil

    return Path(shutil.copytree(readonly_store, tmp_path / "store"))


@pytest.fixture
def call(capsys):
    """Return a function that runs a command in this process and returns exit code, stdout and stderr."""
    from ckstore.cli.main import run

    def call_it(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call_it
