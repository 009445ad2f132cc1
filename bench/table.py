"""Write the tables of README.md and docs/BENCH.md from the newest records.

    python -m bench.table            # replace the text between the markers in both files
    python -m bench.table --print    # only print the tables

Numbers of different cases come from different runs. All numbers in one column come from one run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import table_cases, table_coding
from bench.table_cases import Record, is_busy, machine_kind

HERE = Path(__file__).resolve().parent
MARK = "bench"
Records = dict[str, Record]
MAIN_CASES = ("commit_durable", "restore_cold", "cpu_commit", "cpu_restore", "peak_memory", "stall_blocking")
"""The cases of README's table."""


def read_records(results: Path) -> list[Record]:
    """Return all records of a folder, oldest first."""
    records: list[Record] = [json.loads(path.read_text()) for path in results.glob("*.json")]
    return sorted(records, key=lambda record: str(record["date"]))


def newest_per_case(records: Iterable[Record]) -> Records:
    """Return the newest record of each case; an undisturbed record is preferred to a disturbed one."""
    newest: Records = {}
    for record in sorted(records, key=lambda record: (not is_busy(record), str(record.get("date", "")))):
        newest[record["case"]] = record
    return newest


STALLS = {
    "device": "a copy on 2 threads",
    "DCP": "DCP async_save",
    "torchsnapshot": "torchsnapshot async_take",
    "torch.save": "clone, then torch.save on a thread",
}
"""Tool -> what it is called in ``stall_blocking``. The names of ckstore are equal in all cases."""


def make_table(records: Records) -> str:
    """Return README's table and the sentences below it, in Markdown."""
    save, load = _medians(records, "commit_durable"), _medians(records, "restore_cold")
    memory, stall = _medians(records, "peak_memory"), _medians(records, "stall_blocking")
    processor = {case: _medians(records, case) for case in ("cpu_commit", "cpu_restore")}
    names = [name for name in {**save, **load} if not name.endswith("into=")]
    names.sort(key=lambda name: (name != "device", not name.startswith("ckstore"), -save.get(name, 0.0)))
    headings = [
        "durable save, GB/s",
        "cold load, GB/s",
        "async save: training waits, s",
        "extra memory, save / load, MiB",
        *["processor s/GB, save / load"] * any(processor.values()),
    ]
    lines = ["| | " + " | ".join(headings) + " |", "|---|" + "--:|" * len(headings)]
    for name in names:
        wait = stall.get(STALLS.get(name, name))
        used = _pair([found.get(name) for found in processor.values()])
        cells = [_number(save.get(name)), _load_cell(name, load), _number(wait), _memory_cell(name, memory), used]
        lines.append(f"| {_label(name)} | " + " | ".join(cells[: len(headings)]) + " |")
    empty = " |" * (len(headings) - 1)
    lines += [f"| {name} | not available: {reason} |{empty}" for name, reason in sorted(_missing(records).items())]
    sentences = [*_ratios(records), *_floors(*processor.values()), *_many_tensors(records)]
    footers = [*filter(None, [" ".join(sentences)]), *_busy(records, MAIN_CASES), _provenance(records)]
    return "\n\n".join(["\n".join(lines), *footers])


def _missing(records: Records) -> dict[str, str]:
    missing: dict[str, str] = {}
    for case in MAIN_CASES:
        missing |= records[case]["not_available"] if case in records else {}
    return missing


def _medians(records: Records, case: str) -> dict[str, float]:
    participants: dict[str, Any] = records.get(case, {"participants": {}})["participants"]
    return {name: found["median"] for name, found in participants.items()}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _pair(values: Sequence[float | None]) -> str:
    """Return the values for a save and a load; nothing if there are neither."""
    return " / ".join(map(_number, values)) if any(value is not None for value in values) else ""


def _label(name: str) -> str:
    if name == "device":
        return "*the disk with O_DIRECT; a memory copy*"
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
    listed = ", ".join(f"{median:.2f} times {_other_tool(name)}" for name, median in pairs)
    return [f"Speed of a durable save without compression, round by round: {listed}."] if listed else []


def _floors(save: dict[str, float], load: dict[str, float]) -> list[str]:
    """Say the least processor time that any tool needs for the same steps."""
    if not save or not load:
        return []
    copied, coded = save.get("floor: copy, hash"), save.get("floor: copy, hash, encode, decode")
    loaded, decoded = load.get("floor: copy, hash"), load.get("floor: hash, decode")
    return [
        f"Processor time of all threads; the least possible: copy and hash {_pair([copied, loaded])}, "
        f"with the coder of `fast` {_pair([coded, decoded])}."
    ]


def _many_tensors(records: Records) -> list[str]:
    found = _medians(records, "cpu_many_tensors")
    times = [found.get(f"10,000 x 1 KiB, {what}: ckstore") for what in ("save", "load")]
    if None in times:
        return []
    return [f"10,000 tensors of 1 KiB, save / load: {times[0]:.0f} / {times[1]:.0f} processor us a tensor."]


def _other_tool(ratio: str) -> str:
    return ratio.partition(" / ")[2].replace("device", "the disk")


def _busy(records: Records, cases: Iterable[str]) -> list[str]:
    """Name the cases that were measured while other programs used the machine."""
    busy = [case for case in cases if case in records and is_busy(records[case])]
    return [f"Disturbed by other programs, do not quote: {', '.join(sorted(busy))}."] if busy else []


def _provenance(records: Records) -> str:
    if not records:
        return "No measurements yet: `make bench`."
    setting = records.get("commit_durable", next(iter(records.values())))["setting"]
    size = f"{setting['state_nbytes'] / 1e9:.1f} GB in {setting['tensors']} tensors. " if "tensors" in setting else ""
    return (
        f"{size}Medians. Every tool syncs its files; caches are dropped before each load. torch.save in the "
        f"background: a clone, saved by a thread. {_machines(records, MAIN_CASES)} Measured by `make bench`, printed "
        "by `make bench-table`. More: [docs/BENCH.md](docs/BENCH.md)."
    )


def _machines(records: Records, cases: Iterable[str]) -> str:
    """Name the machine of each case, because records of different cases may come from different machines."""
    cases_of: dict[str, list[str]] = {}
    for case in cases:
        if case in records:
            found = records[case]["machine"]
            text = f"{machine_kind(records[case])}, {found['file_system']}, {found['system']}"
            cases_of.setdefault(text, []).append(case)
    if len(cases_of) == 1:
        return f"{next(iter(cases_of))}."
    return " ".join(f"{', '.join(cases)}: {text}." for text, cases in cases_of.items())


def make_sections(records: Sequence[Record]) -> dict[str, str]:
    """Return the generated part of each section of docs/BENCH.md, in Markdown, by the name of its markers."""
    sections = {mark: table_cases.make_tables(records, cases) for mark, cases in table_cases.SECTIONS.items()}
    coding = [*table_coding.tables(newest_per_case(records)), *_busy(newest_per_case(records), table_coding.CASES)]
    return sections | {"coding": "\n".join(coding), "residual": table_coding.residual_table(records)}


def replace_between_markers(text: str, table: str, mark: str = MARK) -> str:
    """Return the text with everything between ``<!-- MARK:begin -->`` and ``<!-- MARK:end -->`` replaced.

    Raises:
        LookupError: One of the markers is missing.
    """
    head, begin, rest = text.partition(f"<!-- {mark}:begin -->")
    _, end, tail = rest.partition(f"<!-- {mark}:end -->")
    if not begin or not end:
        raise LookupError(f"no <!-- {mark}:begin --> ... <!-- {mark}:end -->")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Write or print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    parser.add_argument("--details", type=Path, default=HERE.parent / "docs" / "BENCH.md")
    parser.add_argument("--print", action="store_true", dest="is_dry")
    given = parser.parse_args(arguments)
    records = read_records(given.results)
    replacements = [(given.readme, MARK, make_table(newest_per_case(records)))]
    replacements += [(given.details, mark, text) for mark, text in make_sections(records).items()]
    for path, mark, text in replacements:
        if given.is_dry:
            print(text)
        else:
            path.write_text(replace_between_markers(path.read_text(), text, mark))
    return 0


if __name__ == "__main__":
    sys.exit(main())
