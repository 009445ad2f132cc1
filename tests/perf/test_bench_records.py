"""Protects the tables of README and docs/BENCH.md: they show the newest records, with correct values."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from bench import table, table_cases, table_coding
from bench.cases import CASES
from bench.cases_training import MINIMAL_COMMITS, _cost_note
from bench.measure import Sample


def record_of(case, date="20260101T000000Z", *, processor="P", busy=0.0, **parts):
    return {
        "case": case,
        "date": date,
        "unit": "ms",
        "setting": {"rounds": 2, "busy_cores_before": busy},
        "machine": {"processor": processor, "cores": 2, "file_system": "ext4", "system": "Linux 6"},
        "participants": {},
        "ratios": {},
        "not_available": {},
        "notes": [],
        **parts,
    }


def participant(*values, **facts):
    samples = [{"value": value, **{name: each[at] for name, each in facts.items()}} for at, value in enumerate(values)]
    return {"median": sorted(values)[len(values) // 2], "samples": samples}


def returned(**others):
    both = {"ckstore none": participant(4.0, 6.0, 5.0), "ckstore fast": participant(3.0)}
    return record_of("stall_return", participants=both, **others)


def test_table_has_column_for_newest_record_of_machine():
    records = [returned(date="20260101T1"), returned(date="20260103T1"), returned(date="20260102T1", processor="Q")]
    text = table_cases.make_tables(records, ["stall_return"])
    assert "| | P, 2 cores, 2026-01-03 | Q, 2 cores, 2026-01-02 |" in text
    assert "| ckstore none | 5 (4 to 6) | 5 (4 to 6) |" in text
    assert "| ckstore fast | 3 | 3 |" in text
    assert "`python -m bench.run --case stall_return`" in text


def test_undisturbed_record_is_preferred():
    records = [returned(date="20260101T1"), returned(date="20260102T1", busy=1.0)]
    assert "2026-01-01 |" in table_cases.make_tables(records, ["stall_return"])
    assert table.newest_per_case(records)["stall_return"]["date"] == "20260101T1"
    assert "2026-01-02, *disturbed* |" in table_cases.make_tables(records[1:], ["stall_return"])


def test_case_without_records_has_no_table():
    assert table_cases.make_tables([], ["stall_return"]) == ""
    assert table_coding.residual_table([]) == ""


def test_missing_participant_is_shown_with_reason():
    text = table_cases.make_tables([returned(not_available={"DCP": "KeyError"})], ["stall_return"])
    assert text.endswith("| DCP | KeyError |")


def test_costs_are_parsed_from_case_note():
    facts = {"held_up_share": 0.01, "saver_cpu_seconds": 0.5}
    facts |= {"lost_shares": [-0.02, 0.04, 0.05], "lost_seconds": [-0.03, 0.06, 0.07], "return_ms": 4.5}
    note = _cost_note("training on 1 of 2 cores, ckstore none", [Sample(1.6, facts)])
    text = table_cases.make_tables([record_of("stall_guarded", notes=[note, "and more"])], ["stall_guarded"])
    assert text.endswith("| 1 of 2 cores train: ckstore none | 4.0 (4.0 to 4.0) %; 60 ms (60 to 60) |")


def test_costs_of_older_note_lack_milliseconds():
    note = "training on 1 of 2 cores, nothing: a commit costs 0.2% of a step (median of 18; 95%: -7.9% to 3.0%); of"
    text = table_cases.make_tables([record_of("stall_guarded", notes=[note])], ["stall_guarded"])
    assert text.endswith("| 1 of 2 cores train: nothing (error of the measurement) | 0.2 (-7.9 to 3.0) % |")


def test_loop_speed_is_parsed_from_case_note():
    note = "ckstore none: the loop keeps 98.5% of its speed (90.4% to 100.3%), and has a processor for 99% of the time"
    text = table_cases.make_tables([record_of("stall_python_loop", notes=[note])], ["stall_python_loop"])
    assert text.endswith("| ckstore none | 98.5 (90.4 to 100.3) |")


def test_every_training_participant_has_a_label():
    assert {name for name in MINIMAL_COMMITS if name.startswith("one copy")} <= set(table_cases.LABELS)


def test_residual_table_takes_newest_result():
    def resumed(date, ratio, gap):
        found = {f"near(), beta2 {beta}": participant(gap, ratio=[ratio]) for beta in ("0.95", "0.999")}
        return record_of("resume_gap", date, participants=found, notes=["(1.25x at beta2 0.95, 1.25x at beta2 0.999)"])

    text = table_coding.residual_table([resumed("1", 10.0, 0.1), resumed("2", 38.0, 0.0005)])
    # One checkpoint in 20 is exact: 20 / (19 / 38 + 1 / 1.25).
    assert text.splitlines()[2:] == ["| **near()** | 38 (15) · 0.0005 | 38 (15) · 0.0005 |"]


def test_every_table_has_a_title_and_a_case():
    listed = [case for cases in table_cases.SECTIONS.values() for case in cases]
    assert set(listed) == set(table_cases.TITLES)
    assert set(listed) <= set(CASES) | set(table_cases.COMMANDS)
    assert max(Counter(listed).values()) == 1


def test_one_record_per_case_and_machine():
    records = table.read_records(table.HERE / "results")
    # Each run of resume_gap measures different policies.
    kinds = Counter((r["case"], table_cases.machine_kind(r)) for r in records if r["case"] != "resume_gap")
    assert [kind for kind, count in kinds.items() if count > 1] == [], "git rm the older records"


def test_documents_show_the_newest_records():
    root, records = table.HERE.parent, table.read_records(table.HERE / "results")
    text, readme = (root / "docs" / "BENCH.md").read_text(), (root / "README.md").read_text()
    hint = "a document does not show the newest records: make bench-table"
    newest = table.make_table(table.newest_per_case(records))
    assert readme == table.replace_between_markers(readme, newest), hint
    for mark, tables in table.make_sections(records).items():
        assert text == table.replace_between_markers(text, tables, mark), f"{mark}: {hint}"


def test_document_without_markers_is_refused():
    with pytest.raises(LookupError, match="no <!-- other:begin -->"):
        table.replace_between_markers("<!-- bench:begin -->", "", "other")
