"""List the files below a folder, and classify them by name and by their first bytes.

`step_of_name`, `metrics_of_name` and `shard_of_name` parse names. `scan` lists a folder and opens nothing.
`detect_kind` reads the first bytes of a file and refuses what is not a checkpoint: a pointer, an HTML page, an archive,
a truncated download.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ckstore.config import STEP_MAX
from ckstore.errors import BackendError, CorruptError, NotFoundError, UsageError

_STEP_WORDS = r"(?:global_?step|steps?|iter(?:ation)?s?|checkpoint|ckpt|batch(?:es)?|update)"
# So short that random names contain them, as in vyz51ba0: they count only where nothing else touches word and number.
_SHORT_STEP_WORDS = r"(?:it|ba)"
# May count thousands or millions: 10k, 1.5M.
_COUNT = r"([0-9]{1,18}(?:\.[0-9]{1,3}(?=[kKmM]))?(?:[kKmM](?![A-Za-z]))?)(?![0-9])"
_STEP = re.compile(
    rf"(?:^|[^a-z]){_STEP_WORDS}[-_=:.]?{_COUNT}|(?:^|[^a-z0-9]){_SHORT_STEP_WORDS}[-_=:.]?{_COUNT}(?![a-z])",
    re.ASCII | re.IGNORECASE,
)
_STEP_BEFORE = re.compile(
    r"(?<![0-9.])([0-9]{1,18}[kKmM]?)[-_]?(?:steps?|iters?)(?![a-z])"
    rf"|(?<![a-z0-9.])([0-9]{{1,18}}[kKmM]?)[-_]?{_SHORT_STEP_WORDS}(?![a-z0-9])",
    re.ASCII | re.IGNORECASE,
)
_EPOCH = re.compile(r"(?:^|[^a-z])(?:epochs?|ep)[-_=:.]?([0-9]{1,18})(?![0-9])", re.ASCII | re.IGNORECASE)
# Alone, or after a word for a state. The number in resnet50, v2, fp16 or 7b is not a step.
_NUMBER = re.compile(
    r"(?:^|[-_= ]|model|weights|state|snapshot|save)([0-9]{1,18})(?=$|[-_= ])", re.ASCII | re.IGNORECASE
)
_METRIC = re.compile(r"([A-Za-z][A-Za-z0-9_/]{0,60})=(-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)", re.ASCII)
_SHARD = re.compile(r"(.+?)[-_]([0-9]{1,6})[-_]of[-_]([0-9]{1,6})", re.ASCII)
_DIGITS = re.compile(r"([0-9]+)")

_YEAR, _MONTH, _DAY = r"(?:19|20)[0-9]{2}", r"(?:0[1-9]|1[0-2])", r"(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[-_.T ]?(?:[01][0-9]|2[0-3])[-_.:h]?[0-5][0-9](?:[-_.:m]?[0-5][0-9])?)?"
_DATE = re.compile(
    rf"(?<![0-9])(?:{_YEAR}([-_.]){_MONTH}\1{_DAY}|{_DAY}([-_.]){_MONTH}\2{_YEAR}|{_MONTH}([-_.]){_DAY}\3{_YEAR})"
    rf"{_TIME}(?![0-9])",
    re.ASCII,
)
# A bare run of digits: a date, with or without a time, or seconds or milliseconds since 1970.
_STAMP = re.compile(rf"(?<![0-9])(?:{_YEAR}{_MONTH}{_DAY}{_TIME}|1[4-9][0-9]{{8}}(?:[0-9]{{3}})?)(?![0-9])", re.ASCII)
# After one of these words, digits that look like a date are a step.
_COUNTS_STEPS = re.compile(r"(?:step|steps|iter|iters|iteration|iterations)[-_=:.]?$", re.ASCII | re.IGNORECASE)
_UNFINISHED = re.compile(
    r"^[._]?(?:tmp|temp|incomplete|partial)[-_.]"
    r"|[-_.](?:tmp|temp|incomplete|partial|part|download|crdownload|saving|writing)(?:[-_.]?[0-9]+)?$"
    r"|[-_.]tmp[-_.]",
    re.ASCII | re.IGNORECASE,
)

NOT_METRICS = frozenset({"step", "epoch", "global_step", "iter", "iteration", "v"})


def step_of_name(name: str) -> int | None:
    """Return the step that a name states explicitly: ``checkpoint-500``, ``epoch=3-step=1200``, ``ba100``."""
    bare = _without_dates(name)[0]
    found = _STEP.findall(bare) or _STEP_BEFORE.findall(bare)
    return _step_of_count("".join(found[-1])) if found else None


def number_of_name(name: str) -> int | None:
    """Return the only number or epoch in a name, as in ``model_1000``; otherwise None."""
    bare = _without_dates(name)[0]
    found = _EPOCH.findall(bare) or _NUMBER.findall(bare)
    return _step_of_count(found[0]) if len(found) == 1 else None


def dates_in_name(name: str) -> list[str]:
    """Return the dates and times in a name, which are not steps: ``20240115`` of ``run-20240115``."""
    return _without_dates(name)[1]


def is_unfinished(name: str) -> bool:
    """Return whether writers use such a name for an unfinished save: ``tmp-checkpoint-8``."""
    return _UNFINISHED.search(name) is not None


def _without_dates(name: str) -> tuple[str, list[str]]:
    dates: list[str] = []

    def drop(found: re.Match[str]) -> str:
        if _COUNTS_STEPS.search(found.string, 0, found.start()):
            return found[0]
        dates.append(found[0])
        return ""

    return _STAMP.sub(drop, _DATE.sub(drop, name)), dates


def _step_of_count(count: str) -> int | None:
    unit = {"k": 1000, "m": 1_000_000}.get(count[-1].lower(), 1)
    digits = count if unit == 1 else count[:-1]
    whole, _, part = digits.partition(".")
    number = int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
    return number if number <= STEP_MAX else None


def metrics_of_name(name: str) -> dict[str, float]:
    """Return the metrics in a name as Lightning writes them: ``epoch=3-step=1200-val_loss=0.31``."""
    return {key: float(value) for key, value in _METRIC.findall(name) if key.lower() not in NOT_METRICS}


def shard_of_name(stem: str) -> tuple[str, int, int] | None:
    """Return name of the whole, shard number and shard count of ``model-00002-of-00003``."""
    found = _SHARD.fullmatch(stem)
    return (found[1], int(found[2]), int(found[3])) if found else None


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares numbers by value: ``model_9`` before ``model_10``."""
    parts = _DIGITS.split(name)
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts if part)


def matches(path: str, pattern: str) -> bool:
    """Return whether a glob matches a path: ``*`` stays within a name, ``**`` crosses folders."""
    return _match(path.split("/"), pattern.strip("/").split("/"))


def _match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_match(names[skipped:], patterns[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _match(names[1:], patterns[1:])


TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
PICKLE_SUFFIXES = (".pkl", ".pickle")
SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
DCP_FILE = ".metadata"
DCP_SUFFIX = ".distcp"
FILES_MAX = 200_000
"""Limit of files to list. More are a mistake in the path."""

_DEPTH_MAX = 16
_ARCHIVE_SUFFIXES = (".zip", ".gz", ".tgz", ".zst", ".xz", ".bz2", ".7z", ".rar", ".lz4")
_SUFFIXES_WITHOUT_STATE = frozenset(
    (
        *(".txt", ".md", ".rst", ".log", ".out", ".err", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".cfg", ".ini"),
        *(".html", ".xml", ".tex", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp4", ".wav"),
        *(".py", ".pyc", ".pyi", ".ipynb", ".sh", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".so", ".o", ".diff"),
        # Tokenizer vocabularies and chat templates.
        *(".model", ".vocab", ".bpe", ".tiktoken", ".jinja", ".jinja2"),
        *(".wandb", ".lock", ".pid", ".patch", ".sha256", ".md5", ".gitignore", ".gitattributes"),
    )
)
_TEXT_SUFFIXES = frozenset((".json", ".csv", ".tsv", ".txt", ".yaml", ".yml"))
"""In a checkpoint's folder these may contain state, unless their names are those of settings."""

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
SMALL_FILE_NBYTES_MAX = 64 << 20
"""Longer files are not kept next to the weights."""

_SMALL_SUFFIXES = frozenset(
    (
        *(".json", ".txt", ".md", ".yaml", ".yml", ".py"),
        # Tokenizer vocabularies and chat templates.
        *(".model", ".vocab", ".bpe", ".tiktoken", ".jinja", ".jinja2"),
    )
)
_SMALL_NAMES = frozenset({"LICENSE", "NOTICE"})
_SKIPPED_FOLDERS = frozenset({".git", "__pycache__", "node_modules"})


@dataclass(slots=True)
class Folder:
    """One folder and its content, in natural order.

    Attributes:
        path: Its path.
        name: Its path below the source; empty for the source itself.
        files: Its files.
        folders: Its subfolders.
    """

    path: Path
    name: str
    files: list[Path] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)

    def holds(self, name: str) -> bool:
        """Return whether it contains a file of this name."""
        return any(file.name == name for file in self.files)

    def all_files(self) -> Iterator[Path]:
        """Yield every file in it and below."""
        yield from self.files
        for folder in self.folders:
            yield from folder.all_files()


@dataclass(slots=True)
class Scan:
    """The content of a folder.

    Attributes:
        root: The folder.
        left_out: Path below it -> reason why it is ignored.
        patterns_used: The ``--exclude`` globs that have matched.
    """

    root: Folder
    left_out: dict[str, str] = field(default_factory=dict)
    patterns_used: set[str] = field(default_factory=set)


def kind_of_file(path: Path) -> str | None:
    """Return the format that a file's name promises; None if it is not read at all."""
    if path.suffix == SAFETENSORS_SUFFIX:
        return "safetensors"
    if path.suffix in TORCH_SUFFIXES or path.suffix in PICKLE_SUFFIXES:
        return "torch"
    return "json" if path.suffix == ".json" and "state" in path.stem.lower() else None


def may_hold_state(path: Path, *, is_in_checkpoint: bool = False) -> bool:
    """Return whether a file may contain state, by its name. Settings and logs do not.

    Args:
        path: The file.
        is_in_checkpoint: It is in a checkpoint's folder, where texts and tables may contain state too.
    """
    if kind_of_file(path) is not None:
        return True
    stem, suffix = path.stem.lower(), path.suffix.lower()
    if is_in_checkpoint and suffix in _TEXT_SUFFIXES:
        return stem not in _NAMES_WITHOUT_STATE and _NAMES_OF_SETTINGS.fullmatch(stem) is None
    if path.name.lower().startswith("events.out.tfevents") or (not suffix and stem in _NAMES_WITHOUT_STATE):
        return False
    return suffix not in _SUFFIXES_WITHOUT_STATE and suffix != ".json"


def not_kept_reason(path: Path) -> str | None:
    """Return why a file next to the weights is not kept as bytes, or None: it is kept.

    Args:
        path: A file in a checkpoint's folder, for which ``may_hold_state`` is False.
    """
    if path.suffix.lower() not in _SMALL_SUFFIXES and path.name not in _SMALL_NAMES:
        return "a file of this kind is not needed to load the weights"
    if path.stat().st_size > SMALL_FILE_NBYTES_MAX:
        return f"longer than {SMALL_FILE_NBYTES_MAX >> 20} MiB; only small files are kept"
    return None


def unread_reason(path: Path) -> str:
    """Return why a file that may contain state is not part of a checkpoint."""
    if is_unfinished(path.name):
        return "its name says that its save was not finished"
    if path.suffix == DCP_SUFFIX or path.name == DCP_FILE:
        return "torch.distributed.checkpoint wrote it, but the .metadata is missing: the save was not finished"
    if path.suffix.lower() in _ARCHIVE_SUFFIXES:
        return "an archive; unpack it, and import its content"
    if kind_of_file(path) is not None:
        return "it does not belong to a checkpoint; import it by its own path, with --step"
    return "files of this kind are not read"


def scan(source: Path, exclude: Sequence[str]) -> Scan:
    """List a folder and its subfolders.

    Args:
        source: The folder.
        exclude: Globs of paths below it that are left out.

    Raises:
        UsageError: It contains more than FILES_MAX files.
        BackendError: A folder cannot be listed.
    """
    return _Scanner(source, exclude).scan()


class _Scanner:
    """One scan; it counts the files."""

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
            entries = sorted(folder.path.iterdir(), key=lambda entry: natural_key(entry.name))
        except OSError as problem:
            raise BackendError(f"the folder cannot be listed ({problem.strerror})", where=folder.path) from None
        self._count += len(entries)
        if self._count > FILES_MAX:
            raise UsageError(
                f"the folder contains more than {FILES_MAX} files", where=self._source, todo="name a folder in it"
            )
        for entry in entries:
            name = f"{folder.name}/{entry.name}" if folder.name else entry.name
            if entry.is_dir():
                self._enter(folder, Folder(entry, name), depth)
            elif self._is_wanted(entry, name):
                folder.files.append(entry)

    def _enter(self, parent: Folder, folder: Folder, depth: int) -> None:
        why = self._excluded(folder.name) or self._ignored_link_reason(folder.path)
        if why is None and depth >= _DEPTH_MAX:
            why = f"it is more than {_DEPTH_MAX} folders deep"
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
                self._found.left_out[f"{folder.name}/"] = f"a hidden folder (contains {hidden[0].name})"
            return
        parent.folders.append(folder)

    def _is_wanted(self, file: Path, name: str) -> bool:
        why = self._excluded(name)
        if why is None and file.is_symlink():
            why = self._ignored_link_reason(file)
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

    def _ignored_link_reason(self, path: Path) -> str | None:
        """Return why a link is ignored.

        Returns:
            None: it is not a link, or it is followed. Empty: its target is listed under its own name.
        """
        if not path.is_symlink():
            return None
        target = Path(os.path.realpath(path))
        if not target.exists():
            return f"a link to {target}, which is missing"
        if target in self._real_source.parents:
            return "a link to a folder that contains the source"
        is_listed = target.is_relative_to(self._real_source) and (target.is_dir() or kind_of_file(target) is not None)
        return "" if is_listed else None


_HEAD_NBYTES = 1024
_TAR_MAGIC_AT = 257
# The end record of a zip file, and the longest comment that may follow it.
_ZIP_END, _ZIP_END_NBYTES = b"PK\x05\x06", 22 + (1 << 16)
_TEXT_BYTES = frozenset(range(32, 256)) | frozenset(b"\t\n\r")

# The pickled magic number at the start of files from before torch 1.6.
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

_STARTS = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer, not the file",
        "get the file with `git lfs pull`",
    ),
    (b"/annex/objects/", "a git-annex pointer, not the file", "get the file with `git annex get`"),
    (b"../.git/annex/objects/", "a git-annex pointer, not the file", "get the file with `git annex get`"),
    (b"\x1f\x8b", "compressed with gzip", "decompress it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it first"),
    (b"BZh", "compressed with bzip2", "decompress it first"),
    (b"\xfd7zXZ", "compressed with xz", "decompress it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it, and import its content"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "load it with the library that wrote it, and save it with torch.save"),
    (b"GGUF", "a GGUF file", "load it with the library that wrote it, and save it with torch.save"),
    (b"\x93NUMPY", "a numpy.save array", "load it with numpy, and save it with torch.save"),
)


def detect_kind(path: Path, kind: str) -> str:
    """Return the format of a file by its content, after checking that it may be a checkpoint.

    Args:
        path: The file.
        kind: The format that its name promises: ``"torch"``, ``"safetensors"`` or ``"json"``.

    Returns:
        One of these, or ``"pickle"``.

    Raises:
        CorruptError: It is something else, or ends early; the message says what it is.
        NotFoundError: The file does not exist.
        BackendError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD_NBYTES)
            file.seek(max(0, nbytes - _ZIP_END_NBYTES))
            end = file.read(_ZIP_END_NBYTES) if head.startswith(b"PK\x03\x04") else b""
    except FileNotFoundError:
        raise NotFoundError("no such file", where=path) from None
    except OSError as problem:
        raise BackendError(f"the file cannot be read ({problem.strerror})", where=path) from None
    found = _not_a_checkpoint(head, nbytes, kind)
    if found is None and end and _ZIP_END not in end:
        found = "a zip archive that ends early", "copy or download it again"
    if found is None and head.startswith(b"PK\x03\x04") and not _is_zip_of_torch(head):
        found = "a zip archive that torch.save did not write", "unpack it, and import its content"
    if found is not None:
        raise CorruptError(f"the file is not a checkpoint: it is {found[0]}", where=path, todo=found[1])
    # Before the check for a pickle: the length of a header may begin with the same byte.
    if kind != "json" and _is_safetensors(head, nbytes):
        return "safetensors"
    if kind != "json" and head[:1] == b"\x80":
        return "torch" if _LEGACY_MAGIC in head[:20] else "pickle"
    return "torch" if kind == "safetensors" and end else kind


def _not_a_checkpoint(head: bytes, nbytes: int, kind: str) -> tuple[str, str] | None:
    again = "copy or download it again"
    if nbytes == 0:
        return "empty", again
    for start, what, todo in _STARTS:
        if head.startswith(start):
            return what, todo
    if head.count(0) == len(head) and nbytes >= _HEAD_NBYTES:
        return "an unfinished download, with zeros only in its first kilobyte", again
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return "a tar archive", "unpack it, and import its content"
    if kind == "json":
        return None
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page, perhaps a server's error message", again
    if text.startswith((b"<?xml", b"<error")):
        return "an XML document, perhaps a server's error message", again
    if all(byte in _TEXT_BYTES for byte in head) and max(head) < 128:
        return f"a text that begins with {head[:40].decode('ascii')!r}", again
    return _truncated_safetensors(head, nbytes) if kind == "safetensors" else None


def _truncated_safetensors(head: bytes, nbytes: int) -> tuple[str, str] | None:
    if nbytes < 8:
        return f"a file of {nbytes} bytes; a safetensors file has at least 8", "copy or download it again"
    (header_nbytes,) = struct.unpack("<Q", head[:8])
    if head[8:9] == b"{" and header_nbytes > nbytes - 8:
        return "a safetensors file that ends early", "copy or download it again"
    return None


def _is_safetensors(head: bytes, nbytes: int) -> bool:
    if len(head) < 9 or head[8:9] != b"{":
        return False
    return bool(2 <= struct.unpack("<Q", head[:8])[0] <= nbytes - 8)


def _is_zip_of_torch(head: bytes) -> bool:
    """Return whether the first member of an archive is in a folder, as in every archive that torch.save writes."""
    if len(head) < 30:
        return False
    (length,) = struct.unpack("<H", head[26:28])
    name = head[30 : 30 + length]
    return b"/" in name or len(name) > len(head) - 30
