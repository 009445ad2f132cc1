"""A pytest plugin: print what was covered, and fail a run that skips tests which could have run.

CI sets ``CKSTORE_TEST_NOTHING_SKIPPED``, because everything that tests need is installed there.
"""

from __future__ import annotations

import os

import pytest

NOTHING_SKIPPED = "CKSTORE_TEST_NOTHING_SKIPPED"
"""Set where everything is installed that can be, as in CI: then a test skipped for another reason fails the run."""

HARDWARE = ("GPU", "CUDA", "the processor lacks")
"""One of these is in the reason of a test that is skipped for want of what nobody can install."""

COVERED = "covered"
"""A property of a test with this name is a line of the summary of what was covered."""


@pytest.fixture
def note(record_property):
    """Return what puts a line under the summary of the run, so that documents can quote what was covered."""
    return lambda line: record_property(COVERED, line)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    skipped = _skipped_without_excuse(session.config)
    if skipped and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    # Each phase of a test has a report, with all lines of the phases before.
    reports = [report for report in reports if getattr(report, "when", None) == "call"]
    lines = [line for report in reports for key, line in getattr(report, "user_properties", ()) if key == COVERED]
    if lines:
        terminalreporter.section("what was covered")
        terminalreporter.write_line("\n".join(lines))
    skipped = _skipped_without_excuse(config)
    if skipped:
        terminalreporter.section(f"skipped although {NOTHING_SKIPPED} is set", red=True)
        terminalreporter.write_line("\n".join(skipped))


def _skipped_without_excuse(config):
    """Return a line for each test skipped although nothing is wanting; xdist's workers leave it to its head."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get(NOTHING_SKIPPED) or hasattr(config, "workerinput") or reporter is None:
        return []
    found = [(report.nodeid, _reason(report)) for report in reporter.stats.get("skipped", ())]
    return [f"{nodeid}: {reason}" for nodeid, reason in found if not any(name in reason for name in HARDWARE)]


def _reason(report):
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
