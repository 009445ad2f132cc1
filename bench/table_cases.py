"""Tables of docs/BENCH.md: one for each case, with a column for each kind of machine."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.measure import BUSY_CORES

Record = dict[str, Any]
Cells = dict[str, str]
SECTIONS: dict[str, tuple[str, ...]] = {
    "saving": (
        "commit_durable",
        "restore_cold",
        "peak_memory",
        "cpu_commit",
        "cpu_restore",
        "cpu_many_tensors",
        "commit_unchanged",
        "history_commit_fp32",
        "history_restore_fp32",
    ),
    "background": ("stall_blocking", "stall_return", "async_wall", "async_pages", "async_memory", "async_thousand"),
    "training": ("stall_guarded", "stall_accumulation", "stall_python_loop", "stages_beside"),
    "gpu": ("stall_gpu_blocking", "stall_gpu_guarded", "telling_devices"),
    "stores": ("cpu_start", "ls_1000", "gc_plan", "gc_beside", "tiers", "coder_loops"),
    "ranks": (
        "ranks_balance",
        "ranks_compare",
        "ranks_plan",
        "ranks_save",
        "ranks_async",
        "ranks_restore",
        "ranks_reshard",
        "ranks_identity",
        "ranks_one",
    ),
    "journal": ("journal_bits", "journal_step", "journal_restore", "journal_replay"),
}
"""Section of docs/BENCH.md -> its cases, in order."""

TITLES = {
    "commit_durable": "Durable save of a new state",
    "restore_cold": "Load with cold caches",
    "peak_memory": "Memory used beyond the state",
    "cpu_commit": "Processor time of a durable save of a new state",
    "cpu_restore": "Processor time of a cold load into existing tensors",
    "cpu_many_tensors": "Processor time of many small tensors: save, load into existing tensors, return of an "
    "asynchronous save",
    "commit_unchanged": "Commit of a state that is already stored",
    "history_commit_fp32": "Durable commit of a keyframe and of a delta, plain bytes",
    "history_restore_fp32": "Cold restore of a keyframe and of a delta, plain bytes",
    "stall_blocking": "`commit_async` without a guard: time until it returns",
    "stall_return": "`commit_async` with all tensors guarded: time until it returns",
    "async_wall": "Time until a checkpoint is durable: synchronous, background, background with a guard",
    "async_pages": "First commit: huge pages and small pages in the arena",
    "async_memory": "Memory of trainer and saver beyond state and arena, highest of three commits",
    "async_thousand": "1,000 background commits of a small state",
    "stall_guarded": "Cost of one commit of 2 GB to a training loop",
    "stall_accumulation": "The same with longer steps (eight batches each)",
    "stall_python_loop": "Speed kept by a loop of pure Python during a save",
    "stages_beside": "Cost to a training loop of one stage, repeated on another core",
    "stall_gpu_blocking": "State on a GPU, nothing guarded: time until it may be changed again",
    "stall_gpu_guarded": "Training on a GPU: cost of one commit of 2 GB",
    "telling_devices": "Submitting copies of 401 small tensors (without a GPU: calls only)",
    "cpu_start": "Processor time of short commands on a store of five checkpoints",
    "ls_1000": "`ckstore ls` of 1,000 checkpoints",
    "gc_plan": "`ckstore gc --dry-run`, 300 tensors a checkpoint",
    "gc_beside": "Commit with and without a garbage collection running",
    "tiers": "256 MiB to and from an S3 server on the same machine",
    "coder_loops": "Plane coder on one core, by instruction set",
    "ranks_balance": "Highest number of bytes that a rank writes, relative to the mean of all ranks",
    "ranks_compare": "Commit of plain tensors that four ranks hold: processor time of all ranks, and bytes compared",
    "ranks_plan": "Rank 0 merges the parts of all ranks into one manifest: LLaMA 8B, 873 tensors",
    "ranks_save": "Durable save by four ranks, HSDP 2x2, and bytes written for each byte of the state",
    "ranks_async": "Background save by four ranks, FSDP, and by one with as many bytes: time until the call returns",
    "ranks_restore": "Cold load by another number of ranks, FSDP",
    "ranks_reshard": "Bytes that ranks of another layout read, alone or on one host, per byte that they need",
    "ranks_identity": "Unchanged state after a change of the ranks: share of its bytes that is written again",
    "ranks_one": "One process: without ranks, and as the only rank of a job",
    "journal_bits": "Bits that each training step takes, exactly stored, and state bytes / stored bytes",
    "journal_step": "A step between backward and the next forward, with and without a journal",
    "journal_restore": "Restore of a point, by the steps after its keyframe",
    "journal_replay": "Words that differ after 50 replayed steps",
}
COMMANDS = {"tiers": "python -m bench.tiers"}
"""Cases that ``bench.run`` does not know."""

COST = re.compile(
    r"training on (?P<threads>\d+) of (?P<cores>\d+) cores, (?P<name>.*): a commit costs (?P<share>\S+%) of a step "
    r"\(median[^;]*; 95%: (?P<low>\S+) to (?P<high>\S+)\)"
    r"(?:, (?P<ms>-?\d+) ms \((?P<ms_low>-?\d+) to (?P<ms_high>-?\d+)\))?"
)
"""What ``cases_training`` notes of a participant; old records do not have the milliseconds."""

KEPT = re.compile(r"(?P<name>.*): the loop keeps (?P<share>\S+%) of its speed \((?P<low>\S+) to (?P<high>\S+)\)")
"""What ``stall_python_loop`` notes of a participant."""

LABELS = {
    "one copy, one hash": "floor: copy, hash",
    "one copy, one hash, one write": "floor: copy, hash, write",
    "one copy, one hash, one coding": "floor: copy, hash, encode",
    "one copy, one hash, one coding, one write of that": "floor: copy, hash, encode, write",
    "1 MB beside a collection": "1 MB during a collection",
    "100 MB beside a collection": "100 MB during a collection",
    "decode at once": "decode a whole chunk",
    "decode in pieces": "decode in pieces of 128 KiB",
    "add to a base at once": "decode a whole delta",
    "add to a base in pieces": "decode a delta in pieces of 128 KiB",
    "code less a base": "encode as a delta",
    "code": "encode",
    "copy into blocks": "copy into write blocks",
    "nothing": "nothing (error of the measurement)",
}
"""Participant in a record -> what a reader calls it."""


def is_busy(record: Record) -> bool:
    """Return True if other programs used the machine when the record was made."""
    return float(record["setting"].get("busy_cores_before") or 0.0) > BUSY_CORES


def machine_kind(record: Record) -> str:
    """Return processor and number of cores, and the GPU if the case used one."""
    machine, gpu = record["machine"], record["setting"].get("gpu")
    kind = f"{machine['processor'].replace('(R)', '')}, {machine['cores']} cores"
    return kind if gpu is None else f"{kind}, {gpu}"


def newest_per_machine(records: Iterable[Record]) -> list[Record]:
    """Return the newest record of each kind of machine, newest first; an undisturbed one is preferred."""
    newest: dict[str, Record] = {}
    for record in sorted(records, key=lambda record: (not is_busy(record), str(record["date"]))):
        newest[machine_kind(record)] = record
    return sorted(newest.values(), key=lambda record: str(record["date"]), reverse=True)


def make_tables(records: Sequence[Record], cases: Sequence[str]) -> str:
    """Return the tables of these cases, in Markdown; a case without records has none."""
    tables = []
    for case in cases:
        found = newest_per_machine(record for record in records if record["case"] == case)
        if found:
            tables.append(_table(case, found))
    return "\n\n".join(tables)


def _table(case: str, records: Sequence[Record]) -> str:
    unit, cells_of = CELLS.get(case, (records[0]["unit"], _values))
    columns = [cells_of(record) for record in records]
    names = dict.fromkeys(name for column in columns for name in column)
    heads = [f"{machine_kind(record)}, {_date(record)}" + ", *disturbed*" * is_busy(record) for record in records]
    command = COMMANDS.get(case, f"python -m bench.run --case {case}")
    lines = [f"**{TITLES[case]}**, {unit} (`{command}`)", ""]
    lines += ["| | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for name in names:
        lines.append(f"| {LABELS.get(name, name)} | " + " | ".join(column.get(name, "") for column in columns) + " |")
    missing = {name: reason for record in records for name, reason in record["not_available"].items()}
    lines += [f"| {name} | {reason} |" + " |" * (len(heads) - 1) for name, reason in missing.items()]
    return "\n".join(lines)


def _date(record: Record) -> str:
    date = str(record["date"])
    return f"{date[:4]}-{date[4:6]}-{date[6:8]}"


def _values(record: Record) -> Cells:
    """Return the median and the range of each participant."""
    cells = {}
    for name, found in record["participants"].items():
        values = [sample["value"] for sample in found["samples"]]
        text = _short(found["median"])
        cells[name] = text if len(values) == 1 else f"{text} ({_short(min(values))} to {_short(max(values))})"
    return cells


def _short(value: float) -> str:
    """Return a number with three digits, never in exponential notation."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 0.001 else "0"


def _costs(record: Record) -> Cells:
    """Return the cost of a commit to a training loop, from the notes of a record."""
    cells = {}
    for match in filter(None, map(COST.match, record["notes"])):
        share = f"{match['share']} ({match['low']} to {match['high']})".replace("%", "")
        ms = f"; {match['ms']} ms ({match['ms_low']} to {match['ms_high']})" if match["ms"] else ""
        name = LABELS.get(match["name"], match["name"])
        cells[f"{match['threads']} of {match['cores']} cores train: {name}"] = f"{share} %{ms}"
    return cells


def _kept(record: Record) -> Cells:
    """Return the speed that a loop of pure Python keeps, from the notes of a record."""
    found = filter(None, map(KEPT.match, record["notes"]))
    return {match["name"]: f"{match['share']} ({match['low']} to {match['high']})".replace("%", "") for match in found}


def _with_manifests(record: Record) -> Cells:
    """Return the values of participants, and the bytes of ckstore's manifests for each tensor."""
    cells = _values(record)
    for name, found in record["participants"].items():
        values = [sample["manifest_bytes"] for sample in found["samples"] if "manifest_bytes" in sample]
        if values:
            state = name.partition(", ")[0]
            cells[f"{state}, ckstore's manifest"] = f"{_short(statistics.median(values))} bytes"
    return cells


def _with_bytes(record: Record) -> Cells:
    """Return the values of participants, each with the bytes written for each byte of the state."""
    return {name: f"{text}; {_fact(record, name, 'bytes_per_unique'):.3f}" for name, text in _values(record).items()}


def _with_compared(record: Record) -> Cells:
    """Return the values of participants, each with the bytes that were hashed only to be compared."""
    return {name: f"{text}; {_fact(record, name, 'compared_gb'):.3g} GB" for name, text in _values(record).items()}


def _with_waits(record: Record) -> Cells:
    """Return the values of participants, each with the wait at the optimizer's step if it is guarded."""
    cells = _values(record)
    for name, text in cells.items():
        if " guarded" in name:
            cells[name] = f"{text}; {_short(_fact(record, name, 'step_wait'))} at the step"
    return cells


def _with_ratios(record: Record) -> Cells:
    """Return the medians of participants, each with the ratio that it reaches."""
    return {
        name: f"{_short(found['median'])}; {_fact(record, name, 'ratio'):.2f}x"
        for name, found in record["participants"].items()
    }


def _replays(record: Record) -> Cells:
    """Return the words that differ, or that a replay was refused."""
    return {
        name: "refused: `ReplayError`" if _fact(record, name, "refused") else text
        for name, text in _values(record).items()
    }


def _fact(record: Record, name: str, fact: str) -> float:
    return statistics.median(sample[fact] for sample in record["participants"][name]["samples"])


def _by_layout(record: Record) -> Cells:
    """Return the values of all ways for each layout in one cell."""
    cells: dict[str, list[str]] = {}
    for name, found in record["participants"].items():
        layout, _, way = name.rpartition(": ")
        cells.setdefault(layout, []).append(f"{way} {found['median']:.3f}")
        if "one_host" in found["samples"][0]:
            cells[layout].append(f"on one host {_fact(record, name, 'one_host'):.3f}")
    return {layout: ", ".join(values) for layout, values in cells.items()}


CELLS: dict[str, tuple[str, Callable[[Record], Cells]]] = {
    "stall_guarded": ("share of a step, and milliseconds; median and 95 % interval", _costs),
    "stall_accumulation": ("share of a step, and milliseconds; median and 95 % interval", _costs),
    "stall_gpu_guarded": ("share of a step, and milliseconds; median and 95 % interval", _costs),
    "stall_python_loop": ("% of its speed without a save", _kept),
    "cpu_many_tensors": ("processor us/tensor", _with_manifests),
    "ranks_balance": ("1 is level", _by_layout),
    "ranks_compare": ("processor s", _with_compared),
    "ranks_save": ("s; bytes / byte", _with_bytes),
    "ranks_async": ("s", _with_waits),
    "ranks_reshard": ("read / needed", _by_layout),
    "ranks_identity": ("1 is everything", _by_layout),
    "journal_bits": ("bits/parameter; ratio", _with_ratios),
    "journal_replay": ("words", _replays),
}
"""Case -> unit and cells, where these are not the participants' values."""
