"""The bench divides layouts as the named tools do, and its table has one row for each layout."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from torch.distributed.tensor import Replicate, Shard

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # The bench is not part of the package; add the repository root to the path, as `python -m bench.run` does.
    sys.path.append(str(ROOT))

from bench import cases_balance, table_cases  # noqa: E402
from bench.rank_layouts import ITEMSIZE, RankLayout, Sharded, level_layouts  # noqa: E402

MIB = 1 << 20


def layout_of(*tensors, mesh):
    return RankLayout("tiny", math.prod(mesh), list(tensors))


def replicated(name, numel, mesh=(2,)):
    return Sharded(name, (numel,), (Replicate(),) * len(mesh), mesh)


def test_groups_are_the_holders_of_each_shard():
    mesh = (2, 2)
    layout = layout_of(Sharded("w", (8, 3), (Replicate(), Shard(0)), mesh), replicated("n", 5, mesh), mesh=mesh)
    assert layout.nbytes == 29 * ITEMSIZE
    assert layout.groups == {(0, 2): [(0, 0, 48)], (1, 3): [(0, 48, 96)], (0, 1, 2, 3): [(1, 0, 20)]}


def test_what_one_rank_holds_counts_as_its_own():
    layout = layout_of(Sharded("w", (8,), (Shard(0),), (2,)), replicated("n", 5), mesh=(2,))
    assert layout.split() == ({(0, 1): [(1, 0, 20)]}, [16, 16])


def test_dcp_takes_tensors_in_order_and_megatron_the_largest_first():
    layout = layout_of(*(replicated(name, numel) for name, numel in [("a", 1), ("b", 2), ("c", 4)]), mesh=(2,))
    assert cases_balance.by_dcp(layout)[0] == [(1 + 4) * ITEMSIZE, 2 * ITEMSIZE]
    assert cases_balance.by_megatron_rule(layout)[0] == [4 * ITEMSIZE, (1 + 2) * ITEMSIZE]


def test_megatron_takes_shards_with_few_holders_first():
    mesh = (1, 2)
    layout = layout_of(replicated("n", 6, mesh), Sharded("w", (3,), (Replicate(), Shard(0)), mesh), mesh=mesh)
    assert cases_balance.by_megatron_rule(layout)[0] == [2 * ITEMSIZE, (1 + 6) * ITEMSIZE]


def test_ckstore_divides_a_large_tensor():
    layout = layout_of(replicated("w", 16 * MIB // ITEMSIZE), mesh=(2,))
    assert cases_balance.by_ckstore(layout)[0] == [8 * MIB, 8 * MIB]
    assert cases_balance.by_dcp(layout)[0] == cases_balance.by_megatron_rule(layout)[0] == [16 * MIB, 0]


def test_case_has_a_sample_for_each_layout_and_way():
    result = cases_balance.ranks_balance(SimpleNamespace(is_small=True))
    assert not result.unusable
    assert len(result.samples) == 2 * len(cases_balance.WAYS)
    name = level_layouts()[-1].name
    assert result.median(f"{name}: ckstore") < 1.02 < 2 < result.median(f"{name}: DCP")


def test_a_way_that_fails_is_recorded(monkeypatch):
    def fail(layout):
        raise RuntimeError("no such planner")

    monkeypatch.setitem(cases_balance.WAYS, "DCP", fail)
    result = cases_balance.ranks_balance(SimpleNamespace(is_small=True))
    assert set(result.unusable.values()) == {"RuntimeError: no such planner"}
    assert len(result.samples) == 2 * (len(cases_balance.WAYS) - 1)


def test_table_has_one_row_for_each_layout():
    record = {
        "case": "ranks_balance",
        "date": "20260101T000000Z",
        "unit": "highest / mean",
        "setting": {},
        "machine": {"processor": "P", "cores": 2},
        "participants": {
            "L, 8B: DCP": {"median": 1.2345, "samples": [{"value": 1.2345}]},
            "L, 8B: ckstore": {"median": 1.0, "samples": [{"value": 1.0}]},
        },
        "not_available": {},
    }
    text = table_cases.make_tables([record], ["ranks_balance"])
    assert "| L, 8B | DCP 1.234, ckstore 1.000 |" in text
