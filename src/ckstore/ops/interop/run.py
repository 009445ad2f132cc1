"""The story of an import: find the checkpoints, put them in the order of their steps, and commit each.

find -> step of each, from its name or its content -> plan -> load and commit one after the other, oldest first.

Invariants:
- Nothing is committed before every checkpoint has its step, and all of them fit behind what the run holds.
- Each commit is durable before the next file is opened: an import that was interrupted goes on where it stopped.
- The files themselves are read, and never written.
- What may hold a state and is not imported is listed, with the reason.

What an import found, and what became of it.

What transformers' Trainer writes beside a checkpoint: its step, its metrics, and how it got there.

The state of a foreign checkpoint, put together from its files.

Each file is read as what it is, whatever its name says.
"""

from __future__ import annotations

import filecmp
import importlib.util
import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ckstore.config import STEP_MAX
from ckstore.errors import CkstoreError, CorruptError, UnsupportedError, UsageError
from ckstore.format.tree import DictNode, ValueNode, items_of
from ckstore.ops.interop.child import Loader
from ckstore.ops.interop.discover import Found, Part, discover, unfinished
from ckstore.ops.interop.foreign_state import Loaded, reason_of, storable
from ckstore.ops.interop.safetensors import open_safetensors
from ckstore.ops.interop.scan import check_nature, dates_in_name, metrics_of_name, natural, number_of_name
from ckstore.ops.interop.storages import digest_of, joined, merged
from ckstore.results import Info, Receipt
from ckstore.state.capture import Captured
from ckstore.state.values import decode_plain

NBYTES_MAX = 256 << 20


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        CorruptError: It is no JSON, or longer than can be.
    """
    check_nature(path, "json")
    if path.stat().st_size > NBYTES_MAX:
        raise CorruptError("the file is longer than can be", where=path)
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise CorruptError(f"the file is no JSON ({problem})"[:200], where=path) from None


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Return the content of a ``trainer_state.json``.

    Raises:
        CorruptError: It is no JSON, longer than can be, or holds no table.
    """
    state = read_json(path)
    if not isinstance(state, dict):
        raise CorruptError("the file holds no table", where=path)
    return state


def step_in(state: dict[str, Any]) -> int | None:
    """Return the step, or None."""
    step = state.get("global_step")
    return step if type(step) is int and step >= 0 else None


def metrics_in(state: dict[str, Any]) -> dict[str, float]:
    """Return what was logged at the checkpoint's own step: loss, eval_loss and the like."""
    found: dict[str, float] = {}
    log = state.get("log_history")
    for row in log if isinstance(log, list) else ():
        if not isinstance(row, dict) or row.get("step") != state.get("global_step"):
            continue
        for name, value in row.items():
            is_number = type(value) in (int, float) and math.isfinite(value)
            if is_number and ("loss" in name or name.startswith("eval_")) and ":" not in name and len(name) <= 128:
                found[name] = float(value)
    return found


@dataclass(slots=True)
class Reader:
    """Reads checkpoints of other tools.

    Attributes:
        loader: Loads files of torch.
        skip: Globs over dotted paths of leaves that are left out.
    """

    loader: Loader
    skip: Sequence[str] = ()

    def read(self, found: Found) -> Loaded:
        """Return the state of a checkpoint: of one file as it is, of several under a key for each."""
        if len(found.parts) == 1 and not found.parts[0].key:
            return self._part(found.parts[0])
        left_out: dict[str, str] = {}
        parts: list[tuple[str, Captured]] = []
        for part in found.parts:
            loaded = self._part(part)
            left_out |= loaded.left_out
            parts.append((part.key, loaded.captured))
        if found.trainer_state is not None:
            loaded = self._storable(read_trainer_state(found.trainer_state), "trainer_state", found.trainer_state)
            left_out |= loaded.left_out
            parts.append(("trainer_state", loaded.captured))
        return Loaded(joined(parts), left_out)

    def plain_values(self, part: Part) -> dict[str, object]:
        """Return the plain values that stand directly in a part, without reading its tensors."""
        if part.kind not in ("torch", "dcp"):
            return {}
        found: dict[str, object] = {}
        for path in part.paths:
            kind = part.kind if part.kind == "dcp" else check_nature(path, part.kind)
            if kind != "safetensors":
                found |= plain_values(self._by_child(kind, part, path, is_peek=True).captured)
        return found

    def _part(self, part: Part) -> Loaded:
        shards = [self._file(part, path) for path in part.paths]
        left_out = {name: why for shard in shards for name, why in shard.left_out.items()}
        return Loaded(merged([shard.captured for shard in shards], where=str(part.paths[0])), left_out)

    def _file(self, part: Part, path: Path) -> Loaded:
        kind = part.kind if part.kind == "dcp" else check_nature(path, part.kind)
        if kind == "safetensors":
            return open_safetensors(path, key=part.key, skip=self.skip)
        if kind == "json":
            return self._storable(read_json(path), part.key, path)
        return self._by_child(kind, part, path)

    def _storable(self, state: Any, key: str, path: Path) -> Loaded:
        return storable(state, [], key=key, skip=self.skip, where=str(path))

    def _by_child(self, kind: str, part: Part, path: Path, *, is_peek: bool = False) -> Loaded:
        if importlib.util.find_spec("torch") is None:
            raise UnsupportedError(
                "torch is not installed, and reads such files", where=path,
                todo="install torch 2.10 or later; safetensors files need none",
            )  # fmt: skip
        nbytes = path.stat().st_size if path.is_file() else part.nbytes
        return self.loader.load(kind, path, nbytes, key=part.key, skip=self.skip, is_peek=is_peek)


def plain_values(captured: Captured) -> dict[str, object]:
    """Return the plain values that stand directly in a state."""
    if not isinstance(captured.tree, DictNode):
        return {}
    plain = ("none", "bool", "int", "float", "str")
    return {
        str(key): decode_plain(node)
        for key, node in items_of(captured.tree)
        if isinstance(node, ValueNode) and node.type in plain
    }


@dataclass(frozen=True, slots=True)
class ImportEntry:
    """One foreign checkpoint.

    Attributes:
        name: Its file or folder.
        step: The step it was, or would be, committed under.
        kinds: What it is made of: ``torch``, ``safetensors``, ``dcp``.
        action: ``"import"``; ``"skip"``: the run has it already, or gets it from another file; ``"leave out"``: its
            step is taken by other content.
        reason: Why it is skipped or left out, or where its step was found.
        nbytes: Bytes of its files.
        seq: Its number in the run; None where it was not imported yet.
        bytes_state: Plain bytes of its tensors; None as above.
        bytes_written: Bytes that it added to the store; None as above.
        metrics: What was found of metrics.
        left_out: Dotted path of a leaf -> why it is left out.
        without_state: File -> why it is left out; it holds settings, and no state.
        warnings: What its commit met, and what became of objects in it.
        time_ns: When the last of its files was modified: the time of the checkpoint.
        is_compared: False where it is skipped although the run's entry of this step has another time, so that it may be
            of other content.
    """

    name: str
    step: int
    kinds: tuple[str, ...]
    action: Literal["import", "skip", "leave out"]
    reason: str
    nbytes: int
    seq: int | None = None
    bytes_state: int | None = None
    bytes_written: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    without_state: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    time_ns: int = 0
    is_compared: bool = True


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import planned or did, in the order of the steps.

    Attributes:
        source: The file or folder.
        run: The run it went into.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint found.
        left_out: Path below the source -> why it is in no checkpoint, although it may hold a state.
        warnings: What the user should know, in whole sentences.
    """

    source: str
    run: str
    is_dry_run: bool
    entries: tuple[ImportEntry, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether anything that may hold a state was left out, for whatever reason."""
        return bool(self.left_out) or any(
            entry.left_out or entry.action == "leave out" or not entry.is_compared for entry in self.entries
        )

    @property
    def stored(self) -> tuple[ImportEntry, ...]:
        """Those that are in the run, by this import or an earlier one."""
        return tuple(entry for entry in self.entries if entry.bytes_written is not None)

    @property
    def bytes_before(self) -> int:
        """Bytes of the files of what is in the run."""
        return sum(entry.nbytes for entry in self.stored)

    @property
    def bytes_stored(self) -> int:
        """Bytes that it takes in the store."""
        return sum(entry.bytes_written or 0 for entry in self.stored)

    @property
    def ratio(self) -> float | None:
        """How many times smaller the history became; None where nothing was stored."""
        return self.bytes_before / self.bytes_stored if self.bytes_stored else None


STEP_KEYS = ("global_step", "iter_num", "iteration", "step", "steps", "iter", "global_steps", "n_steps", "num_updates")
METRIC_KEYS = ("best_val_loss", "val_loss", "loss", "train_loss", "eval_loss", "best_loss")


class CommitCaptured(Protocol):
    """Commits a state that was taken apart already."""

    def __call__(self, captured: Captured, step: int, metrics: Mapping[str, float], time_ns: int) -> Receipt:
        """Commit it, as of this time."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for.

    Args:
        source: A file or folder.
        step: The step of the only checkpoint; None: it is found.
        numbered: Give steps 0, 1, 2 in the order of names, whatever names and contents say.
        exclude: Globs of paths below the source that are left out.
        skip_leaf: Globs over dotted paths of leaves that are left out.
    """

    source: Path
    step: int | None = None
    numbered: bool = False
    exclude: Sequence[str] = ()
    skip_leaf: Sequence[str] = ()


@dataclass(slots=True)
class _Planned:
    found: Found
    step: int
    reason: str


@dataclass(slots=True)
class _Plan:
    """What is to be imported, and what is not."""

    planned: list[_Planned]
    left_out: dict[str, str]
    warnings: list[str]


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
        reader = Reader(loader, wanted.skip_leaf)
        plan = _plan(wanted, reader)
        entries = [_entry_of(each, plan.planned, there, reader) for each in plan.planned]
        _check_order(entries, there, run)
        if dry_run:
            return ImportReport(str(wanted.source), run, True, tuple(entries), plan.left_out, tuple(plan.warnings))
        total = sum(entry.nbytes for entry in entries if entry.action == "import")
        done = 0
        for index, (each, entry) in enumerate(zip(plan.planned, entries, strict=True)):
            if entry.action != "import":
                continue
            entries[index] = _import(each, entry, reader, commit)
            done += entry.nbytes
            if on_progress is not None:
                on_progress(done, total)
    warnings = [*plan.warnings, *_unused(wanted.skip_leaf, entries)]
    return ImportReport(str(wanted.source), run, False, tuple(entries), plan.left_out, tuple(warnings))


def _unused(patterns: Sequence[str], entries: Sequence[ImportEntry]) -> list[str]:
    reasons = {why for entry in entries for why in entry.left_out.values()}
    is_new = any(entry.action == "import" for entry in entries)
    return [
        f"--skip-leaf {pattern} matches nothing. It is a dotted path in the state; * crosses dots."
        for pattern in patterns
        if is_new and reason_of(pattern) not in reasons
    ]


def _plan(wanted: Wanted, reader: Reader) -> _Plan:
    discovery = discover(wanted.source, exclude=wanted.exclude)
    found, left_out, warnings = discovery.found, dict(discovery.left_out), list(discovery.warnings)
    if wanted.step is not None:
        if len(found) != 1:
            raise UsageError(
                f"one step was given, and there are {len(found)} checkpoints", where=wanted.source,
                todo="name one file or folder of them",
            )  # fmt: skip
        planned = [_Planned(found[0], wanted.step, "as was asked for")]
    elif wanted.numbered:
        planned = [_Planned(each, index, "in the order of names") for index, each in enumerate(found)]
    else:
        planned = _with_steps(wanted.source, found, left_out, reader)
        torn = dict(unfinished(wanted.source, [(each.found, each.step) for each in planned]))
        for each in planned:
            if each.found.name in torn:
                left_out.update((name, torn[each.found.name]) for name in _names_of(each.found, wanted.source))
        planned = [each for each in planned if each.found.name not in torn]
    return _Plan(planned, left_out, warnings)


def _with_steps(source: Path, found: Sequence[Found], left_out: dict[str, str], reader: Reader) -> list[_Planned]:
    """Return those of which the step is told, in its order; leave out others, if any has one."""
    planned: list[_Planned] = []
    without: list[tuple[Found, str]] = []
    failures: list[CkstoreError] = []
    for each in found:
        try:
            told = _step_of(each, reader)
        except CkstoreError as error:
            if each.step is not None:
                raise
            # Its name says no step; whether it is a checkpoint at all is not certain.
            failures.append(error)
            without.append((each, str(error)))
            continue
        if told is None:
            without.append((each, f"{_why_no_step(each)}; import it by its own path, with --step"))
        else:
            planned.append(_Planned(each, *told))
    if failures and not planned:
        raise failures[0]
    if not planned:
        raise UsageError(
            _why_no_step(without[0][0]), where=without[0][0].name,
            todo="give --step for a single one, or --numbered for steps in the order of names",
        )  # fmt: skip
    files = [path for each in planned for path in _files_of(each.found)]
    for each, why in without:
        for path in (path for part in each.parts for path in part.paths):
            # A model that was saved once more next to the folders of its checkpoints is imported with them.
            if path.is_dir() or not any(_are_same(path, file) for file in files):
                left_out[os.path.relpath(path, source)] = why
    # Of two with one step the one whose name says so comes first: "last" is a copy of it.
    return sorted(planned, key=lambda each: (each.step, each.found.step is None, natural(each.found.name)))


def _names_of(found: Found, source: Path) -> list[str]:
    """Return what to list of a checkpoint that is left out: itself, or its files if they lie in the source itself."""
    paths = [path for part in found.parts for path in part.paths]
    if found.parts[0].key and any(path.parent == Path(os.path.abspath(source)) for path in paths):  # noqa: PTH100
        return [os.path.relpath(path, source) for path in paths]
    return [found.name]


def _why_no_step(found: Found) -> str:
    dates = dates_in_name(found.name)
    taken = f" ({dates[0]} in its name is taken for a date)" if dates else ""
    return f"neither name nor content says of which step the checkpoint is{taken}"


def _files_of(found: Found) -> list[Path]:
    return [path for part in found.parts if part.kind != "dcp" for path in part.paths]


def _are_same(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and filecmp.cmp(one, other, shallow=False)


def _step_of(found: Found, reader: Reader) -> tuple[int, str] | None:
    """Return the step of a checkpoint, and where it was found; None: nothing says it."""
    if found.trainer_state is not None:
        step = step_in(read_trainer_state(found.trainer_state))
        if step is not None:
            return step, f"global_step of {found.trainer_state.name}"
    if found.step is not None:
        return found.step, "from its name"
    for part in found.parts:
        plain = reader.plain_values(part)
        for key in STEP_KEYS:
            value = plain.get(key)
            if type(value) is int and 0 <= value <= STEP_MAX:
                return value, f"{key} in its content"
    name = Path(found.name)
    number = number_of_name(name.stem if found.parts[0].key == "" else name.name)
    return None if number is None else (number, "from the number in its name")


def _entry_of(each: _Planned, planned: Sequence[_Planned], there: Mapping[int, Info], reader: Reader) -> ImportEntry:
    found, step = each.found, each.step
    kinds = tuple(dict.fromkeys(part.kind for part in found.parts))
    entry = ImportEntry(
        found.name, step, kinds, "import", each.reason, found.nbytes, without_state=dict(found.without_state),
        time_ns=found.time_ns,
    )  # fmt: skip
    first = next(other for other in planned if other.step == step)
    if first is not each:
        if _hold_the_same(each.found, first.found, reader):
            return replace(entry, action="skip", reason=f"{first.found.name} holds the same")
        reason = f"{first.found.name} is of the same step, and holds something else; import it into another --run"
        return replace(entry, action="leave out", reason=reason)
    info = there.get(step)
    if info is not None:
        is_of_file = info.time_ns == found.time_ns
        return replace(
            entry,
            action="skip",
            reason=f"the run holds step {step} already" + ("" if is_of_file else ", of another time; not compared"),
            is_compared=is_of_file,
            seq=info.seq,
            bytes_state=info.bytes_state,
            bytes_written=info.bytes_written,
            metrics=info.metrics,
        )
    return entry


def _hold_the_same(one: Found, other: Found, reader: Reader) -> bool:
    files = [part.paths for found in (one, other) for part in found.parts]
    are_single = len(files) == 2 and all(len(paths) == 1 and paths[0].is_file() for paths in files)
    if are_single and _are_same(files[0][0], files[1][0]):
        return True
    return digest_of(reader.read(one).captured) == digest_of(reader.read(other).captured)


def _check_order(entries: Sequence[ImportEntry], there: Mapping[int, Info], run: str) -> None:
    """Refuse to make an older step the newest entry of a run: training would resume from it."""
    new = [entry.step for entry in entries if entry.action == "import"]
    if new and there and min(new) < max(there):
        raise UsageError(
            f"step {min(new)} would come behind step {max(there)}, which run {run!r} holds already, and be its latest",
            todo="import into a run of its own with --run, or leave older ones out with --exclude",
        )


def _import(each: _Planned, entry: ImportEntry, reader: Reader, commit: CommitCaptured) -> ImportEntry:
    found = each.found
    try:
        loaded = reader.read(found)
        metrics = _metrics(found, loaded.captured)
        receipt = commit(loaded.captured, each.step, metrics, found.time_ns)
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
        left_out=loaded.left_out,
    )


def _metrics(found: Found, captured: Captured) -> dict[str, float]:
    """Return what names and contents say of losses, so that ``best:loss`` finds them."""
    metrics: dict[str, float] = {}
    plain = {**plain_values(captured), **_numbers_in_tensors(captured)}
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
