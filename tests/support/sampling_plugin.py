"""A pytest plugin: the option ``--depth``, the marker ``deep``, and the fixture ``sample``; see sampling.py."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

import pytest

from support.sampling import DEPTHS, VARIABLE, Commit, Sample

MARKER = "deep"


@dataclass(frozen=True, slots=True)
class Programme:
    """A test that is marked ``deep``: the names of its cases, and into how many parts ``make test`` divides them."""

    case_ids: tuple[str, ...]
    case_parts: int


PROGRAMMES = pytest.StashKey[dict[str, Programme]]()
"""All that were collected, before any of their cases were deselected; by the name of the test."""
COMMIT = pytest.StashKey[Commit]()


def pytest_addoption(parser):
    parser.addoption(
        "--depth",
        choices=DEPTHS,
        default="sample",
        help="what of each long programme to run: sample, slice (other points, and programmes only), or all",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        f"{MARKER}(parts=1): a long programme; make test runs every parts-th of its cases, others with each commit",
    )
    commit = config.stash[COMMIT] = Commit.of_checkout(config.rootpath)
    # xdist's workers must collect what their head collects, also when somebody commits meanwhile.
    os.environ.setdefault(VARIABLE, str(commit))
    depth = config.getoption("depth")
    if depth != "all" and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = Sample(commit, depth).seed(0)


def pytest_terminal_summary(terminalreporter, config):
    # A header would not be printed: make test runs pytest with -q.
    commit, depth = config.stash[COMMIT], config.getoption("depth")
    terminalreporter.write_line(f"long programmes: {depth}, repeat with {VARIABLE}={commit}")


def pytest_ignore_collect(collection_path, config):
    """Leave out files without programmes in a slice, which would be imported for nothing."""
    if config.getoption("depth") != "slice" or collection_path.suffix != ".py" or collection_path.is_dir():
        return None
    return True if f"mark.{MARKER}" not in collection_path.read_text() else None


def sample_of(config, item):
    """Return the sample of one item, or None where it is no programme."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return None
    return Sample(config.stash[COMMIT], config.getoption("depth"), marker.kwargs.get("parts", 1))


def pytest_collection_modifyitems(config, items):
    kept, left_out, cases = [], [], defaultdict(list)
    for item in items:
        sample = sample_of(config, item)
        if sample is None:
            (left_out if config.getoption("depth") == "slice" else kept).append(item)
            continue
        name = item.nodeid.partition("[")[0]
        (kept if sample.takes(len(cases[name])) else left_out).append(item)
        cases[name].append((item.nodeid, sample.case_parts))
    config.stash[PROGRAMMES] = {
        name: Programme(tuple(nodeid for nodeid, _ in found), found[0][1]) for name, found in cases.items()
    }
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture
def sample(request):
    """Which part of this programme the run takes."""
    found = sample_of(request.config, request.node)
    assert found is not None, "only a test that is marked deep has a sample"
    return found
