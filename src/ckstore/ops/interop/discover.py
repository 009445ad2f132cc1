"""Find the checkpoints that other tools wrote to a folder, by the names of files. No tensor is read.

A checkpoint is one file (torch.save or safetensors), a folder of such files (transformers' Trainer, accelerate,
DeepSpeed, nanoGPT, Lightning), or a folder of torch.distributed.checkpoint. `find_unfinished` then recognizes
interrupted saves among them.

Invariants:
- Every file that may contain state is part of a checkpoint, or is listed as left out with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckstore.errors import CkstoreError, CorruptError, NotFoundError, UsageError
from ckstore.ops.interop.scan import (
    DCP_FILE,
    DCP_SUFFIX,
    INDEX_SUFFIX,
    PICKLE_SUFFIXES,
    SAFETENSORS_SUFFIX,
    TORCH_SUFFIXES,
    Folder,
    Scan,
    is_unfinished,
    kind_of_file,
    may_hold_state,
    natural_key,
    not_kept_reason,
    number_of_name,
    scan,
    shard_of_name,
    step_of_name,
    unread_reason,
)

TRAINER_FILE = "trainer_state.json"
SMALL_FILES_KEY = "files"
"""Key of the small files in an imported state: name in the checkpoint's folder -> content as bytes."""

_HUB_CONFIGS = ("config.json", "adapter_config.json")
_INDEX_NBYTES_MAX = 256 << 20
_LISTED_MAX = 3

# The first of these in a checkpoint gets the key "model".
_MODEL_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
_COMPANION_STEMS = frozenset(
    ("optimizer", "optim", "scheduler", "scaler", "sampler", "random_states_0", "rng_state", "rng_state_0")
)
_MARKS = (TRAINER_FILE, "optimizer.pt", "optimizer.bin", "scheduler.pt", "model.safetensors.index.json")
_WITHOUT_STATE = {"training_args.bin": "settings without state (objects that only code can create)"}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a checkpoint: a file, the shards of a file, or a folder of torch.distributed.checkpoint.

    Attributes:
        key: Its key in the state; empty if it is the whole state.
        kind: ``"torch"``, ``"safetensors"``, ``"json"`` or ``"dcp"``.
        paths: Its files, or its folder.
        nbytes: Total bytes of its files.
        time_ns: Modification time of the newest of them.
    """

    key: str
    kind: str
    paths: tuple[Path, ...]
    nbytes: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """One foreign checkpoint.

    Attributes:
        name: Its path below the source, or its own name.
        parts: Its parts.
        step: The step in its name, or None.
        trainer_state: The file in which transformers keeps step and metrics, or None.
        without_state: Name of a file that is left out because it has no state -> its content.
        small_files: Name of a small file that is kept, such as ``config.json``, in the checkpoint's folder -> its path.
    """

    name: str
    parts: tuple[Part, ...]
    step: int | None
    trainer_state: Path | None = None
    without_state: dict[str, str] = field(default_factory=dict)
    small_files: dict[str, Path] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Total bytes of its files."""
        return sum(part.nbytes for part in self.parts)

    @property
    def time_ns(self) -> int:
        """Modification time of the newest of its files."""
        return max(part.time_ns for part in self.parts)


@dataclass(frozen=True, slots=True)
class Discovery:
    """The checkpoints of a source.

    Attributes:
        found: The checkpoints, in the order of their names.
        left_out: Path below the source -> reason why it is in no checkpoint, although it may contain state.
        warnings: Notes for the user, in whole sentences.
    """

    found: list[FoundCheckpoint]
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def discover(source: Path, *, exclude: Sequence[str] = ()) -> Discovery:
    """Return the checkpoints in a file or folder, and what is left out.

    Args:
        source: The file or folder.
        exclude: Globs of paths below it that are left out.

    Raises:
        NotFoundError: No checkpoint was found. The message names a folder that has some, or the supported names.
        CorruptError: A shard is missing.
    """
    source = Path(os.path.abspath(source))  # noqa: PTH100 - resolve() would follow links, and change names
    if not source.exists():
        raise NotFoundError("no such file or folder", where=source)
    if source.is_file():
        _check_single(source)
        return Discovery([_checkpoint_of(source, source.name)])
    search = _Search(scan(source, exclude))
    found = list(search.in_folder(search.root))
    left_out = search.list_left_out(found)
    if not found:
        raise NotFoundError("no checkpoint found in the folder", where=source, todo=search.suggestion(left_out))
    unused = [pattern for pattern in exclude if pattern not in search.scanned.patterns_used]
    warnings = [
        f"--exclude {pattern} matches nothing. Give a path below SOURCE, or '**/NAME' for NAME at any depth."
        for pattern in unused
    ]
    if is_unfinished(source.name):
        warnings.append(f"The name of {source} says that its save was not finished.")
    warnings += search.small_files_without_checkpoint(found)
    return Discovery(found, left_out, tuple(warnings))


def _check_single(source: Path) -> None:
    shard = shard_of_name(source.stem)
    if kind_of_file(source) is None:
        readable = (*TORCH_SUFFIXES, *PICKLE_SUFFIXES, SAFETENSORS_SUFFIX)
        raise UsageError(
            f"the file cannot be imported: {unread_reason(source)}", where=source,
            todo=f"name a file that ends in {', '.join(readable)}",
        )  # fmt: skip
    if shard is not None and shard[2] > 1:
        raise UsageError(
            f"the file is shard {shard[1]} of {shard[2]}, not a whole state", where=source, todo="name its folder"
        )


class _Search:
    """The search for checkpoints in one source."""

    def __init__(self, scanned: Scan) -> None:
        self.scanned = scanned
        self.root = scanned.root
        # Files that are left out with their folder.
        self._reported: set[Path] = set()

    def in_folder(self, folder: Folder) -> Iterator[FoundCheckpoint]:
        """Yield the checkpoints of a folder: the folder itself, its subfolders, or its files."""
        if folder.holds(DCP_FILE):
            yield self._group(folder)
            return
        inner = [found for each in folder.folders if (found := self._checkpoint_in(each)) is not None]
        files = [file for file in folder.files if kind_of_file(file) is not None]
        own_step = step_of_name(folder.path.name)
        if len({step_of_name(file.stem) for file in files} - {None}) > 1:
            # Files of several steps are several checkpoints, whatever the folder is called.
            own_step = None
        is_one = _is_one_checkpoint(folder, files)
        if (is_one or (own_step is not None and files)) and all(each.step in (None, own_step) for each in inner):
            yield self._group(folder)
            return
        yield from inner
        if inner and is_one:
            # A Trainer saves the final model next to the checkpoint folders.
            yield self._group(folder, is_shallow=True)
            return
        seen: set[tuple[int, int]] = set()
        for file in files:
            status = file.stat()
            if file.name in _WITHOUT_STATE or kind_of_file(file) == "json" or (status.st_dev, status.st_ino) in seen:
                continue
            # A link such as "last" and its target are the same checkpoint.
            seen.add((status.st_dev, status.st_ino))
            if not is_unfinished(file.name):
                yield _checkpoint_of(file, self._below(file))

    def list_left_out(self, found: Iterable[FoundCheckpoint]) -> dict[str, str]:
        """Return everything that may contain state and is in no checkpoint, with the reason."""
        taken, found = set(self._reported), list(found)
        inside = self._folders_of(found)
        for each in found:
            taken |= {path for part in each.parts for path in _files_of(part)}
            taken |= {self.root.path / name for name in each.without_state}
            taken |= {each.trainer_state} if each.trainer_state else set()
        links = {(status.st_dev, status.st_ino) for status in (path.stat() for path in taken if path.exists())}
        left_out = dict(self.scanned.left_out)
        for folder in self._all_folders(self.root):
            self._list_left_out(folder, taken, links, left_out, is_in_checkpoint=folder.path in inside)
        return left_out

    def _all_folders(self, folder: Folder) -> Iterator[Folder]:
        yield folder
        for each in folder.folders:
            yield from self._all_folders(each)

    def _folders_of(self, found: Sequence[FoundCheckpoint]) -> set[Path]:
        """Return the folders that are checkpoints, and their subfolders; not a folder of single-file checkpoints."""
        parts = [part for each in found for part in each.parts if part.key or part.kind == "dcp"]
        tops = {path if part.kind == "dcp" else path.parent for part in parts for path in part.paths}
        if len(found) > 1 and self.root.path in tops:
            # The final model is next to the checkpoint folders.
            tops.discard(self.root.path)
            return {self.root.path} | self._within(tops)
        return self._within(tops)

    def _within(self, tops: set[Path]) -> set[Path]:
        return {each.path for each in self._all_folders(self.root) if tops & {each.path, *each.path.parents}}

    def suggestion(self, left_out: dict[str, str]) -> str:
        """Return advice for a source without checkpoints."""
        pending = list(self.root.folders)
        for folder in pending:
            with contextlib.suppress(CkstoreError):
                if not is_unfinished(folder.path.name) and any(True for _ in self.in_folder(folder)):
                    return f"did you mean {folder.path}?"
            pending += folder.folders
        for name, why in left_out.items():
            return f"left out: {name}: {why}"
        return (
            "name a folder of .pt, .pth, .bin, .ckpt or .safetensors files, of folders "
            "such as checkpoint-500, or one that torch.distributed.checkpoint wrote"
        )

    def small_files_without_checkpoint(self, found: Sequence[FoundCheckpoint]) -> list[str]:
        """Return a note on small files that are not imported because the checkpoints next to them are single files."""
        if all(part.key or part.kind == "dcp" for each in found for part in each.parts):
            return []
        names = [
            file.name for file in self.root.files if file.name in _HUB_CONFIGS or file.stem.startswith("tokenizer")
        ]
        if not names:
            return []
        return [
            f"Not imported: {', '.join(names)}. Each checkpoint in this folder is a single file. To keep small files "
            "with the weights, import a folder with one checkpoint."
        ]

    def _below(self, path: Path) -> str:
        return path.relative_to(self.root.path).as_posix()

    def _leave_out(self, folder: Folder, why: str) -> None:
        self.scanned.left_out[f"{folder.name}/"] = why
        self._reported.update(folder.all_files())

    def _list_left_out(
        self,
        folder: Folder,
        taken: set[Path],
        links: set[tuple[int, int]],
        left_out: dict[str, str],
        *,
        is_in_checkpoint: bool,
    ) -> None:
        open_files: dict[str, list[Path]] = {}
        for file in folder.files:
            is_candidate = may_hold_state(file, is_in_checkpoint=is_in_checkpoint) and file.name not in _WITHOUT_STATE
            if file in taken or not is_candidate:
                continue
            status = file.stat()
            if (status.st_dev, status.st_ino) not in links and (status.st_size or kind_of_file(file) is not None):
                open_files.setdefault(unread_reason(file), []).append(file)
        for why, files in open_files.items():
            left_out.update((name, why) for name in self._listed(files))

    def _checkpoint_in(self, folder: Folder) -> FoundCheckpoint | None:
        """Return the checkpoint in a subfolder, or None."""
        if is_unfinished(folder.path.name):
            if any(may_hold_state(file) for file in folder.all_files()):
                self._leave_out(folder, "its name says that its save was not finished; import it by its own path")
            return None
        files = [file for file in folder.files if kind_of_file(file) is not None]
        is_one = folder.holds(DCP_FILE) or _is_one_checkpoint(folder, files)
        if step_of_name(folder.path.name) is not None or is_one:
            found = self._group(folder)
            return found if found.parts else None
        if any(each.parts for each in self.in_folder(folder)):
            self._leave_out(folder, "it may contain checkpoints of another run; import it by its own path")
        return None

    def _group(self, folder: Folder, *, is_shallow: bool = False) -> FoundCheckpoint:
        """Return the files of a folder, and unless ``is_shallow`` of its subfolders, as one checkpoint."""
        without_state: dict[str, str] = {}
        small_files: dict[str, Path] = {}
        parts: list[Part] = []
        for each in [folder] if is_shallow else self._walk(folder):
            inside = each.path.relative_to(folder.path).as_posix()
            prefix = "" if inside == "." else f"{inside}/"
            files = [file for file in each.files if kind_of_file(file) is not None]
            without_state |= {
                self._below(file): _WITHOUT_STATE[file.name] for file in files if file.name in _WITHOUT_STATE
            }
            trainer = folder.path / TRAINER_FILE
            files = [file for file in files if file.name not in _WITHOUT_STATE and file != trainer]
            parts += [_file_part(_as_text(f"{prefix}{key}"), paths) for key, paths in _files_by_key(each, files)]
            without_state |= self._sort_others(each, prefix, small_files)
            if each.holds(DCP_FILE):
                key = inside if prefix else "dcp" if parts or folder.folders else ""
                parts.append(_part(key, "dcp", [each.path], _dcp_files(each.path)))
        parts = _with_model(parts)
        parts.sort(key=lambda part: (part.key != "model", natural_key(part.key)))
        if len(parts) == 1 and parts[0].kind == "dcp" and parts[0].paths[0] == folder.path:
            parts = [_part("", "dcp", parts[0].paths, _dcp_files(folder.path))]
        has_trainer = folder.holds(TRAINER_FILE)
        if has_trainer:
            small_files[TRAINER_FILE] = folder.path / TRAINER_FILE
        if any(part.key in ("", SMALL_FILES_KEY) for part in parts):
            why = f"the state has no free key {SMALL_FILES_KEY!r} for it"
            without_state |= {self._below(file): why for file in small_files.values()}
            small_files = {}
        return FoundCheckpoint(
            folder.name or folder.path.name,
            tuple(parts),
            step_of_name(folder.path.name),
            trainer if has_trainer else None,
            without_state,
            small_files,
        )

    def _sort_others(self, folder: Folder, prefix: str, small_files: dict[str, Path]) -> dict[str, str]:
        """Add the small files of a folder to ``small_files``; return the others without state, with the reason."""
        others: dict[str, list[Path]] = {}
        for file in folder.files:
            is_weights = kind_of_file(file) is not None or file.name == DCP_FILE or file.name.endswith(INDEX_SUFFIX)
            if is_weights or may_hold_state(file, is_in_checkpoint=True):
                continue
            why = not_kept_reason(file)
            if why is None:
                small_files[_as_text(f"{prefix}{file.name}")] = file
            else:
                others.setdefault(why, []).append(file)
        return {name: why for why, files in others.items() for name in self._listed(files)}

    def _listed(self, files: Sequence[Path]) -> list[str]:
        """Return the names of files below the source; of many only the first, and their number."""
        if len(files) > _LISTED_MAX:
            return [f"{self._below(files[0])} and {len(files) - 1} more"]
        return [self._below(file) for file in files]

    def _walk(self, folder: Folder) -> Iterator[Folder]:
        yield folder
        for each in folder.folders:
            if is_unfinished(each.path.name):
                self._leave_out(each, "its name says that its save was not finished")
            else:
                yield from self._walk(each)


def _as_text(name: str) -> str:
    """Return a name as valid Unicode for a key of the state. Other bytes become escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _is_one_checkpoint(folder: Folder, files: Sequence[Path]) -> bool:
    """Return whether the files of a folder form one checkpoint, instead of one checkpoint each."""
    if any(folder.holds(mark) for mark in _MARKS):
        return True
    if any(folder.holds(name) for name in _HUB_CONFIGS) and any(file.stem in _MODEL_STEMS for file in files):
        return True
    stems = [shard_of_name(file.stem) or (file.stem, 0, 0) for file in files]
    names = {stem for stem, _, _ in stems}
    has_shards = any(count for _, _, count in stems)
    return has_shards or (len(files) > 1 and bool(names & _COMPANION_STEMS))


def _files_by_key(folder: Folder, files: Sequence[Path]) -> list[tuple[str, list[Path]]]:
    """Return the files of a folder by key, with the shards of one file together.

    Raises:
        CorruptError: A shard is missing.
    """
    sharded: dict[Path, str] = {}
    for index in folder.files:
        if index.name.endswith(INDEX_SUFFIX):
            whole = index.name.removesuffix(INDEX_SUFFIX)
            sharded.update((folder.path / name, whole) for name in _shards_in_index(index))
    wholes: dict[str, list[Path]] = {}
    for file in sorted(files, key=_order_of_kinds):
        shard = shard_of_name(file.stem)
        whole = sharded.get(file) or (f"{shard[0]}{file.suffix}" if shard else file.name)
        wholes.setdefault(whole, []).append(file)
    keyed: dict[str, list[Path]] = {}
    for whole, paths in wholes.items():
        stem = Path(whole).stem
        # Files with the same stem, such as model.safetensors and model.bin, are separate parts.
        keyed[whole if stem in keyed else stem] = paths
        if not any(path in sharded for path in paths):
            _check_shards(stem, paths)
    return list(keyed.items())


def _order_of_kinds(file: Path) -> tuple[bool, tuple[tuple[int, int, str], ...]]:
    return kind_of_file(file) != "safetensors", natural_key(file.name)


def _shards_in_index(index: Path) -> list[str]:
    """Return the files that an index of shards names.

    Raises:
        CorruptError: One of them is missing, or the index is malformed.
    """
    try:
        if index.stat().st_size > _INDEX_NBYTES_MAX:
            raise ValueError(f"it is larger than {_INDEX_NBYTES_MAX} bytes")
        table = json.loads(index.read_bytes())
        names = sorted(set(table.get("weight_map", {}).values()))
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("it contains something that is not a file name")
    except (ValueError, AttributeError, TypeError, RecursionError) as problem:
        raise CorruptError(f"the index of shards cannot be read ({problem})"[:300], where=index) from None
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CorruptError(
            f"{missing[0]} is missing, one of {len(names)} shards", where=index,
            todo="copy the whole folder, or leave it out with --exclude",
        )  # fmt: skip
    return names


def _check_shards(key: str, paths: Sequence[Path]) -> None:
    shards = [shard for path in paths if (shard := shard_of_name(path.stem)) is not None]
    if not shards:
        return
    counts = {count for _, _, count in shards}
    missing = sorted(set(range(1, max(counts) + 1)) - {number for _, number, _ in shards})
    if 0 in {number for _, number, _ in shards}:
        # Some writers count shards from 0.
        missing = sorted(set(range(max(counts))) - {number for _, number, _ in shards})
    if missing or len(counts) > 1:
        raise CorruptError(
            f"shard {missing[0] if missing else '?'} of {max(counts)} of {key} is missing", where=paths[0].parent,
            todo="copy the whole folder, or leave the others out with --exclude",
        )  # fmt: skip


def _with_model(parts: Sequence[Part]) -> list[Part]:
    """Give the model the key "model". Other candidates, such as an adapter, keep their own keys."""
    stems = {part.key for part in parts}
    for stem in _MODEL_STEMS:
        if stem in stems:
            return [replace(part, key="model") if part.key == stem else part for part in parts]
    return list(parts)


def _checkpoint_of(path: Path, name: str) -> FoundCheckpoint:
    return FoundCheckpoint(name, (_file_part("", [path]),), step_of_name(path.stem))


def _file_part(key: str, paths: Sequence[Path]) -> Part:
    kind = kind_of_file(paths[0])
    assert kind is not None, "only files that can be read are parts of checkpoints"
    return _part(key, kind, sorted(paths, key=lambda path: natural_key(path.name)), paths)


def _part(key: str, kind: str, paths: Sequence[Path], files: Sequence[Path]) -> Part:
    statuses = [file.stat() for file in files]
    nbytes, time_ns = sum(each.st_size for each in statuses), max(each.st_mtime_ns for each in statuses)
    return Part(key, kind, tuple(paths), nbytes, max(0, time_ns))


def _dcp_files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.name == DCP_FILE or file.suffix == DCP_SUFFIX]


def _files_of(part: Part) -> Sequence[Path]:
    return _dcp_files(part.paths[0]) if part.kind == "dcp" else part.paths


_POINTER_FILES = ("latest", "latest_checkpointed_iteration.txt", "last_checkpoint")
"""DeepSpeed, Megatron and detectron2 write the name or step of a checkpoint to such a file when it is complete."""

_POINTER_NBYTES_MAX = 4096
_IMPORT_ALONE = "import it by its own path if you want it"


def find_unfinished(source: Path, checkpoints: Sequence[tuple[FoundCheckpoint, int]]) -> Iterator[tuple[str, str]]:
    """Yield the names of checkpoints whose save was probably interrupted, and why.

    Only checkpoints that would become the newest of the run are suspected, because training would resume from them.
    Users often delete the optimizer of older checkpoints deliberately.

    Args:
        source: Their folder.
        checkpoints: Each with its step, in any order.
    """
    pointer = _pointer_in(source)
    ordered = sorted(checkpoints, key=lambda each: each[1], reverse=True)
    if len(ordered) < 2:
        return
    if pointer is not None and any(step == pointer[1] for _, step in ordered):
        for found, step in ordered:
            if step > pointer[1]:
                why = f"the file {pointer[0]} names step {pointer[1]}, so the save of step {step} was not finished"
                yield found.name, f"{why}; {_IMPORT_ALONE}"
        ordered = [each for each in ordered if each[1] <= pointer[1]]
    for index, (found, _) in enumerate(ordered[:-1]):
        before = ordered[index + 1][0]
        keys, wanted = _keys_of(found), _keys_of(before)
        if not keys < wanted or "" in keys | wanted:
            return
        names = ", ".join(sorted(wanted - keys)[:4])
        why = f"it would be the newest but lacks {names}, which {before.name} has; its save may be unfinished"
        yield found.name, f"{why}; {_IMPORT_ALONE}"


def _keys_of(found: FoundCheckpoint) -> set[str]:
    """Return the keys of the parts. Numbers in keys are ignored, because they may be steps."""
    keys = {re.sub(r"[0-9]+", "N", part.key) for part in found.parts}
    return keys | ({"trainer_state"} if found.trainer_state is not None else set())


def _pointer_in(source: Path) -> tuple[str, int] | None:
    for name in _POINTER_FILES:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if (source / name).stat().st_size <= _POINTER_NBYTES_MAX:
                text = (source / name).read_text().strip()
                step = step_of_name(text) if step_of_name(text) is not None else number_of_name(text)
                if step is not None:
                    return name, step
    return None
