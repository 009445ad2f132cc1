"""Tables of docs/BENCH.md with a row for every record of commits in the background: machines differ, and so do hours.

A record that was made while something else used the machine is left out; so is one whose notes do not have the figures,
because it was made by an earlier way of measuring.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.measure import BUSY_CORES

Record = dict[str, Any]
Rows = Iterator[list[str]]
STATE_NBYTES = 2_000_000_000
RECORDS_MAX = 12
"""Of a case; the newest. Older ones lie in ``bench/results``."""

VARIANTS = ("none", "fast")
RIVALS = ("DCP async_save", "torchsnapshot async_take")
COST = re.compile(
    r"training on (?P<threads>\d+) of (?P<cores>\d+) cores, (?P<name>.*): a commit costs (?P<share>\S+%) of a step "
    r"\(median; 95%: (?P<low>\S+) to (?P<high>\S+)\), (?P<ms>-?\d+) ms \((?P<ms_low>-?\d+) to (?P<ms_high>-?\d+)\)"
)
"""What ``cases_training`` notes of a participant."""

KEPT = re.compile(r"(?P<name>.*): the loop keeps (?P<share>\S+%) of its speed \((?P<low>\S+) to (?P<high>\S+)\)")
"""What ``stall_python_loop`` notes of a participant."""

FLOORS = (
    "one copy, one hash",
    "one copy, one hash, one write",
    "one copy, one hash, one coding",
    "one copy, one hash, one coding, one write of that",
)
COMPANIONS = (
    "a process that computes for 2 s",
    "a process that reads 16 GB of memory",
    "a process that reads 16 GB out of its cache",
)
COST_HEADS = (
    "cores",
    "a step, s",
    "nothing",
    "none",
    "fast",
    "*one copy, one hash*",
    "*one write more*",
    "*one coding instead*",
    "*coding, and a write of that*",
    "*computing for 2 s*",
    "*reading 16 GB of memory*",
    "*16 GB out of its cache*",
    "call returns, ms: none / fast",
)


def read_records(results: Path) -> list[Record]:
    """Return all records of a folder of a state of 2 GB that were made alone, oldest first."""
    records = [json.loads(path.read_text()) for path in results.glob("*.json")]
    settings = [record["setting"] for record in records]
    records = [
        record
        for record, setting in zip(records, settings, strict=True)
        if setting.get("busy_cores_before", 0.0) <= BUSY_CORES
        and abs(setting.get("state_nbytes", 0) / STATE_NBYTES - 1) < 0.05
    ]
    return sorted(records, key=lambda record: str(record["date"]))


def make_tables(records: Sequence[Record]) -> str:
    """Return a table for each case that has records, and which letter in them stands for which machine, in Markdown."""
    letters: dict[str, str] = {}
    parts: list[str] = []
    for case, (said, heads, rows_of) in TABLES.items():
        made = [(record, rows) for record in records if record["case"] == case if (rows := list(rows_of(record)))]
        if not made:
            continue
        lines = ["| " + " | ".join(("record", "made with", "machine, rounds", *heads)) + " |"]
        lines.append("|---|---|---|" + "--:|" * len(heads))
        for record, rows in made[-RECORDS_MAX:]:
            machine = _machine(record)
            letter = letters.setdefault(machine, chr(ord("A") + len(letters)))
            # A plus: with changes that were not committed.
            code = record["commit"][:7] + "+" * record["commit"].endswith("+")
            where = f"{letter}, {record['setting']['rounds']}"
            lines += ["| " + " | ".join((record["date"], code, where, *cells)) + " |" for cells in rows]
        parts.append("\n".join((f"**`{case}`**: {said}.", "", *lines)))
    named = "; ".join(f"{letter}: {machine}" for machine, letter in letters.items())
    return "\n\n".join([*parts, f"Machines: {named}."] if parts else [])


def _machine(record: Record) -> str:
    found = record["machine"]
    return f"{found['processor']}, {found['cores']} cores, {found['file_system']}, {found['system']}"


def _ranged(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _times(record: Record, mine: str, other: str) -> list[float]:
    """Return how many times as long as another one a participant took, round by round; a ratio above 1 is shorter."""
    found = record["ratios"].get(f"{mine} / {other}")
    return [] if found is None else [1 / ratio for ratio in found["rounds"]]


def _return_rows(record: Record) -> Rows:
    found = [record["participants"].get(f"ckstore {name}") for name in VARIANTS]
    if all(found):
        yield [_ranged([sample["value"] for sample in each["samples"]], 1) for each in found if each]


def _blocking_rows(record: Record) -> Rows:
    copy = next((name for name in record["participants"] if name.startswith("a copy")), "")
    mine = [f"ckstore {name}" for name in VARIANTS]
    if not copy or not all(_times(record, name, copy) for name in mine):
        return
    yield [
        f"{record['participants'][copy]['median']:.3f}",
        *(_ranged(_times(record, name, copy), 2) for name in mine),
        *(_ranged(times, 2) if (times := _in_copies(record, name)) else "" for name in (*mine, RIVALS[0])),
        *(
            " / ".join(str(sum(times < 1 for times in _times(record, name, rival))) for name in mine)
            for rival in RIVALS
        ),
    ]


def _in_copies(record: Record, name: str) -> list[float]:
    """Return stalls, each held against a copy right before it, where the record has that."""
    samples = record["participants"].get(name, {"samples": []})["samples"]
    return [sample["value"] / sample["copy_seconds"] for sample in samples if sample.get("copy_seconds")]


def _wall_rows(record: Record) -> Rows:
    for name in VARIANTS:
        first, later = record["participants"].get(f"commit {name}"), record["participants"].get(f"later commit {name}")
        if first is not None and later is not None:
            walls = [
                record["ratios"].get(f"{when}commit {name} / {when}{how} {name}")
                for how in ("commit_async", "guarded commit_async")
                for when in ("", "later ")
            ]
            cells = ["" if wall is None else _ranged(wall["rounds"], 2) for wall in walls]
            yield [name, f"{first['median']:.2f}, {later['median']:.2f}", *cells]


def _cost_rows(record: Record) -> Rows:
    found = [match for note in record["notes"] if (match := COST.match(note))]
    for threads in sorted({match["threads"] for match in found}):
        costs = {match["name"]: match for match in found if match["threads"] == threads}
        quiet = [
            sample["quiet_seconds"]
            for name, participant in record["participants"].items()
            if name.startswith(f"training on {threads} of ")
            for sample in participant["samples"]
        ]
        cells = [_cost(costs.get(name)) for name in ("nothing", "ckstore none", "ckstore fast", *FLOORS, *COMPANIONS)]
        returned = [_returned(record, costs.get(f"ckstore {name}")) for name in VARIANTS]
        yield [f"{threads} of {found[0]['cores']}", f"{statistics.median(quiet):.1f}", *cells, " / ".join(returned)]


def _returned(record: Record, match: re.Match[str] | None) -> str:
    """Return after how many ms ``commit_async`` returns in a loop."""
    if match is None:
        return ""
    name = match[0].partition(":")[0]
    return f"{statistics.median(sample['return_ms'] for sample in record['participants'][name]['samples']):.1f}"


def _cost(match: re.Match[str] | None) -> str:
    if match is None:
        return ""
    share = f"{match['share']} ({match['low']} to {match['high']})".replace("%", "")
    return f"{share} %, {match['ms']} ms"


def _loop_rows(record: Record) -> Rows:
    kept = {match["name"]: match for note in record["notes"] if (match := KEPT.match(note))}
    if "ckstore none" in kept:
        names = ("ckstore none", "ckstore fast", "a process that computes", *RIVALS)
        yield [
            f"{kept[name]['share']} ({kept[name]['low']} to {kept[name]['high']})".replace("%", "")
            if name in kept
            else ""
            for name in names
        ]


TABLES: dict[str, tuple[str, tuple[str, ...], Callable[[Record], Rows]]] = {
    "stall_return": ("ms until the call returns, behind a guard", VARIANTS, _return_rows),
    "stall_blocking": (
        "until a blocking call has returned, in times of a copy; in how many rounds it is shorter than others' stalls",
        (
            "a copy, s",
            "none, copies of its round",
            "fast",
            "none, copies right before",
            "fast",
            "DCP",
            "shorter than DCP's: none / fast",
            "than torchsnapshot's",
        ),
        _blocking_rows,
    ),
    "async_wall": (
        "`commit_async` until its result, in times of a synchronous commit",
        (
            "compression",
            "synchronous: first, later, s",
            "blocking: first",
            "later",
            "behind a guard: first",
            "later",
        ),
        _wall_rows,
    ),
    "stall_guarded": ("what a commit costs of a step (95 % of draws of rounds)", COST_HEADS, _cost_rows),
    "stall_accumulation": ("the same, with longer steps", COST_HEADS, _cost_rows),
    "stall_python_loop": (
        "the speed that a loop of pure Python keeps, in %",
        ("none", "fast", "beside a process that spins", "DCP", "torchsnapshot"),
        _loop_rows,
    ),
}
"""Case -> what its table shows, the heads of its columns, and what makes rows of a record."""
