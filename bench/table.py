"""Write README's table and the longer ones of docs/BENCH.md from the newest record of each case, and some from all.

    python -m bench.table            # rewrites what stands between the markers in both files
    python -m bench.table --print    # only prints it

Speeds of different cases come from different runs; inside a column all numbers come from one run, and the
device's row says what the disk, or a memory copy, gave in that run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import table_coding, table_records
from bench.measure import BUSY_CORES

HERE = Path(__file__).resolve().parent
MARK, MARK_OF_RECORDS = "bench", "records"
Records = dict[str, dict[str, Any]]
MAIN_CASES = ("commit_durable", "restore_cold", "peak_memory", "stall_blocking")
"""Whose records README's table shows."""

BACKGROUND_CASES = (
    "stall_gpu_guarded",
    "stall_gpu_blocking",
    "stages_beside",
    "async_memory",
    "async_pages",
    "async_thousand",
)
"""Whose medians and notes stand in docs/BENCH.md as they are; of others, ``table_records`` shows every record."""


def newest_records(results: Path) -> Records:
    """Return the newest record of each case."""
    records: Records = {}
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        if record["case"] not in records or records[record["case"]]["date"] < record["date"]:
            records[record["case"]] = record
    return records


STALLS = {
    "device": "a copy on 2 threads",
    "DCP": "DCP async_save",
    "torchsnapshot": "torchsnapshot async_take",
    "torch.save": "clone, then torch.save on a thread",
}
"""What a tool is called where it saves in the background; ckstore has one name."""


def make_table(records: Records) -> str:
    """Return README's table and the sentences below it, in Markdown."""
    save, load = _medians(records, "commit_durable"), _medians(records, "restore_cold")
    memory, stall = _medians(records, "peak_memory"), _medians(records, "stall_blocking")
    names = [name for name in {**save, **load} if not name.endswith("into=")]
    names.sort(key=lambda name: (name != "device", not name.startswith("ckstore"), -save.get(name, 0.0)))
    lines = [
        "| | durable save, GB/s | cold load, GB/s | async save: training waits, s "
        "| memory beyond the state, save / load, MiB |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in names:
        wait = stall.get(STALLS.get(name, name))
        cells = [_number(save.get(name)), _load_cell(name, load), _number(wait), _memory_cell(name, memory)]
        lines.append(f"| {_label(name)} | " + " | ".join(cells) + " |")
    lines += [f"| {name} | not available: {reason} | | | |" for name, reason in sorted(_missing(records).items())]
    said = [*_ratios(records), *table_coding.summary(records), *_busy(records, MAIN_CASES), _provenance(records)]
    return "\n".join([*lines, "", *said])


def make_details(records: Records) -> str:
    """Return the tables and sentences of docs/BENCH.md, in Markdown."""
    others = [case for case in records if case not in MAIN_CASES]
    lines = [*table_coding.tables(records), *_sentences(records), *_busy(records, others)]
    return "\n".join([*lines, _machines(records, sorted(others))])


def _missing(records: Records) -> dict[str, str]:
    missing: dict[str, str] = {}
    for case in MAIN_CASES:
        missing |= records[case]["not_available"] if case in records else {}
    return missing


def _medians(records: Records, case: str) -> dict[str, float]:
    participants = records.get(case, {"participants": {}})["participants"]
    return {name: found["median"] for name, found in participants.items()}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _label(name: str) -> str:
    if name == "device":
        return "*the disk itself, O_DIRECT, best depth; a memory copy*"
    if name.startswith("ckstore"):
        return f"**ckstore**, compression {name.partition(' ')[2]}"
    return name


def _load_cell(name: str, load: dict[str, float]) -> str:
    in_place = load.get(f"{name}, into=")
    text = _number(load.get(name))
    return text if in_place is None else f"{text} (`into=`: {_number(in_place)})"


def _memory_cell(name: str, memory: dict[str, float]) -> str:
    save, load = memory.get(f"{name}: save"), memory.get(f"{name}: load")
    return "" if save is None or load is None else f"{save:.0f} / {load:.0f}"


def _ratios(records: Records) -> list[str]:
    ratios = records.get("commit_durable", {}).get("ratios", {})
    pairs = [(name, found["median"]) for name, found in ratios.items() if name.startswith("ckstore none / ")]
    listed = ", ".join(f"{median:.2f} times {name.partition(' / ')[2]}" for name, median in pairs)
    return [f"Durable save of plain bytes, round by round: {listed}."] if listed else []


def _sentences(records: Records) -> list[str]:
    said = []
    stored = _medians(records, "stored_real")
    if stored:
        listed = ", ".join(f"{name} {share:.1%}" for name, share in stored.items())
        said.append(f"Stored bytes of a really trained state (AdamW, fp32): {listed} of its size.")
    said += table_coding.sentences(records)
    again = records.get("commit_unchanged", {}).get("ratios", {})
    for name, found in again.items():
        other = name.partition(" / ")[2]
        said.append(f"Commit of an unchanged state: {found['median']:.2f} times the speed of {other}.")
    listing = records.get("ls_1000")
    if listing and "ckstore ls" in listing["participants"]:
        seconds, count = listing["participants"]["ckstore ls"]["median"], listing["setting"]["checkpoints"]
        said.append(f"`ckstore ls` of {count:,} checkpoints: {seconds:.2f} s.")
    said += [_as_it_is(case, records[case]) for case in BACKGROUND_CASES if case in records]
    return said


def _as_it_is(case: str, record: dict[str, Any]) -> str:
    """Return the medians and notes of a record, as one sentence of a list."""
    medians = [f"{name} {found['median']:.3g} {record['unit']}" for name, found in record["participants"].items()]
    notes = [note for note in record["notes"] if not note.startswith("not alone")]
    return f"- `{case}`: {'; '.join((*medians, *notes))}."


def _busy(records: Records, cases: Iterable[str]) -> list[str]:
    """Say which of these cases were measured while something else used the machine."""
    settings = {case: records[case]["setting"] for case in cases if case in records}
    busy = [case for case, setting in settings.items() if setting.get("busy_cores_before", 0.0) > BUSY_CORES]
    if not busy:
        return []
    return [f"Not to be quoted, because something else was using the machine: {', '.join(sorted(busy))}."]


def _provenance(records: Records) -> str:
    if not records:
        return "No measurements yet: `make bench`."
    setting = records.get("commit_durable", next(iter(records.values())))["setting"]
    size = f"{setting['state_nbytes'] / 1e9:.1f} GB in {setting['tensors']} tensors, " if "tensors" in setting else ""
    return (
        f"{size}medians; every tool with fsync, caches dropped before each load; torch.save in the background: of a "
        f"clone, on a thread. {_machines(records, MAIN_CASES)} Printed by `python -m bench.run` and "
        "`python -m bench.table`; what is behind each number, and all coders: docs/BENCH.md."
    )


def _machines(records: Records, cases: Iterable[str]) -> str:
    """Say on which machine each case was measured: records outlive machines."""
    cases_of: dict[str, list[str]] = {}
    for case in cases:
        if case in records:
            found = records[case]["machine"]
            text = f"{found['processor']}, {found['cores']} cores, {found['file_system']}, {found['system']}"
            cases_of.setdefault(text, []).append(case)
    if len(cases_of) == 1:
        return f"{next(iter(cases_of))}."
    return " ".join(f"{', '.join(cases)}: {text}." for text, cases in cases_of.items())


def replace_between_markers(text: str, table: str, mark: str = MARK) -> str:
    """Return the text with everything between ``<!-- MARK:begin -->`` and ``<!-- MARK:end -->`` replaced.

    Raises:
        LookupError: The text does not have both.
    """
    head, begin, rest = text.partition(f"<!-- {mark}:begin -->")
    _, end, tail = rest.partition(f"<!-- {mark}:end -->")
    if not begin or not end:
        raise LookupError(f"no <!-- {mark}:begin --> ... <!-- {mark}:end -->")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Write or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    parser.add_argument("--details", type=Path, default=HERE.parent / "docs" / "BENCH.md")
    parser.add_argument("--print", action="store_true", dest="is_dry")
    given = parser.parse_args(arguments)
    records = newest_records(given.results)
    every = table_records.make_tables(table_records.read_records(given.results))
    for path, mark, text in (
        (given.readme, MARK, make_table(records)),
        (given.details, MARK, make_details(records)),
        (given.details, MARK_OF_RECORDS, every),
    ):
        if given.is_dry:
            print(text)
        else:
            path.write_text(replace_between_markers(path.read_text(), text, mark))
    return 0


if __name__ == "__main__":
    sys.exit(main())
