"""Protects tables with a row for every record: what may be quoted is there, and a row says what was measured."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from bench import table, table_records
from bench.cases_training import FLOORS, _cost_note
from bench.measure import Result, Sample


def record_of(case, date="20260101T000000Z", *, processor="P", busy=0.0, nbytes=2_000_000_000, **parts):
    return {
        "case": case,
        "date": date,
        "commit": "0123456789ab+",
        "setting": {"rounds": 2, "busy_cores_before": busy, "state_nbytes": nbytes},
        "machine": {"processor": processor, "cores": 2, "file_system": "ext4", "system": "Linux 6"},
        "participants": {},
        "ratios": {},
        "notes": [],
        **parts,
    }


def participant(*values, **facts):
    samples = [{"value": value, **{name: each[at] for name, each in facts.items()}} for at, value in enumerate(values)]
    return {"median": sorted(values)[len(values) // 2], "samples": samples}


def returned(**others):
    both = {"ckstore none": participant(4.0, 6.0), "ckstore fast": participant(3.0, 3.5)}
    return record_of("stall_return", participants=both, **others)


def test_only_what_was_made_alone_and_of_2_gb_is_shown_oldest_first(tmp_path):
    made = [returned(date="3"), returned(date="1"), returned(date="2", busy=1.0), returned(date="4", nbytes=10**6)]
    for number, record in enumerate(made):
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    assert [record["date"] for record in table_records.read_records(tmp_path)] == ["1", "3"]


def test_a_row_says_when_with_what_code_where_and_what_with_its_range():
    told = table_records.make_tables(
        [returned(date="20260101T000000Z"), returned(date="20260102T000000Z", processor="Q")]
    )
    assert "| 20260101T000000Z | 0123456+ | A, 2 | 5.0 (4.0 to 6.0) | 3.2 (3.0 to 3.5) |" in told
    assert "| 20260102T000000Z | 0123456+ | B, 2 |" in told
    assert told.endswith("Machines: A: P, 2 cores, ext4, Linux 6; B: Q, 2 cores, ext4, Linux 6.")


def test_the_newest_records_of_a_case_are_shown_and_nothing_without_any():
    told = table_records.make_tables([returned(date=f"{number:02}") for number in range(20)])
    assert [f"| {number:02} |" in told for number in range(20)] == [False] * 8 + [True] * 12
    assert table_records.make_tables([]) == ""
    assert table_records.make_tables([record_of("stall_return"), record_of("gc_plan")]) == ""


def test_stalls_are_in_copies_and_rounds_are_won_by_the_shorter():
    names = ["ckstore none", "ckstore fast", "a copy on 2 threads", "DCP async_save", "torchsnapshot async_take"]
    result = Result("stall_blocking", "s", is_higher_better=False)
    values = {"ckstore none": (1, 2), "ckstore fast": (4, 3), names[2]: (2, 2), names[3]: (3, 6), names[4]: (8, 1)}
    for name in names:
        result.samples[name] = [Sample(float(value), {"copy_seconds": 2.0}) for value in values[name]]
    result.add_ratios(names[:2], names[2:])
    ratios = {name: {"rounds": rounds} for name, rounds in result.ratios.items()}
    found = {name: participant(*map(float, each), copy_seconds=[2.0, 4.0]) for name, each in values.items()}
    told = table_records.make_tables([record_of("stall_blocking", participants=found, ratios=ratios)])
    # As many copies of its round, and right before; of both, and DCP's; rounds that were shorter.
    assert "| 0.75 (0.50 to 1.00) | 1.75 (1.50 to 2.00) | 0.50 (0.50 to 0.50) | 1.38 (0.75 to 2.00) |" in told
    assert told.splitlines()[4].endswith("| 1.50 (1.50 to 1.50) | 2 / 1 | 1 / 1 |")


def test_walls_are_in_times_of_a_synchronous_commit():
    names = ["commit none", "later commit none"]
    found = {name: participant(0.5, 0.6, 0.7) for name in names}
    ratios = {
        "commit none / commit_async none": {"rounds": [1.0, 1.1, 1.3]},
        "later commit none / later guarded commit_async none": {"rounds": [0.9]},
    }
    told = table_records.make_tables([record_of("async_wall", participants=found, ratios=ratios)])
    assert told.splitlines()[4].endswith("| none | 0.60, 0.60 | 1.10 (1.00 to 1.30) |  |  | 0.90 (0.90 to 0.90) |")


def test_costs_are_those_that_the_case_notes():
    facts = {"held_up_share": 0.01, "saver_cpu_seconds": 0.5}
    facts |= {"lost_shares": [-0.02, 0.04, 0.05], "lost_seconds": [-0.03, 0.06, 0.07], "return_ms": 4.5}
    name = "training on 1 of 2 cores, ckstore none"
    note = _cost_note(name, [Sample(1.6, facts)])
    found = {name: participant(1.6, quiet_seconds=[1.5], return_ms=[4.5])}
    told = table_records.make_tables([record_of("stall_guarded", participants=found, notes=[note, "and more"])])
    assert "| 1 of 2 | 1.5 |  | 4.0 (4.0 to 4.0) %, 60 ms |  |  |  |  |  |  |  |  | 4.5 /  |" in told


def test_the_names_of_what_stands_in_for_a_commit_are_those_of_the_case():
    assert (*table_records.FLOORS, *table_records.COMPANIONS) == tuple(FLOORS)


def test_what_a_loop_keeps_is_what_the_case_notes():
    note = "ckstore none: the loop keeps 98.5% of its speed (90.4% to 100.3%), and has a processor for 99% of the time"
    told = table_records.make_tables([record_of("stall_python_loop", notes=[note])])
    assert "| 98.5 (90.4 to 100.3) |  |  |  |  |" in told


def test_documents_show_what_the_records_say():
    results, root = table.HERE / "results", table.HERE.parent
    newest, every = table.newest_records(results), table_records.make_tables(table_records.read_records(results))
    text, readme = (root / "docs" / "BENCH.md").read_text(), (root / "README.md").read_text()
    hint = "there are records that documents do not show: make bench-table"
    assert text == table.replace_between_markers(text, every, table.MARK_OF_RECORDS), hint
    assert text == table.replace_between_markers(text, table.make_details(newest)), hint
    assert readme == table.replace_between_markers(readme, table.make_table(newest)), hint


def test_a_document_without_a_place_for_a_table_is_told():
    with pytest.raises(LookupError, match="no <!-- other:begin -->"):
        table.replace_between_markers("<!-- bench:begin -->", "", "other")
