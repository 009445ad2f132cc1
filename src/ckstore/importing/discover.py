"""Find the checkpoints in a folder that other tools have filled; names are looked at, and nothing is loaded.

Known are files of torch.save and safetensors, one a checkpoint or several in the folder of one (transformers' Trainer,
DeepSpeed, nanoGPT, Lightning), and folders of torch.distributed.checkpoint.

Invariants:
- Every file that could hold a state is part of a checkpoint, or is told of as left out, with the reason.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ckstore.errors import CkstoreError, CorruptError, NotFoundError, UsageError
from ckstore.importing.names import natural, shard_of_name, step_of_name

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
SAFETENSORS_SUFFIX = ".safetensors"
DCP_FILE = ".metadata"
TRAINER_FILE = "trainer_state.json"
FILES_MAX = 200_000
"""Files of a folder that are looked at; more are a mistake in the path."""

_MODEL_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
_MARKS = (TRAINER_FILE, "optimizer.pt", "optimizer.bin", "scheduler.pt", "model.safetensors.index.json")
_LEFT_OUT = {"training_args.bin": "it holds objects that only code can make"}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a checkpoint: a file, the shards of one, or a folder of torch.distributed.checkpoint.

    Attributes:
        key: Under which key of the state it goes; empty: it is the whole state.
        kind: ``"torch"``, ``"safetensors"`` or ``"dcp"``.
        paths: Its files, or its folder.
        nbytes: Their bytes.
    """

    key: str
    kind: str
    paths: tuple[Path, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint.

    Attributes:
        name: As it is called in the folder that was searched.
        parts: What it is made of.
        step: What its name says; None where that says nothing.
        trainer_state: The file in which transformers keeps step and metrics, or None.
        left_out: File -> why it is no part of it.
    """

    name: str
    parts: tuple[Part, ...]
    step: int | None
    trainer_state: Path | None
    left_out: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(part.nbytes for part in self.parts)


def discover(source: Path, *, exclude: Sequence[str] = ()) -> list[Found]:
    """Return the checkpoints in a file or folder, in the order of their names.

    Args:
        source: What to search.
        exclude: Globs of names of files and folders that are left out.

    Raises:
        NotFoundError: There is none; the message tells what was looked for, or a folder that has some.
        CorruptError: A shard of a file is missing.
    """
    source = Path(os.path.abspath(source))  # noqa: PTH100 - resolve() would follow links, and change names
    if not source.exists():
        raise NotFoundError("there is no such file or folder", where=source)
    if source.is_file():
        if kind_of_file(source) is None:
            raise UsageError(
                "the name of the file does not say what it is", where=source,
                todo=f"give a file that ends in {', '.join((*TORCH_SUFFIXES, SAFETENSORS_SUFFIX))}",
            )  # fmt: skip
        return [_of_file(source)]
    found = list(_in_folder(source, exclude))
    if not found:
        raise NotFoundError(
            "there is no checkpoint in the folder", where=source,
            todo=_elsewhere(source) or "name a folder of .pt, .pth, .bin, .ckpt or .safetensors files, of folders "
            "such as checkpoint-500, or one that torch.distributed.checkpoint wrote",
        )  # fmt: skip
    return found


def kind_of_file(path: Path) -> str | None:
    """Return how a file is read, by its name; None: not at all."""
    if path.suffix == SAFETENSORS_SUFFIX:
        return "safetensors"
    return "torch" if path.suffix in TORCH_SUFFIXES else None


def _in_folder(folder: Path, exclude: Sequence[str]) -> Iterator[Found]:
    if (folder / DCP_FILE).is_file():
        yield Found(folder.name, (_dcp_part("", folder),), step_of_name(folder.name), None, {})
        return
    entries = _entries(folder, exclude)
    inner = [found for entry in entries if entry.is_dir() and (found := _of_folder(entry, exclude)) is not None]
    if inner:
        # A Trainer leaves the final model beside its checkpoints; the folders are the history.
        yield from inner
        if any((folder / mark).exists() for mark in _MARKS):
            return
    files = [entry for entry in entries if entry.is_file() and kind_of_file(entry) is not None]
    if not inner and _is_one_checkpoint(folder, files):
        yield _group(folder, exclude)
        return
    seen: set[tuple[int, int]] = set()
    for file in files:
        status = file.stat()
        if file.name in _LEFT_OUT or (status.st_dev, status.st_ino) in seen:
            # A link beside the file that it names, as "last" often is.
            continue
        seen.add((status.st_dev, status.st_ino))
        yield _of_file(file)


def _is_one_checkpoint(folder: Path, files: Sequence[Path]) -> bool:
    """Say whether the files of a folder belong together: models and optimizers, and not one step beside another."""
    if any((folder / mark).exists() for mark in _MARKS):
        return True
    stems = [shard_of_name(file.stem) or (file.stem, 0, 0) for file in files]
    names = {stem for stem, _, _ in stems}
    has_shards = any(count for _, _, count in stems)
    return bool(files) and (has_shards or bool(names & set(_MODEL_STEMS) and names & {"optimizer", "optim"}))


def _of_folder(folder: Path, exclude: Sequence[str]) -> Found | None:
    """Return the checkpoint that a folder beside others holds, or None."""
    if (folder / DCP_FILE).is_file():
        return Found(folder.name, (_dcp_part("", folder),), step_of_name(folder.name), None, {})
    files = [entry for entry in _entries(folder, exclude) if entry.is_file() and kind_of_file(entry) is not None]
    if step_of_name(folder.name) is None and not _is_one_checkpoint(folder, files):
        return None
    found = _group(folder, exclude)
    return found if found.parts else None


def _group(folder: Path, exclude: Sequence[str]) -> Found:
    """Return all that a folder and the folders in it hold, as one checkpoint."""
    left_out: dict[str, str] = {}
    files: dict[tuple[str, str], list[Path]] = {}
    parts: list[Part] = []
    for path in _walk(folder, exclude, left_out):
        if path.is_dir():
            parts.append(_dcp_part(path.relative_to(folder).as_posix(), path))
            continue
        if path.name in _LEFT_OUT:
            left_out[path.relative_to(folder).as_posix()] = _LEFT_OUT[path.name]
            continue
        shard = shard_of_name(path.stem)
        stem = path.with_name(shard[0] if shard else path.stem).relative_to(folder).as_posix()
        files.setdefault((stem, kind_of_file(path) or ""), []).append(path)
    parts += [_file_part(key, kind, paths) for (key, kind), paths in files.items()]
    kept = _one_model(parts, left_out, folder)
    trainer = folder / TRAINER_FILE
    kept.sort(key=lambda part: (part.key != "model", natural(part.key)))
    return Found(folder.name, tuple(kept), step_of_name(folder.name), trainer if trainer.is_file() else None, left_out)


def _one_model(parts: Sequence[Part], left_out: dict[str, str], folder: Path) -> list[Part]:
    """Give the model its key, and leave out a copy of it in another format."""
    kept: dict[str, Part] = {}
    for part in sorted(parts, key=lambda part: (part.kind != "safetensors", part.key)):
        key = "model" if part.key in _MODEL_STEMS else part.key
        if key in kept:
            for path in part.paths:
                left_out[path.relative_to(folder).as_posix()] = f"{kept[key].paths[0].name} holds the same"
            continue
        kept[key] = Part(key, part.kind, part.paths, part.nbytes)
    return list(kept.values())


def _walk(folder: Path, exclude: Sequence[str], left_out: dict[str, str], depth: int = 0) -> Iterator[Path]:
    for entry in _entries(folder, exclude):
        if entry.is_dir():
            if (entry / DCP_FILE).is_file():
                yield entry
            elif depth < 4:
                yield from _walk(entry, exclude, left_out, depth + 1)
        elif kind_of_file(entry) is not None:
            yield entry


def _of_file(path: Path) -> Found:
    kind = kind_of_file(path)
    assert kind is not None, "only files of a known kind are checkpoints"
    return Found(path.name, (_file_part("", kind, [path]),), step_of_name(path.stem), None, {})


def _file_part(key: str, kind: str, paths: Sequence[Path]) -> Part:
    ordered = sorted(paths, key=lambda path: natural(path.name))
    shards = [shard_of_name(path.stem) for path in ordered]
    counts = {shard[2] for shard in shards if shard is not None}
    if counts and key:
        there = {shard[1] for shard in shards if shard is not None}
        missing = sorted(set(range(1, max(counts) + 1)) - there)
        if missing or len(counts) > 1:
            raise CorruptError(
                f"shard {missing[0] if missing else '?'} of {max(counts)} of {key} is missing", where=ordered[0].parent,
                todo="copy the whole folder, or leave the others out with --exclude",
            )  # fmt: skip
    return Part(key, kind, tuple(ordered), sum(path.stat().st_size for path in ordered))


def _dcp_part(key: str, folder: Path) -> Part:
    nbytes = sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
    return Part(key, "dcp", (folder,), nbytes)


def _entries(folder: Path, exclude: Sequence[str]) -> list[Path]:
    entries = []
    for number, entry in enumerate(folder.iterdir()):
        if number >= FILES_MAX:
            raise UsageError(f"the folder holds more than {FILES_MAX} files", where=folder)
        if entry.name.startswith(".") or any(fnmatchcase(entry.name, pattern) for pattern in exclude):
            continue
        entries.append(entry)
    return sorted(entries, key=lambda entry: natural(entry.name))


def _elsewhere(source: Path) -> str | None:
    """Return a folder below that does hold checkpoints, for who named one too high up."""
    for depth in ("*", "*/*", "*/*/*"):
        for number, folder in enumerate(sorted(source.glob(depth))):
            if number >= 100:
                break
            with contextlib.suppress(OSError, CkstoreError):
                if folder.is_dir() and any(True for _ in _in_folder(folder, ())):
                    return f"did you mean {folder}?"
    return None
