"""Protects the sampling of deep tests: successive commits visit every case and every point of each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.sampling import COMMITS_MAX, VARIABLE, Commit, Sample
from support.sampling_plugin import MARKER, PROGRAMMES, Programme

TESTS = Path(__file__).parent.parent
PARTS = [(cases, points) for cases in range(1, COMMITS_MAX + 1) for points in range(1, COMMITS_MAX // cases + 1)]


def visits(programme, points, points_parts, numbers, depth):
    """Return each visited case and point, with its number of visits, over some commits."""
    return [
        (case_id, point)
        for number in numbers
        for case, case_id in enumerate(programme.case_ids)
        if (sample := Sample(Commit(number, "0"), depth, programme.case_parts)).takes(case)
        for point in sample.part(points, parts=points_parts)
    ]


@given(
    parts=st.sampled_from(PARTS),
    case_count=st.integers(1, 12),
    point_count=st.integers(0, 60),
    first=st.integers(0, 10_000),
)
def test_successive_commits_visit_every_point_once(parts, case_count, point_count, first):
    case_parts, point_parts = parts
    programme = Programme(tuple(map(str, range(case_count))), case_parts)
    points = range(point_count)
    whole = sorted((case_id, point) for case_id in programme.case_ids for point in points)
    numbers = range(first, first + case_parts * point_parts)
    assert sorted(visits(programme, points, point_parts, numbers, "sample")) == whole
    assert sorted(visits(programme, points, point_parts, range(first, first + 1), "all")) == whole
    assert sorted(visits(programme, points, point_parts, numbers, "slice")) == whole


@pytest.mark.parametrize("parts", [(1, 1), (1, 2), (1, 7), (1, 64), (2, 1), (3, 5), (4, 10), (15, 2), (64, 1)], ids=str)
def test_slice_takes_other_points_than_the_sample_and_as_many(parts):
    case_parts, point_parts = parts
    # A multiple of each number of parts below: in every part there is something.
    programme, points = Programme(tuple(map(str, range(2 * case_parts))), case_parts), range(2 * point_parts)
    for number in range(COMMITS_MAX):
        sampled, sliced = (visits(programme, points, point_parts, [number], depth) for depth in ("sample", "slice"))
        assert len(sliced) == len(sampled) == 4
        if parts == (1, 1):
            assert sliced == sampled, "there are no other points"
        else:
            assert not set(sliced) & set(sampled)


def test_union_of_samples_covers_every_deep_test(request):
    programmes = request.config.stash[PROGRAMMES]
    assert programmes or "tests" not in request.config.args
    for name, programme in programmes.items():
        assert programme.case_parts <= COMMITS_MAX, name
        file = request.config.rootpath / name.partition("::")[0]
        assert f"mark.{MARKER}" in file.read_text(), f"a slice would not read {file}"
        for depth in ("sample", "slice"):
            visited = {case_id for case_id, _ in visits(programme, [0], 1, range(7, 7 + COMMITS_MAX), depth)}
            assert visited == set(programme.case_ids), name


def run_pytest(folder, *options, **variables):
    """Run pytest on a folder with the plugin of the sampling. Return what it prints."""
    command = [sys.executable, "-m", "pytest", "-p", "support.sampling_plugin", "--rootdir", folder, *options, folder]
    # Other plugins only take time to import.
    own = {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **own, **variables}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True).stdout


@pytest.mark.parametrize("options", [[], ["-q"], ["-q", "-p", "xdist", "-n2"]], ids=str)
def test_run_prints_how_to_repeat_it(tmp_path, options):
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    printed = run_pytest(tmp_path, *options, **{VARIABLE: "7:abc"})
    assert printed.count(f"repeat with {VARIABLE}=7:abc") == 1, printed


def test_slice_reads_only_files_with_programmes(tmp_path):
    (tmp_path / "test_short.py").write_text("raise RuntimeError('read')")
    (tmp_path / "test_long.py").write_text(
        "import pytest\n\n@pytest.mark.deep\ndef test_long(sample): pass\ndef test_short(): pass\n"
    )
    printed = run_pytest(tmp_path, "--depth=slice", "-q")
    assert "1 passed, 1 deselected" in printed, printed


def test_more_parts_than_the_maximum_are_refused():
    with pytest.raises(AssertionError, match="at most 64"):
        Sample(Commit(1, "0"), "sample", case_parts=8).part(range(100), parts=9)


def test_seeds_differ_by_commit_except_in_deep_runs():
    one, other = (Sample(Commit(1, digest), "sample") for digest in ("0" * 40, "1" * 40))
    assert one.seed(7) != other.seed(7)
    assert abs(Sample(one.commit, "slice").seed(7) - one.seed(7)) > 1_000_000, "trials are counted up from a seed"
    assert Sample(Commit(1, "1" * 40), "all").seed(7) == Sample(Commit(2, "2" * 40), "all").seed(7) == 7
    assert one.count(240_000, parts=40) == 6000
    assert Sample(Commit(1, "0"), "slice").count(240_000, parts=40) == 6000
    assert Sample(Commit(1, "0"), "all").count(240_000, parts=40) == 240_000


def test_commit_comes_from_checkout_or_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Commit.of_checkout(tmp_path) == Commit(0, "0")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    for command in (
        ["init", "-q"],
        ["commit", "-q", "--allow-empty", "-m", "1"],
        ["checkout", "-q", "-b", "side"],
        ["commit", "-q", "--allow-empty", "-m", "side"],
        ["checkout", "-q", "-"],
        ["merge", "-q", "--no-ff", "-m", "2", "side"],
    ):
        subprocess.run([*git, *command], check=True)
    found = Commit.of_checkout(tmp_path)
    assert found.number == 2
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{tmp_path}", str(tmp_path / "shallow")], check=True)
    assert Commit.of_checkout(tmp_path / "shallow").number == found.seed
    monkeypatch.setenv(VARIABLE, str(found))
    assert Commit.of_checkout(tmp_path / "gone") == Commit(2, found.digest[:12])
    assert Commit.of_checkout(tmp_path).seed == found.seed
