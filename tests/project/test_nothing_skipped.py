"""Protects CI from tests that are silently skipped: where no test may be skipped, a skip fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS_AT_RUN = "import pytest\ndef test_one(): pytest.skip({reason!r})\ndef test_two(): pass\n"
SKIPS_AT_COLLECTION = "import pytest\npytest.skip({reason!r}, allow_module_level=True)\n"


def run_pytest(folder, source, **variables):
    """Run pytest on one file with this plugin; return exit status and output."""
    (folder / "test_it.py").write_text(source)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "CKSTORE_TEST"))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "support.reporting",
        "-c",
        os.devnull,
        str(folder),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        # Other plugins only take time to import.
        env={**kept, **variables, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("source", [SKIPS_AT_RUN, SKIPS_AT_COLLECTION], ids=["run", "collection"])
def test_skip_fails_the_run_and_is_listed(tmp_path, source):
    code, output = run_pytest(tmp_path, source.format(reason="strace is absent"), CKSTORE_TEST_NOTHING_SKIPPED="1")
    assert code == 1, output
    assert "test_it.py" in output
    assert "strace is absent" in output.split("CKSTORE_TEST_NOTHING_SKIPPED")[1]


@pytest.mark.parametrize(
    ("reason", "variables"),
    [("strace is absent", {}), ("needs a GPU", {"CKSTORE_TEST_NOTHING_SKIPPED": "1"})],
    ids=["not asked for", "GPU"],
)
def test_other_skips_are_allowed(tmp_path, reason, variables):
    code, output = run_pytest(tmp_path, SKIPS_AT_RUN.format(reason=reason), **variables)
    assert code == 0, output
