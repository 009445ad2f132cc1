"""Import foreign checkpoints: find them, determine their steps, and commit each.

`run_import` discovers the checkpoints, takes the step of each from its name or content, and sorts by step. Then it
loads and commits one after the other. `ImportReport` lists what was imported, skipped and left out.

Invariants:
- Nothing is committed before every checkpoint has a step, and all steps come after those in the run.
- Each commit is durable before the next file is opened. An interrupted import continues where it stopped.
- Foreign files are only read.
- Everything that may contain state and is not imported is listed with the reason.
- The content of a file decides how it is read, not its name.
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
from ckstore.display import repr_of_summary
from ckstore.errors import CkstoreError, CorruptError, UnsupportedError, UsageError
from ckstore.format.tree import DictNode, ValueNode, items_of
from ckstore.ops.interop.child import Loader
from ckstore.ops.interop.discover import SMALL_FILES_KEY, FoundCheckpoint, Part, discover, find_unfinished
from ckstore.ops.interop.foreign_state import (
    LoadedState,
    capture_storable,
    digest_of,
    join_parts,
    merge_shards,
    skip_reason,
)
from ckstore.ops.interop.safetensors import open_safetensors
from ckstore.ops.interop.scan import dates_in_name, detect_kind, metrics_of_name, natural_key, number_of_name
from ckstore.results import Info, Receipt
from ckstore.state.capture import Captured
from ckstore.state.values import decode_plain

_JSON_NBYTES_MAX = 256 << 20


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        CorruptError: It is not JSON, or too large.
    """
    detect_kind(path, "json")
    if path.stat().st_size > _JSON_NBYTES_MAX:
        raise CorruptError(f"the JSON file is larger than {_JSON_NBYTES_MAX} bytes", where=path)
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise CorruptError(f"the file is not JSON ({problem})"[:200], where=path) from None


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Return the content of a ``trainer_state.json``, where transformers' Trainer keeps its step and metrics.

    Raises:
        CorruptError: It is not a JSON object, or too large.
    """
    state = read_json(path)
    if not isinstance(state, dict):
        raise CorruptError("the file is not a JSON object", where=path)
    return state


def step_of_trainer_state(state: dict[str, Any]) -> int | None:
    """Return the step in a trainer state, or None."""
    step = state.get("global_step")
    return step if type(step) is int and step >= 0 else None


def metrics_of_trainer_state(state: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that a trainer state has for its own step: loss, eval_loss and the like."""
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
        loader: Loads torch files.
        skip: Globs over dotted paths of leaves that are left out.
    """

    loader: Loader
    skip: Sequence[str] = ()

    def read(self, found: FoundCheckpoint) -> LoadedState:
        """Return the state of a checkpoint: that of a single file, or of several files with a key each."""
        if len(found.parts) == 1 and not found.parts[0].key:
            return self._part(found.parts[0])
        left_out: dict[str, str] = {}
        parts: list[tuple[str, Captured]] = []
        for part in found.parts:
            loaded = self._part(part)
            left_out |= loaded.left_out
            parts.append((part.key, loaded.captured))
        if found.trainer_state is not None:
            loaded = self._capture(read_trainer_state(found.trainer_state), "trainer_state", found.trainer_state)
            left_out |= loaded.left_out
            parts.append(("trainer_state", loaded.captured))
        if found.small_files:
            content = {name: path.read_bytes() for name, path in found.small_files.items()}
            loaded = self._capture(content, SMALL_FILES_KEY, Path(found.name))
            left_out |= loaded.left_out
            parts.append((SMALL_FILES_KEY, loaded.captured))
        return LoadedState(join_parts(parts), left_out)

    def plain_values(self, part: Part) -> dict[str, object]:
        """Return the plain values at the top of a part, without reading its tensors."""
        if part.kind not in ("torch", "dcp"):
            return {}
        found: dict[str, object] = {}
        for path in part.paths:
            kind = part.kind if part.kind == "dcp" else detect_kind(path, part.kind)
            if kind != "safetensors":
                found |= plain_values(self._by_child(kind, part, path, values_only=True).captured)
        return found

    def _part(self, part: Part) -> LoadedState:
        shards = [self._file(part, path) for path in part.paths]
        left_out = {name: why for shard in shards for name, why in shard.left_out.items()}
        return LoadedState(merge_shards([shard.captured for shard in shards], where=str(part.paths[0])), left_out)

    def _file(self, part: Part, path: Path) -> LoadedState:
        kind = part.kind if part.kind == "dcp" else detect_kind(path, part.kind)
        if kind == "safetensors":
            return open_safetensors(path, key=part.key, skip=self.skip)
        if kind == "json":
            return self._capture(read_json(path), part.key, path)
        return self._by_child(kind, part, path)

    def _capture(self, state: Any, key: str, path: Path) -> LoadedState:
        return capture_storable(state, [], key=key, skip=self.skip, where=str(path))

    def _by_child(self, kind: str, part: Part, path: Path, *, values_only: bool = False) -> LoadedState:
        if importlib.util.find_spec("torch") is None:
            raise UnsupportedError(
                "torch is not installed, and only it can read this file", where=path,
                todo="install torch 2.10 or later; safetensors files need no torch",
            )  # fmt: skip
        nbytes = path.stat().st_size if path.is_file() else part.nbytes
        return self.loader.load(kind, path, nbytes, key=part.key, skip=self.skip, values_only=values_only)


def plain_values(captured: Captured) -> dict[str, object]:
    """Return the plain values at the top of a state."""
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
        step: The step under which it was, or would be, committed.
        kinds: The formats of its parts: ``torch``, ``safetensors``, ``dcp``.
        action: ``"import"``; ``"skip"``: the run has it already, or gets it from another file.
        reason: Why it is skipped, or where its step was found.
        nbytes: Total bytes of its files.
        seq: Its number in the run; None if it is not imported yet.
        bytes_state: Plain bytes of its tensors; None if it is not imported yet.
        bytes_written: Bytes that its commit added to the store; None if it is not imported yet.
        metrics: The metrics that were found.
        left_out: Dotted path of a leaf -> reason why it is left out.
        without_state: Name of a file that is left out because it has no state -> its content.
        warnings: Warnings of its commit, and notes on objects that became plain values.
        time_ns: Modification time of the newest of its files; the commit gets this time.
        is_compared: False if it is skipped because the run has this step, but with another time. The contents may
            differ.
    """

    name: str
    step: int
    kinds: tuple[str, ...]
    action: Literal["import", "skip"]
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
    """What an import did, or would do, in the order of the steps.

    Attributes:
        source: The file or folder.
        run: The run that receives the checkpoints.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint found.
        left_out: Path below the source -> reason why it is in no checkpoint, although it may contain state.
        warnings: Notes for the user, in whole sentences.
    """

    source: str
    run: str
    is_dry_run: bool
    entries: tuple[ImportEntry, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    __repr__ = repr_of_summary

    @property
    def is_partial(self) -> bool:
        """Whether anything that may contain state was left out, for any reason."""
        return bool(self.left_out) or any(entry.left_out or not entry.is_compared for entry in self.entries)

    @property
    def stored(self) -> tuple[ImportEntry, ...]:
        """Checkpoints that are in the run, from this import or an earlier one."""
        return tuple(entry for entry in self.entries if entry.bytes_written is not None)

    @property
    def bytes_before(self) -> int:
        """Total bytes of the files of these checkpoints."""
        return sum(entry.nbytes for entry in self.stored)

    @property
    def bytes_stored(self) -> int:
        """Total bytes that they added to the store."""
        return sum(entry.bytes_written or 0 for entry in self.stored)

    @property
    def ratio(self) -> float | None:
        """``bytes_before / bytes_stored``; None if nothing was stored."""
        return self.bytes_before / self.bytes_stored if self.bytes_stored else None


STEP_KEYS = ("global_step", "iter_num", "iteration", "step", "steps", "iter", "global_steps", "n_steps", "num_updates")
METRIC_KEYS = ("best_val_loss", "val_loss", "loss", "train_loss", "eval_loss", "best_loss")


class CommitCaptured(Protocol):
    """Commits a state that is already captured."""

    def __call__(self, captured: Captured, step: int, metrics: Mapping[str, float], time_ns: int) -> Receipt:
        """Commit it with this time."""
        ...


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What to import.

    Args:
        source: A file or folder.
        step: The step of the only checkpoint; None to determine it.
        numbered: Use steps 0, 1, 2 in the order of names.
        exclude: Globs of paths below the source that are left out.
        skip_leaf: Globs over dotted paths of leaves that are left out.
    """

    source: Path
    step: int | None = None
    numbered: bool = False
    exclude: Sequence[str] = ()
    skip_leaf: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str],
        step: int | None,
        numbered: bool,
        exclude: Sequence[str],
        skip_leaf: Sequence[str],
    ) -> ImportRequest:
        """Make it from the arguments of ``Store.import_from``."""
        return cls(Path(source), step, numbered, tuple(exclude), tuple(skip_leaf))


@dataclass(slots=True)
class _PlannedImport:
    found: FoundCheckpoint
    step: int
    reason: str


@dataclass(slots=True)
class _Plan:
    """The checkpoints to import, and what is left out."""

    planned: list[_PlannedImport]
    left_out: dict[str, str]
    warnings: list[str]


def run_import(
    request: ImportRequest,
    run: str,
    existing: Mapping[int, Info],
    commit: CommitCaptured,
    *,
    dry_run: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Plan an import, and carry it out unless ``dry_run`` is True.

    Args:
        request: What to import.
        run: The run that receives the checkpoints.
        existing: The newest entry of each step in the run.
        commit: Commits one state.
        dry_run: Only plan.
        on_progress: Called with bytes of imported files and bytes in total.

    Raises:
        UsageError: A step cannot be determined, belongs to two different checkpoints, or would not be the newest.
        CorruptError: A file cannot be read. Checkpoints that are committed already stay.
        UnsupportedError: A file contains objects that only code can create, or torch is missing or too old.
    """
    with Loader() as loader:
        reader = Reader(loader, request.skip_leaf)
        plan = _plan(request, reader)
        entries = [_entry_of(each, plan.planned, existing, reader) for each in plan.planned]
        _check_order(entries, existing, run)
        if dry_run:
            return ImportReport(str(request.source), run, True, tuple(entries), plan.left_out, tuple(plan.warnings))
        total = sum(entry.nbytes for entry in entries if entry.action == "import")
        done = 0
        for index, (each, entry) in enumerate(zip(plan.planned, entries, strict=True)):
            if entry.action != "import":
                continue
            entries[index] = _import(each, entry, reader, commit)
            done += entry.nbytes
            if on_progress is not None:
                on_progress(done, total)
    warnings = [*plan.warnings, *_unused_pattern_warnings(request.skip_leaf, entries)]
    return ImportReport(str(request.source), run, False, tuple(entries), plan.left_out, tuple(warnings))


def _unused_pattern_warnings(patterns: Sequence[str], entries: Sequence[ImportEntry]) -> list[str]:
    reasons = {why for entry in entries for why in entry.left_out.values()}
    is_new = any(entry.action == "import" for entry in entries)
    return [
        f"--skip-leaf {pattern} matches nothing. Give a dotted path in the state; * crosses dots."
        for pattern in patterns
        if is_new and skip_reason(pattern) not in reasons
    ]


def _plan(request: ImportRequest, reader: Reader) -> _Plan:
    discovery = discover(request.source, exclude=request.exclude)
    found, left_out, warnings = discovery.found, dict(discovery.left_out), list(discovery.warnings)
    if request.step is not None:
        if len(found) != 1:
            raise UsageError(
                f"--step applies to one checkpoint, but there are {len(found)}", where=request.source,
                todo="name the file or folder of one of them",
            )  # fmt: skip
        planned = [_PlannedImport(found[0], request.step, "from --step")]
    elif request.numbered:
        planned = [_PlannedImport(each, index, "in the order of names") for index, each in enumerate(found)]
    else:
        planned = _with_steps(request.source, found, left_out, reader)
        incomplete = dict(find_unfinished(request.source, [(each.found, each.step) for each in planned]))
        for each in planned:
            if each.found.name in incomplete:
                left_out.update((name, incomplete[each.found.name]) for name in _names_of(each.found, request.source))
        planned = [each for each in planned if each.found.name not in incomplete]
    return _Plan(planned, left_out, warnings)


def _with_steps(
    source: Path, found: Sequence[FoundCheckpoint], left_out: dict[str, str], reader: Reader
) -> list[_PlannedImport]:
    """Return the checkpoints with a step, sorted by it. List the others as left out; raise if none has a step."""
    planned: list[_PlannedImport] = []
    without: list[tuple[FoundCheckpoint, str]] = []
    failures: list[CkstoreError] = []
    for each in found:
        try:
            step_and_reason = _step_of(each, reader)
        except CkstoreError as error:
            if each.step is not None:
                raise
            # Without a step in its name, this may not be a checkpoint at all.
            failures.append(error)
            without.append((each, str(error)))
            continue
        if step_and_reason is None:
            without.append((each, f"{_missing_step_reason(each)}; import it by its own path, with --step"))
        else:
            planned.append(_PlannedImport(each, *step_and_reason))
    if failures and not planned:
        raise failures[0]
    if not planned:
        raise UsageError(
            _missing_step_reason(without[0][0]), where=without[0][0].name,
            todo="give --step for a single checkpoint, or --numbered for steps in the order of names",
        )  # fmt: skip
    files = [path for each in planned for path in _files_of(each.found)]
    for each, why in without:
        for path in (path for part in each.parts for path in part.paths):
            # A copy of the final model next to the checkpoint folders is already imported with one of them.
            if path.is_dir() or not any(_have_same_bytes(path, file) for file in files):
                left_out[os.path.relpath(path, source)] = why
    # Of two with the same step, the one with the step in its name comes first; "last" is a copy of it.
    return sorted(planned, key=lambda each: (each.step, each.found.step is None, natural_key(each.found.name)))


def _names_of(found: FoundCheckpoint, source: Path) -> list[str]:
    """Return the names to list for a checkpoint that is left out.

    It is its own name, or the names of its files if they are in the source itself.
    """
    paths = [path for part in found.parts for path in part.paths]
    if found.parts[0].key and any(path.parent == Path(os.path.abspath(source)) for path in paths):  # noqa: PTH100
        return [os.path.relpath(path, source) for path in paths]
    return [found.name]


def _missing_step_reason(found: FoundCheckpoint) -> str:
    dates = dates_in_name(found.name)
    date = f" ({dates[0]} in its name is taken for a date)" if dates else ""
    return f"neither name nor content says which step this is{date}"


def _files_of(found: FoundCheckpoint) -> list[Path]:
    return [path for part in found.parts if part.kind != "dcp" for path in part.paths]


def _have_same_bytes(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and filecmp.cmp(one, other, shallow=False)


def _step_of(found: FoundCheckpoint, reader: Reader) -> tuple[int, str] | None:
    """Return the step of a checkpoint and where it was found, or None."""
    if found.trainer_state is not None:
        step = step_of_trainer_state(read_trainer_state(found.trainer_state))
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


def _entry_of(
    each: _PlannedImport, planned: Sequence[_PlannedImport], existing: Mapping[int, Info], reader: Reader
) -> ImportEntry:
    found, step = each.found, each.step
    kinds = tuple(dict.fromkeys(part.kind for part in found.parts))
    entry = ImportEntry(
        found.name, step, kinds, "import", each.reason, found.nbytes, without_state=dict(found.without_state),
        time_ns=found.time_ns,
    )  # fmt: skip
    first = next(other for other in planned if other.step == step)
    if first is not each:
        if not _have_same_content(each.found, first.found, reader):
            raise UsageError(
                f"{first.found.name} and {found.name} are both step {step}, with different content",
                todo=f"leave one out, for example with --exclude '{found.name}'; it can be imported into another --run",
            )
        return replace(entry, action="skip", reason=f"{first.found.name} has the same content")
    info = existing.get(step)
    if info is not None:
        has_same_time = info.time_ns == found.time_ns
        return replace(
            entry,
            action="skip",
            reason=f"the run has step {step} already" + ("" if has_same_time else ", with another time; not compared"),
            is_compared=has_same_time,
            seq=info.seq,
            bytes_state=info.bytes_state,
            bytes_written=info.bytes_written,
            metrics=info.metrics,
        )
    return entry


def _have_same_content(one: FoundCheckpoint, other: FoundCheckpoint, reader: Reader) -> bool:
    files = [part.paths for found in (one, other) for part in found.parts]
    are_single = len(files) == 2 and all(len(paths) == 1 and paths[0].is_file() for paths in files)
    if are_single and _have_same_bytes(files[0][0], files[1][0]):
        return True
    return digest_of(reader.read(one).captured) == digest_of(reader.read(other).captured)


def _check_order(entries: Sequence[ImportEntry], existing: Mapping[int, Info], run: str) -> None:
    """Refuse to append an older step to a run: it would become the latest, and training would resume from it."""
    new = [entry.step for entry in entries if entry.action == "import"]
    if new and existing and min(new) < max(existing):
        raise UsageError(
            f"step {min(new)} would be committed after step {max(existing)} of run {run!r}, and become its latest",
            todo="import into another run with --run, or leave older checkpoints out with --exclude",
        )


def _import(each: _PlannedImport, entry: ImportEntry, reader: Reader, commit: CommitCaptured) -> ImportEntry:
    found = each.found
    try:
        loaded = reader.read(found)
        metrics = _metrics(found, loaded.captured)
        receipt = commit(loaded.captured, each.step, metrics, found.time_ns)
    except CkstoreError as error:
        # Name the checkpoint first: the error may only name a place in a file.
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


def _metrics(found: FoundCheckpoint, captured: Captured) -> dict[str, float]:
    """Return the metrics in names and contents, so that ``best:loss`` finds them."""
    metrics: dict[str, float] = {}
    plain = {**plain_values(captured), **_numbers_in_tensors(captured)}
    for key in METRIC_KEYS:
        value = plain.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            metrics[key] = float(value)
    metrics |= metrics_of_name(found.name)
    if found.trainer_state is not None:
        metrics |= metrics_of_trainer_state(read_trainer_state(found.trainer_state))
    return metrics


_FORMATS = {"float32": "<f", "float64": "<d"}


def _numbers_in_tensors(captured: Captured) -> dict[str, float]:
    """Return the metrics that are tensors with one element, as nanoGPT stores them."""
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
