"""Every file below a folder, each looked at once by its name, so that an import can account for all of them.

Nothing is opened. What a file may hold is told from its name: a state, a part of one, or nothing that training needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckstore.errors import BackendError, UsageError
from ckstore.importing.names import is_unfinished, matches, natural

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
PICKLE_SUFFIXES = (".pkl", ".pickle")
SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
DCP_FILE = ".metadata"
DCP_SUFFIX = ".distcp"
FILES_MAX = 200_000
"""Files of a folder that are listed; more are a mistake in the path."""

_DEPTH_MAX = 16
_ARCHIVE_SUFFIXES = (".zip", ".gz", ".tgz", ".zst", ".xz", ".bz2", ".7z", ".rar", ".lz4")
_SUFFIXES_WITHOUT_STATE = frozenset(
    (
        *(".txt", ".md", ".rst", ".log", ".out", ".err", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".cfg", ".ini"),
        *(".html", ".xml", ".tex", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp4", ".wav"),
        *(".py", ".pyc", ".pyi", ".ipynb", ".sh", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".so", ".o", ".diff"),
        # Vocabularies of tokenizers, and templates of chats.
        *(".model", ".vocab", ".bpe", ".tiktoken", ".jinja", ".jinja2"),
        *(".wandb", ".lock", ".pid", ".patch", ".sha256", ".md5", ".gitignore", ".gitattributes"),
    )
)
_TEXT_SUFFIXES = frozenset((".json", ".csv", ".tsv", ".txt", ".yaml", ".yml"))
"""Within the folder of a checkpoint these may hold a state, unless their names are known."""

_NAMES_OF_SETTINGS = re.compile(
    r"(?:.*[_.-])?(?:config|args|hparams|params|settings|requirements|environment)"
    r"|(?:all|train|eval|test|predict)_results|(?:.*[_.-])?(?:log|logs|metrics)"
    r"|tokenizer.*|vocab.*|.*[_-]vocab|merges|special_tokens_map|added_tokens|.*chat_template|wandb-.*"
    r"|config[_.-](?!state).*|model_index|modules|.*\.index|latest_checkpointed_iteration"
)
_NAMES_WITHOUT_STATE = frozenset(
    (
        "license",
        "notice",
        "readme",
        "makefile",
        "dockerfile",
        "latest",
        "last_checkpoint",
        "done",
        "complete",
        "success",
    )
)
_SKIPPED_FOLDERS = frozenset({".git", "__pycache__", "node_modules"})


@dataclass(slots=True)
class Folder:
    """One folder, with what is in it, in natural order.

    Attributes:
        path: Where it is.
        name: Its path below the source; empty for the source itself.
        files: Its files.
        folders: Its folders.
    """

    path: Path
    name: str
    files: list[Path] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)

    def holds(self, name: str) -> bool:
        """Say whether a file of this name is in it."""
        return any(file.name == name for file in self.files)

    def all_files(self) -> Iterator[Path]:
        """Yield every file in it and below."""
        yield from self.files
        for folder in self.folders:
            yield from folder.all_files()


@dataclass(slots=True)
class Scan:
    """What lies below a folder.

    Attributes:
        root: The folder.
        left_out: Path below it -> why nothing more is done with it.
        patterns_used: Which globs of what to leave out have matched.
    """

    root: Folder
    left_out: dict[str, str] = field(default_factory=dict)
    patterns_used: set[str] = field(default_factory=set)


def kind_of_file(path: Path) -> str | None:
    """Return how a file is read, by its name; None: not at all."""
    if path.suffix == SAFETENSORS_SUFFIX:
        return "safetensors"
    if path.suffix in TORCH_SUFFIXES or path.suffix in PICKLE_SUFFIXES:
        return "torch"
    return "json" if path.suffix == ".json" and "state" in path.stem.lower() else None


def may_hold_state(path: Path, *, is_in_checkpoint: bool = False) -> bool:
    """Say whether a file may hold what training needs, by its name; settings and logs do not.

    Args:
        path: The file.
        is_in_checkpoint: It lies in the folder of a checkpoint, where texts and tables may hold a state too.
    """
    if kind_of_file(path) is not None:
        return True
    stem, suffix = path.stem.lower(), path.suffix.lower()
    if is_in_checkpoint and suffix in _TEXT_SUFFIXES:
        return stem not in _NAMES_WITHOUT_STATE and _NAMES_OF_SETTINGS.fullmatch(stem) is None
    if path.name.lower().startswith("events.out.tfevents") or (not suffix and stem in _NAMES_WITHOUT_STATE):
        return False
    return suffix not in _SUFFIXES_WITHOUT_STATE and suffix != ".json"


def why_unread(path: Path) -> str:
    """Return why a file that may hold a state is part of no checkpoint."""
    if is_unfinished(path.name):
        return "its name says that it was not finished"
    if path.suffix == DCP_SUFFIX or path.name == DCP_FILE:
        return "torch.distributed.checkpoint wrote it, and the .metadata is missing: the save was not finished"
    if path.suffix.lower() in _ARCHIVE_SUFFIXES:
        return "an archive; unpack it, and import what was in it"
    if kind_of_file(path) is not None:
        return "it belongs to no checkpoint; import it by its own path, with --step"
    return "files of this kind are not read"


def scan(source: Path, exclude: Sequence[str]) -> Scan:
    """List a folder and all folders in it.

    Args:
        source: The folder.
        exclude: Globs of paths below it that are left out.

    Raises:
        UsageError: It holds far too many files.
        BackendError: A folder cannot be listed.
    """
    return _Scanner(source, exclude).scan()


class _Scanner:
    """One scan; counts what it has seen."""

    def __init__(self, source: Path, exclude: Sequence[str]) -> None:
        self._source = source
        self._real_source = Path(os.path.realpath(source))
        self._exclude = exclude
        self._count = 0
        self._found = Scan(Folder(source, ""))

    def scan(self) -> Scan:
        """List everything."""
        self._fill(self._found.root, 0)
        return self._found

    def _fill(self, folder: Folder, depth: int) -> None:
        try:
            entries = sorted(folder.path.iterdir(), key=lambda entry: natural(entry.name))
        except OSError as problem:
            raise BackendError(f"the folder cannot be listed ({problem.strerror})", where=folder.path) from None
        self._count += len(entries)
        if self._count > FILES_MAX:
            raise UsageError(f"the folder holds more than {FILES_MAX} files", where=self._source)
        for entry in entries:
            name = f"{folder.name}/{entry.name}" if folder.name else entry.name
            if entry.is_dir():
                self._enter(folder, Folder(entry, name), depth)
            elif self._is_wanted(entry, name):
                folder.files.append(entry)

    def _enter(self, parent: Folder, folder: Folder, depth: int) -> None:
        why = self._excluded(folder.name) or self._why_link_is_not_followed(folder.path)
        if why is None and depth >= _DEPTH_MAX:
            why = f"it lies more than {_DEPTH_MAX} folders deep"
        if why is not None:
            if why:
                self._found.left_out[f"{folder.name}/"] = why
            return
        if folder.path.name in _SKIPPED_FOLDERS:
            return
        self._fill(folder, depth + 1)
        if folder.path.name.startswith("."):
            hidden = [file for file in folder.all_files() if kind_of_file(file) is not None]
            if hidden:
                self._found.left_out[f"{folder.name}/"] = f"a hidden folder ({hidden[0].name} is in it)"
            return
        parent.folders.append(folder)

    def _is_wanted(self, file: Path, name: str) -> bool:
        why = self._excluded(name)
        if why is None and file.is_symlink():
            why = self._why_link_is_not_followed(file)
        if why is None and file.name.startswith(".") and file.name != DCP_FILE:
            why = "a hidden file" if may_hold_state(file) and kind_of_file(file) is not None else ""
        if why and may_hold_state(file):
            self._found.left_out[name] = why
        return why is None

    def _excluded(self, name: str) -> str | None:
        for pattern in self._exclude:
            if matches(name, pattern):
                self._found.patterns_used.add(pattern)
                return f"as asked for with --exclude {pattern}"
        return None

    def _why_link_is_not_followed(self, path: Path) -> str | None:
        """Return why; None: it is no link, or is followed; empty: what it names is listed under its own name."""
        if not path.is_symlink():
            return None
        target = Path(os.path.realpath(path))
        if not target.exists():
            return f"a link to {target}, which is missing"
        if target in self._real_source.parents:
            return "a link to a folder that holds the source"
        is_listed = target.is_relative_to(self._real_source) and (target.is_dir() or kind_of_file(target) is not None)
        return "" if is_listed else None
