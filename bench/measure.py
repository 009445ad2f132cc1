"""Interleaved rounds, medians and ranges, and ratios within a round.

The speed of shared disks drifts by a factor of two within minutes. Therefore every participant runs once in each round,
each round starts with another one, a ratio is computed from two samples of the same round, and then the median over the
rounds is taken. Numbers of different runs are never compared.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import machine

BUSY_CORES = 0.2


@dataclass
class Sample:
    """One measurement: its value in the unit of the case, and further facts."""

    value: float
    facts: dict[str, object] = field(default_factory=dict)


Participant = Callable[[], Sample]


@dataclass
class Result:
    """The result of a case, for people and for ``bench/results``."""

    case: str
    unit: str
    is_higher_better: bool
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    setting: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    columns: tuple[str, ...] = ()
    """Facts of the samples that the table shows too, as medians."""

    def median(self, name: str) -> float:
        """Return the median over the rounds of one participant."""
        return statistics.median(sample.value for sample in self.samples[name])

    def fact(self, name: str, fact: str) -> float | None:
        """Return the median over the rounds of a fact of one participant; None if it has no such fact."""
        values = [sample.facts[fact] for sample in self.samples[name] if fact in sample.facts]
        return statistics.median(float(str(value)) for value in values) if values else None

    def add_ratios(self, names: list[str], against: list[str]) -> None:
        """Compare participants round by round; a ratio above one means faster or smaller."""
        for name in names:
            for other in against:
                if name == other or name not in self.samples or other not in self.samples:
                    continue
                pairs = zip(self.samples[name], self.samples[other], strict=True)
                self.ratios[f"{name} / {other}"] = [
                    (mine.value / theirs.value) if self.is_higher_better else (theirs.value / mine.value)
                    for mine, theirs in pairs
                    if mine.value and theirs.value
                ]

    def to_record(self, folder: Path) -> dict[str, object]:
        """Return everything as JSON values."""
        participants = {
            name: {
                "median": self.median(name),
                "min": min(sample.value for sample in samples),
                "max": max(sample.value for sample in samples),
                "samples": [{"value": sample.value, **sample.facts} for sample in samples],
            }
            for name, samples in self.samples.items()
        }
        ratios = {
            name: {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values}
            for name, values in self.ratios.items()
            if values
        }
        return {
            "case": self.case,
            "date": machine.now(),
            "commit": machine.commit(),
            "unit": self.unit,
            "is_higher_better": self.is_higher_better,
            "setting": self.setting,
            "participants": participants,
            "ratios": ratios,
            "not_available": self.unusable,
            "notes": self.notes,
            "machine": machine.facts(folder),
            "versions": machine.versions(),
        }


def interleave(result: Result, participants: dict[str, Participant], rounds: int) -> Result:
    """Run every participant once per round; a participant that fails is removed, and the reason is recorded."""
    names = list(participants)
    others = machine.busy_cores()
    result.setting["busy_cores_before"] = round(others, 2)
    if others > BUSY_CORES:
        result.notes.append(f"not alone: {others:.1f} cores were busy with something else before the first round")
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in result.unusable:
                continue
            gc.collect()
            used = time.process_time()
            try:
                sample = participants[name]()
            except Exception as error:
                # Record the failure and continue, so that the table shows it.
                result.unusable[name] = f"{type(error).__name__}: {error}"
                result.samples.pop(name, None)
                log(f"  {name}: {result.unusable[name]}")
                continue
            # Includes preparation and cleanup; it distinguishes a busy machine from a slow participant.
            sample.facts["cpu_seconds"] = time.process_time() - used
            result.samples.setdefault(name, []).append(sample)
            log(f"  round {number + 1}/{rounds}  {name}: {sample.value:.3g} {result.unit}")
    result.samples = {name: result.samples[name] for name in names if name in result.samples}
    return result


def log(line: str) -> None:
    """Print progress to stderr, separate from the results."""
    print(line, file=sys.stderr, flush=True)


def show(result: Result) -> None:
    """Print the tables of a case."""
    console = Console()
    setting = ", ".join(f"{key} {value}" for key, value in result.setting.items())
    table = Table(title=f"{result.case} ({setting})", title_justify="left")
    table.add_column("")
    for heading in (f"median, {result.unit}", "min", "max", "rounds", *result.columns):
        table.add_column(heading, justify="right")
    for name, samples in result.samples.items():
        values = [sample.value for sample in samples]
        cells = [f"{value:.3g}" for value in (result.median(name), min(values), max(values))]
        further = [result.fact(name, column) for column in result.columns]
        table.add_row(name, *cells, str(len(values)), *("" if value is None else f"{value:.4g}" for value in further))
    for name, reason in result.unusable.items():
        table.add_row(name, f"not available: {reason[:60]}", "", "", "")
    console.print(table)
    if result.ratios:
        ratios = Table(title="inside a round (above 1: the first is better)", title_justify="left")
        for heading in ("", "median", "min", "max"):
            ratios.add_column(heading, justify="right" if heading else "left")
        for name, values in result.ratios.items():
            if values:
                cells = [f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))]
                ratios.add_row(name, *cells)
        console.print(ratios)
    for note in result.notes:
        console.print(note, style="dim", highlight=False)


def save(result: Result, results: Path, folder: Path) -> Path:
    """Write the record of a case and return its path."""
    record = result.to_record(folder)
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{result.case}-{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
