"""Write the README's table of measured numbers from the newest record of each case.

    python -m bench.table            # rewrites what stands between the markers in README.md
    python -m bench.table --print    # only prints it

Speeds of different cases come from different runs; inside a column all numbers come from one run, and the
device's row says what the disk gave in that run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import table_coding
from bench.measure import BUSY_CORES

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
Records = dict[str, dict[str, Any]]


def newest_records(results: Path) -> Records:
    """Return the newest record of each case."""
    records: Records = {}
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        if record["case"] not in records or records[record["case"]]["date"] < record["date"]:
            records[record["case"]] = record
    return records


def make_table(records: Records) -> str:
    """Return the table and the sentences below it, in Markdown."""
    save, load = _medians(records, "commit_durable"), _medians(records, "restore_cold")
    memory = _medians(records, "peak_memory")
    names = [name for name in {**save, **load} if not name.endswith("into=")]
    names.sort(key=lambda name: (name != "device", not name.startswith("ckstore"), -save.get(name, 0.0)))
    lines = [
        "| | durable save, GB/s | cold load, GB/s | memory beyond the state, save / load, MiB |",
        "|---|--:|--:|--:|",
    ]
    for name in names:
        cells = [_number(save.get(name)), _load_cell(name, load), _memory_cell(name, memory)]
        lines.append(f"| {_label(name)} | " + " | ".join(cells) + " |")
    missing: dict[str, str] = {}
    for case, record in records.items():
        if not case.startswith(table_coding.PREFIXES):
            missing |= record["not_available"]
    lines += [f"| {name} | not available: {reason} | | |" for name, reason in sorted(missing.items())]
    return "\n".join([*lines, "", *table_coding.tables(records), *_sentences(records)])


def _medians(records: Records, case: str) -> dict[str, float]:
    participants = records.get(case, {"participants": {}})["participants"]
    return {name: found["median"] for name, found in participants.items()}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _label(name: str) -> str:
    if name == "device":
        return "*the device itself, O_DIRECT, best depth*"
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


def _sentences(records: Records) -> list[str]:
    said = []
    ratios = records.get("commit_durable", {}).get("ratios", {})
    if ratios:
        pairs = [(name, found["median"]) for name, found in ratios.items() if name.startswith("ckstore none / ")]
        said.append(
            "Durable save of plain bytes, round by round: "
            + ", ".join(f"{median:.2f} times {name.partition(' / ')[2]}" for name, median in pairs)
            + "."
        )
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
    busy = [case for case, record in records.items() if record["setting"].get("busy_cores_before", 0.0) > BUSY_CORES]
    if busy:
        said.append(f"Not to be quoted, because something else was using the machine: {', '.join(sorted(busy))}.")
    said.append(_provenance(records))
    return said


def _provenance(records: Records) -> str:
    if not records:
        return "No measurements yet: `make bench`."
    newest = max(records.values(), key=lambda record: record["date"])
    setting = records.get("commit_durable", newest)["setting"]
    size = f"{setting['state_nbytes'] / 1e9:.1f} GB in {setting['tensors']} tensors, " if "tensors" in setting else ""
    machine = newest["machine"]
    return (
        f"{size}medians; {machine['processor']}, {machine['cores']} cores, {machine['file_system']}, "
        f"{machine['system']}; every tool with fsync, caches dropped before each load. "
        "Printed by `python -m bench.run` and `python -m bench.table`; what is behind each number: docs/BENCH.md."
    )


def replace_between_markers(text: str, table: str) -> str:
    """Return the text with everything between the markers replaced.

    Raises:
        LookupError: The text does not have both markers.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise LookupError(f"no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Write or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    parser.add_argument("--print", action="store_true", dest="is_dry")
    given = parser.parse_args(arguments)
    table = make_table(newest_records(given.results))
    if given.is_dry:
        print(table)
        return 0
    given.readme.write_text(replace_between_markers(given.readme.read_text(), table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
