"""The bench of merges makes parts that a manifest can be made of, and runs torch's planner on the same shards."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # The bench is not part of the package; add the repository root to the path, as `python -m bench.run` does.
    sys.path.append(str(ROOT))

from bench import cases_merge, rank_parts  # noqa: E402


def test_the_model_has_the_tensors_that_the_goals_name():
    assert len(rank_parts.sizes_of(32, 1)) == 873
    assert all(count % 7 == 0 for count in rank_parts.sizes_of(1, 7).values())


def test_every_rank_contributes_its_share_of_every_tensor():
    world = rank_parts.make_world(4, 1, seed=0)
    nbytes = sum(unit.nbytes for unit in world.skeleton.units)
    for part in world.parts:
        assert 4 * int(part.ranges["nbytes"].sum()) == nbytes
        assert len(np.unique(part.ranges["unit"])) == len(world.skeleton.units)


def test_case_has_a_sample_for_each_world_and_way():
    result = cases_merge.ranks_plan(SimpleNamespace(is_small=True, rounds=1))
    assert not result.unusable
    ways = ("first", "again", "DCP")
    assert set(result.samples) == {f"{count} ranks: {way}" for count in cases_merge.WORLDS_SMALL for way in ways}
    assert all(result.fact(name, "manifest_mb") for name in result.samples)
    assert any("to the power of" in note for note in result.notes)
