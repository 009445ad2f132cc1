"""The story of an import: find the checkpoints, put them in the order of their steps, and commit each.

find -> step of each, from its name or its content -> plan -> load and commit one after the other, oldest first.

Invariants:
- Nothing is committed before every checkpoint has its step, and all of them fit behind what the run holds.
- Each commit is durable before the next file is opened: an import that was interrupted goes on where it stopped.
- The files themselves are read, and never written.
"""

from __future__ import annotations

import importlib.util
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckstore.capture import Captured, capture
from ckstore.errors import CkstoreError, UnsupportedError, UsageError
from ckstore.format.layout import STEP_MAX
from ckstore.importing.discover import Found, Part, discover
from ckstore.importing.loader import Loader
from ckstore.importing.names import metrics_of_name, natural, number_of_name
from ckstore.importing.report import ImportEntry, ImportReport
from ckstore.importing.safetensors_file import open_safetensors
from ckstore.importing.storages import joined, merged
from ckstore.importing.trainer_state import metrics_in, read_trainer_state, step_in
from ckstore.info import Info
from ckstore.receipt import Receipt
from ckstore.tree import DictNode, ValueNode, items_of
from ckstore.values import decode_plain

STEP_KEYS = ("global_step", "iter_num", "iteration", "step", "steps", "iter", "global_steps", "n_steps", "num_updates")
METRIC_KEYS = ("best_val_loss", "val_loss", "loss", "train_loss", "eval_loss", "best_loss")


CommitCaptured = Callable[[Captured, int, Mapping[str, float]], Receipt]
"""Commits a state that was taken apart already, with its step and metrics."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for.

    Args:
        source: A file or folder.
        step: The step of the only checkpoint; None: it is found.
        numbered: Give steps 0, 1, 2 in the order of names, whatever names and contents say.
        exclude: Globs of names of files and folders that are left out.
    """

    source: Path
    step: int | None = None
    numbered: bool = False
    exclude: Sequence[str] = ()


@dataclass(slots=True)
class _Planned:
    found: Found
    step: int
    reason: str


def run_import(
    wanted: Wanted,
    run: str,
    there: Mapping[int, Info],
    commit: CommitCaptured,
    *,
    dry_run: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Plan, and unless it is a dry run, commit.

    Args:
        wanted: What to import.
        run: The run it goes into.
        there: The newest entry of each step that the run holds.
        commit: Commits one state.
        dry_run: Only plan.
        on_progress: Called with bytes of files done and bytes in all.

    Raises:
        UsageError: A step cannot be told, or would not be the newest of the run.
        CorruptError: A file cannot be read; what was committed before stays.
        UnsupportedError: A file holds what only code can make, or torch is missing or too old.
    """
    with Loader() as loader:
        planned = _plan(wanted, loader)
        entries = [_entry_of(each, planned, there) for each in planned]
        _check_order(entries, there, run)
        if dry_run:
            return ImportReport(str(wanted.source), run, True, tuple(entries))
        total = sum(entry.nbytes for entry in entries if entry.action == "import")
        done = 0
        for index, (each, entry) in enumerate(zip(planned, entries, strict=True)):
            if entry.action != "import":
                continue
            entries[index] = _import(each, entry, loader, commit)
            done += entry.nbytes
            if on_progress is not None:
                on_progress(done, total)
    return ImportReport(str(wanted.source), run, False, tuple(entries))


def _plan(wanted: Wanted, loader: Loader) -> list[_Planned]:
    found = discover(wanted.source, exclude=wanted.exclude)
    if wanted.step is not None:
        if len(found) != 1:
            raise UsageError(
                f"one step was given, and there are {len(found)} checkpoints", where=wanted.source,
                todo="name one file or folder of them",
            )  # fmt: skip
        return [_Planned(found[0], wanted.step, "as was asked for")]
    if wanted.numbered:
        return [_Planned(each, index, "in the order of names") for index, each in enumerate(found)]
    planned = [_Planned(each, *_step_of(each, loader)) for each in found]
    # Of two with one step the one whose name says so comes first: "last" is a copy of it.
    return sorted(planned, key=lambda each: (each.step, each.found.step is None, natural(each.found.name)))


def _step_of(found: Found, loader: Loader) -> tuple[int, str]:
    """Return the step of a checkpoint, and where it was found."""
    if found.trainer_state is not None:
        step = step_in(read_trainer_state(found.trainer_state))
        if step is not None:
            return step, f"global_step of {found.trainer_state.name}"
    if found.step is not None:
        return found.step, "from its name"
    for part in found.parts:
        if part.kind in ("torch", "dcp"):
            plain = _plain_values(_loaded(part, loader, is_peek=True))
            for key in STEP_KEYS:
                value = plain.get(key)
                if type(value) is int and 0 <= value <= STEP_MAX:
                    return value, f"{key} in its content"
    number = number_of_name(Path(found.name).stem if found.parts[0].key == "" else found.name)
    if number is not None:
        return number, "from the number in its name"
    raise UsageError(
        "neither name nor content says of which step the checkpoint is", where=found.name,
        todo="give --step for a single one, --numbered for steps in the order of names, or --exclude it",
    )  # fmt: skip


def _entry_of(each: _Planned, planned: Sequence[_Planned], there: Mapping[int, Info]) -> ImportEntry:
    found, step = each.found, each.step
    kinds = tuple(dict.fromkeys(part.kind for part in found.parts))
    entry = ImportEntry(found.name, step, kinds, "import", each.reason, found.nbytes, left_out=dict(found.left_out))
    first = next(other for other in planned if other.step == step)
    if first is not each:
        return replace(entry, action="skip", reason=f"{first.found.name} is of the same step")
    info = there.get(step)
    if info is not None:
        return replace(
            entry,
            action="skip",
            reason=f"the run holds step {step} already",
            seq=info.seq,
            bytes_state=info.bytes_state,
            bytes_written=info.bytes_written,
            metrics=info.metrics,
        )
    return entry


def _check_order(entries: Sequence[ImportEntry], there: Mapping[int, Info], run: str) -> None:
    """Refuse to make an older step the newest entry of a run: training would resume from it."""
    new = [entry.step for entry in entries if entry.action == "import"]
    if new and there and min(new) < max(there):
        raise UsageError(
            f"step {min(new)} would come behind step {max(there)}, which run {run!r} holds already, and be its latest",
            todo="import into a run of its own with --run, or leave older ones out with --exclude",
        )


def _import(each: _Planned, entry: ImportEntry, loader: Loader, commit: CommitCaptured) -> ImportEntry:
    found = each.found
    try:
        captured = _captured(found, loader)
        metrics = _metrics(found, captured)
        receipt = commit(captured, each.step, metrics)
    except CkstoreError as error:
        # Which of many files it was matters more than where in it.
        where = f"{found.name} (step {each.step})" + ("" if error.where is None else f", {error.where}")
        raise type(error)(error.what, where=where, todo=error.todo, **error.facts) from error
    return replace(
        entry,
        seq=receipt.seq,
        bytes_state=receipt.bytes_state,
        bytes_written=receipt.bytes_written,
        metrics=metrics,
        warnings=receipt.warnings,
    )


def _captured(found: Found, loader: Loader) -> Captured:
    """Return the state of a checkpoint: of one file as it is, of several under a key for each."""
    if len(found.parts) == 1 and not found.parts[0].key:
        return _loaded(found.parts[0], loader)
    parts = [(part.key, _loaded(part, loader)) for part in found.parts]
    if found.trainer_state is not None:
        parts.append(("trainer_state", capture(read_trainer_state(found.trainer_state))))
    return joined(parts)


def _loaded(part: Part, loader: Loader, *, is_peek: bool = False) -> Captured:
    if part.kind == "safetensors":
        return merged([open_safetensors(path) for path in part.paths], where=str(part.paths[0]))
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            "torch is not installed, and reads such files", where=part.paths[0],
            todo="install torch 2.10 or later; safetensors files need none",
        )  # fmt: skip
    shards = []
    for path in part.paths:
        nbytes = path.stat().st_size if path.is_file() else part.nbytes
        shards.append(loader.load(part.kind, path, nbytes, is_peek=is_peek))
    return merged(shards, where=str(part.paths[0]))


def _plain_values(captured: Captured) -> dict[str, object]:
    """Return the plain values that stand directly in a state."""
    if not isinstance(captured.tree, DictNode):
        return {}
    plain = ("none", "bool", "int", "float", "str")
    return {
        str(key): decode_plain(node)
        for key, node in items_of(captured.tree)
        if isinstance(node, ValueNode) and node.type in plain
    }


def _metrics(found: Found, captured: Captured) -> dict[str, float]:
    """Return what names and contents say of losses, so that ``best:loss`` finds them."""
    metrics: dict[str, float] = {}
    plain = {**_plain_values(captured), **_numbers_in_tensors(captured)}
    for key in METRIC_KEYS:
        value = plain.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            metrics[key] = float(value)
    metrics |= metrics_of_name(found.name)
    if found.trainer_state is not None:
        metrics |= metrics_in(read_trainer_state(found.trainer_state))
    return metrics


_FORMATS = {"float32": "<f", "float64": "<d"}


def _numbers_in_tensors(captured: Captured) -> dict[str, float]:
    """Return the metrics that are tensors of one number, as nanoGPT keeps them."""
    found: dict[str, float] = {}
    if not isinstance(captured.tree, DictNode):
        return found
    for key, node in items_of(captured.tree):
        index = getattr(node, "tensor", None)
        if key not in METRIC_KEYS or index is None:
            continue
        spec = captured.tensors[index]
        layout = _FORMATS.get(spec.dtype)
        if spec.shape == () and spec.library == "torch" and layout is not None:
            nbytes = struct.calcsize(layout)
            content = captured.storages[spec.storage].read(spec.offset, spec.offset + nbytes)
            found[str(key)] = struct.unpack(layout, content)[0]
    return found
