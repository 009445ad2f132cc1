"""Load files of torch.save, and folders of torch.distributed.checkpoint (DCP). Runs in the child process.

Invariants of files of torch.save:
- They are loaded only with ``weights_only=True``.
- A torch release with a known hole in ``weights_only`` is refused before a file is opened.
- Allowed classes are torch's own list, those of plain numpy arrays (random states contain them), and inert stand-ins.
- torch's advice to switch ``weights_only`` off is never shown.

A DCP folder was written with any number of ranks. ``.metadata`` is a pickle, which is read without running it. It says
which parts a tensor has, and in which ``.distcp`` file each part is. A part is a small torch.save file.

DCP writes each dict key as text, and omits empty dicts. This is undone where the right keys are certain: in an
optimizer's ``state`` they are the numbers listed in ``param_groups``, in a scheduler's ``milestones`` they are steps.
Other keys stay text, because the user's key may have been the text ``"0"``.

Invariants of DCP folders:
- A tensor is assembled only if its parts cover it exactly. Memory that was not read is never returned.
- Tensors take at most as much memory as the files have bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ckstore.errors import CapacityError, CkstoreError, CorruptError, MalformedError, NotFoundError, UnsupportedError
from ckstore.ops.interop.unpickle import Record, StandIn, StandIns, read_inert
from ckstore.state.torch_adapter import DTYPES

TORCH_MIN = (2, 10)
"""Older releases let a file run code despite ``weights_only`` (CVE-2025-32434 until 2.6, CVE-2026-24747 until 2.10)."""

_VERSION = re.compile(r"([0-9]+)\.([0-9]+)")
_ATTEMPTS_MAX = 200
# In torch's messages, the class of a stand-in has the module that created it.
_STAND_IN = rf"(?:{re.escape(StandIn.__module__)}\.)?([\w.]+)"
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL ([\w.]+) was not")
_NOT_A_DICT = re.compile(rf"Can only SETITEMS? for dict.* but got <class '{_STAND_IN}'>")
_NOT_A_LIST = re.compile(rf"Can only (?:append to|extend) lists, but got <class '{_STAND_IN}'>")
_SAVE_AGAIN = "load it where you trust it and save its state_dicts with torch.save"
_UNSUPPORTED = (
    ("TorchScript", "the file is a TorchScript archive, which is a program and not a state"),
    ("legacy .tar format", "the file has the tar format that torch wrote before version 0.2"),
    (
        "Unsupported operand",
        "the file has a pickle format, such as protocol 4, that torch's safe reader does not support",
    ),
    ("Can only build", "the file contains an object that only code can create"),
)
"""Words in a message of torch, and what they mean."""
_GLOBAL = re.compile(r"(?:GLOBAL|class|function) ([\w.]+)")


def check_torch(version: str = torch.__version__) -> None:
    """Refuse a torch release that may run code from a file that it loads.

    Raises:
        UnsupportedError: This release is too old.
    """
    found = _VERSION.match(str(version))
    if found is None or (int(found[1]), int(found[2])) < TORCH_MIN:
        raise UnsupportedError(
            f"torch {version} may run code from a file, even with weights_only=True (CVE-2025-32434, CVE-2026-24747)",
            todo=f"upgrade torch to {TORCH_MIN[0]}.{TORCH_MIN[1]} or later; safetensors files need no torch",
        )


def load_file(path: str, stand_ins: StandIns, *, values_only: bool = False) -> Any:
    """Return the content of a file.

    Args:
        path: The file.
        stand_ins: Collects the stand-ins for classes that are not allowed.
        values_only: Give tensors no bytes.

    Raises:
        UnsupportedError: Only code could create its tensors, or the format is not supported.
        CorruptError: The file cannot be read.
    """
    check_torch()
    device = "meta" if values_only else "cpu"

    def load() -> Any:
        if path.endswith(".safetensors"):
            # Given a path, torch would choose the format by the name; this is a torch.save file.
            with Path(path).open("rb") as stream:
                return torch.load(stream, map_location=device, weights_only=True)
        try:
            return torch.load(path, map_location=device, weights_only=True, mmap=True)
        except (RuntimeError, ValueError) as problem:
            # Files from before torch 1.6 are not archives and cannot be mapped.
            if "mmap" not in str(problem):
                raise
        return torch.load(path, map_location=device, weights_only=True)

    return _load_with_stand_ins(load, stand_ins, path)


def load_stream(stream: BinaryIO, stand_ins: StandIns, *, where: str) -> Any:
    """Return the content of a stream; raises like ``load_file``."""
    check_torch()

    def load() -> Any:
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)

    return _load_with_stand_ins(load, stand_ins, where)


def _load_with_stand_ins(load: Callable[[], Any], stand_ins: StandIns, where: str) -> Any:
    """Load, and repeat with another stand-in each time torch names a class that it does not allow."""
    with _torch_errors_translated(where, stand_ins):
        for _ in range(_ATTEMPTS_MAX):
            with torch.serialization.safe_globals([*_numpy_globals(), *stand_ins.allowed]):
                try:
                    return load()
                except Exception as problem:
                    if not _add_stand_in(str(problem), stand_ins):
                        raise
        raise UnsupportedError(f"the file contains objects of more than {_ATTEMPTS_MAX} classes", where=where)


def _add_stand_in(text: str, stand_ins: StandIns) -> bool:
    """Create the stand-in that torch's message asks for; return False if the message has another subject."""
    takes_pairs, takes_items = _NOT_A_DICT.search(text), _NOT_A_LIST.search(text)
    if takes_pairs is not None:
        return stand_ins.replace_by_container(OrderedDict, takes_pairs[1])
    if takes_items is not None:
        return stand_ins.replace_by_container(list, takes_items[1])
    unknown = _UNKNOWN.search(text)
    if unknown is None:
        return False
    # torch's message omits the module of builtins.
    return stand_ins.add(unknown[1] if "." in unknown[1] else f"builtins.{unknown[1]}")


@contextlib.contextmanager
def _torch_errors_translated(where: str, stand_ins: StandIns) -> Iterator[None]:
    """Convert torch's exceptions to errors that say what to do. torch itself advises to run the file's code."""
    try:
        yield
    except (CkstoreError, KeyboardInterrupt):
        raise
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=where) from None
    except MemoryError:
        raise _no_memory(where) from None
    except Exception as problem:
        text = str(problem)
        # torch reports a failed allocation with these words, not with a MemoryError.
        if "can't allocate memory" in text or "not enough memory" in text:
            raise _no_memory(where) from None
        found = _GLOBAL.search(text)
        if "nsupported" in text and ("global" in text.lower() or "class" in text) and found is not None:
            raise _only_code(found[1], where) from None
        if len(stand_ins):
            raise _only_code(", ".join(stand_ins.names), where) from None
        for words, what in _UNSUPPORTED:
            if words in text:
                raise UnsupportedError(what, where=where, todo=_SAVE_AGAIN) from None
        raise CorruptError(
            f"torch cannot read the file: {_reason(text) or type(problem).__name__}", where=where,
            todo="leave it out with --exclude, or replace it by an undamaged copy",
        ) from None  # fmt: skip


def _only_code(names: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"the file contains an object of {names}, which only code can create",
        where=where,
        todo="leave the file out with --exclude, or load it where you trust it and save only its state_dicts",
    )


def _reason(text: str) -> str:
    """Return what torch says about a file, without its advice."""
    _, mark, reason = text.partition("WeightsUnpickler error:")
    lines = [line for line in (reason if mark else text).splitlines() if line.strip()]
    return "" if not lines or "weights_only" in lines[0] else lines[0].strip()[:300]


def _no_memory(where: str) -> CapacityError:
    return CapacityError(
        "loading the file takes far more memory than its size explains", where=where,
        todo="it is damaged or malicious; leave it out with --exclude",
    )  # fmt: skip


def _numpy_globals() -> list[Any]:
    """Return the classes and functions that create numpy arrays.

    Random states contain arrays. transformers allows the same globals.
    """
    import numpy as np

    core = np._core if hasattr(np, "_core") else np.core
    dtypes = {type(np.dtype(name)) for name in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")}
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, *sorted(dtypes, key=repr)]


def restore_keys(state: Any) -> Any:
    """Return the state with the keys that optimizers and schedulers need; dicts are changed in place."""
    if isinstance(state, dict):
        if _is_optimizer(state):
            _restore_optimizer_keys(state)
        if "last_epoch" in state and isinstance(state.get("milestones"), dict):
            _restore_milestones(state)
        for child in state.values():
            restore_keys(child)
    elif isinstance(state, (list, tuple)):
        for child in state:
            restore_keys(child)
    return state


def _is_optimizer(state: dict[Any, Any]) -> bool:
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not groups:
        return False
    return all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)


def _restore_optimizer_keys(state: dict[Any, Any]) -> None:
    numbers = {number for group in state["param_groups"] for number in group["params"] if type(number) is int}
    # The state of an optimizer is empty before its first step, and always without momentum. DCP omits it then.
    moments = state.setdefault("state", {})
    if isinstance(moments, dict) and numbers:
        names = {str(number): number for number in numbers}
        restored = {names.get(key, key): value for key, value in moments.items()}
        moments.clear()
        moments.update(restored)


def _restore_milestones(state: dict[Any, Any]) -> None:
    milestones = state["milestones"]
    if all(isinstance(key, str) and key.isascii() and key.isdigit() for key in milestones):
        state["milestones"] = Counter({int(key): count for key, count in milestones.items()})


def keys_left_as_text(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of dicts whose keys are numbers as text. They may have been numbers before DCP wrote them."""
    found: list[tuple[Any, ...]] = []
    if isinstance(state, dict):
        if state and all(isinstance(key, str) and key.isascii() and key.isdigit() for key in state):
            found.append(path)
        for key, child in state.items():
            found += keys_left_as_text(child, (*path, key))
    elif isinstance(state, (list, tuple)):
        for index, child in enumerate(state):
            found += keys_left_as_text(child, (*path, index))
    return found


METADATA_FILE = ".metadata"
METADATA_NBYTES_MAX = 1 << 30
_MODULE = "torch.distributed.checkpoint."
_LIST_LENGTH_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class _Location:
    """The location of one part."""

    file: str
    offset: int
    nbytes: int


def load_dcp(folder: str, stand_ins: StandIns, *, values_only: bool = False) -> Any:
    """Return the state in a folder, nested as it was saved.

    Args:
        folder: Contains ``.metadata`` and ``.distcp`` files.
        stand_ins: Collects the stand-ins for classes that are not allowed.
        values_only: Leave out tensors.

    Raises:
        CorruptError: A file is missing, damaged, or contradicts the others.
        UnsupportedError: The format is not supported.
    """
    check_torch()
    return restore_keys(_Folder(Path(folder), stand_ins).load(values_only=values_only))


class _Folder:
    """One checkpoint folder."""

    def __init__(self, path: Path, stand_ins: StandIns) -> None:
        self._path = path
        self._stand_ins = stand_ins
        self._where = str(path / METADATA_FILE)
        metadata = self._read_metadata()
        self._entries = self._dict_of(self._field(metadata, "state_dict_metadata"))
        self._paths = self._field(metadata, "planner_data")
        self._locations: dict[tuple[str, tuple[int, ...] | None], _Location] = {}
        for index, info in self._dict_of(self._field(metadata, "storage_data")).items():
            offset = self._field(index, "offset")
            key = (self._text(self._field(index, "fqn")), None if offset is None else self._lengths(offset))
            self._locations[key] = self._location_of(info)
        sizes = [file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()]
        # Nothing is compressed, so the tensors cannot be longer than the files.
        self._nbytes_left = sum(sizes)

    def load(self, *, values_only: bool) -> Any:
        """Return the state."""
        flat: dict[str, Any] = {}
        for name, entry in self._entries.items():
            kind = self._kind_of(entry)
            if kind == "TensorStorageMetadata":
                if not values_only:
                    flat[self._text(name)] = self._tensor(name, entry)
            elif kind == "BytesStorageMetadata":
                flat[self._text(name)] = self._value(name)
            else:
                raise UnsupportedError(f"entry {name!r} is a {kind}", where=self._where)
        return self._nested(flat, values_only=values_only)

    def _read_metadata(self) -> Record:
        file = Path(self._where)
        if not file.is_file():
            raise NotFoundError(".metadata is missing: the save was not finished", where=self._path)
        if file.stat().st_size > METADATA_NBYTES_MAX:
            raise MalformedError(f".metadata is larger than {METADATA_NBYTES_MAX} bytes", where=file)
        metadata = read_inert(file.read_bytes(), where=file)
        if not isinstance(metadata, Record) or self._kind_of(metadata) != "Metadata":
            raise MalformedError(".metadata was not written by torch.distributed.checkpoint", where=file)
        return metadata

    def _tensor(self, name: str, entry: Any) -> torch.Tensor:
        shape = self._lengths(self._field(entry, "size"))
        dtype = self._dtype_of(self._field(entry, "properties"), name)
        chunks = [(self._lengths(self._field(chunk, "offsets")), self._lengths(self._field(chunk, "sizes")))
                  for chunk in self._list_of(self._field(entry, "chunks"))]  # fmt: skip
        nbytes = math.prod(shape) * dtype.itemsize
        self._nbytes_left -= nbytes
        if self._nbytes_left < 0:
            raise MalformedError(
                "the tensors are longer than the files; the checkpoint is damaged or compressed",
                where=f"{self._where}, tensor {name}",
            )
        self._check_cover(name, shape, chunks)
        whole = torch.empty(shape, dtype=dtype)
        for offsets, sizes in chunks:
            part = self._part(name, offsets)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
                raise MalformedError("a part of a tensor does not match .metadata", where=f"{self._path}, {name}")
            box = tuple(slice(begin, begin + length) for begin, length in zip(offsets, sizes, strict=True))
            with torch.no_grad():
                whole[box] = part
        return whole

    def _check_cover(
        self, name: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> None:
        """Refuse parts that overlap, leave a gap or are out of bounds: uncovered memory would be undefined."""
        where = f"{self._where}, tensor {name}"
        for offsets, sizes in chunks:
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise MalformedError("a part of a tensor has another number of dimensions", where=where)
            if any(begin + length > end for begin, length, end in zip(offsets, sizes, shape, strict=True)):
                raise MalformedError("a part of a tensor is out of bounds", where=where)
        if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(shape):
            raise MalformedError("the parts of a tensor leave a gap, or overlap", where=where)
        if len(chunks) > 1:
            # The parts have as many elements as the tensor. They cover it if no element is covered twice.
            seen = torch.zeros(shape, dtype=torch.bool)
            for offsets, sizes in chunks:
                seen[tuple(slice(begin, begin + length) for begin, length in zip(offsets, sizes, strict=True))] = True
            if not bool(seen.all()):
                raise MalformedError("the parts of a tensor overlap", where=where)

    def _part(self, name: str, offsets: tuple[int, ...] | None) -> Any:
        location = self._locations.get((name, offsets)) or self._locations.get((name, None))
        if location is None:
            raise CorruptError(".metadata lacks the location of a part", where=f"{self._where}, {name}")
        path = self._path / location.file
        if Path(location.file).name != location.file or not path.is_file():
            raise CorruptError(f"the file {location.file!r} is missing", where=self._path, todo="copy the whole folder")
        with path.open("rb") as file:
            file.seek(location.offset)
            content = file.read(location.nbytes)
        if len(content) != location.nbytes:
            raise CorruptError("the file ends early", where=path)
        return load_stream(io.BytesIO(content), self._stand_ins, where=f"{path}, offset {location.offset} ({name})")

    def _value(self, name: str) -> Any:
        return self._part(name, None)

    def _nested(self, flat: Mapping[str, Any], *, values_only: bool) -> Any:
        """Return the state nested by the paths in the planner data, as it was before DCP flattened it."""
        paths = self._paths
        if not isinstance(paths, dict) or not all(name in paths for name in flat):
            return dict(flat)
        root: dict[Any, Any] = {}
        for name, value in flat.items():
            path = paths[name]
            if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
                raise MalformedError(".metadata contains an invalid path", where=f"{self._where}, {name}")
            here = root
            for key in path[:-1]:
                here = here.setdefault(key, {})
                if not isinstance(here, dict):
                    raise MalformedError(".metadata contains contradicting paths", where=f"{self._where}, {name}")
            here[path[-1]] = value
        return root if values_only else _with_lists(root, is_root=True)

    # Checked access to the content of the pickle.

    def _kind_of(self, record: Any) -> str:
        """Return the name of a class of DCP; empty for anything else."""
        is_ours = isinstance(record, Record) and record.kind.module.startswith(_MODULE)
        return record.kind.name if is_ours else ""

    def _field(self, record: Any, name: str) -> Any:
        if not isinstance(record, Record):
            raise MalformedError(f".metadata contains no object with the field {name!r}", where=self._where)
        return record.field(name)

    def _dict_of(self, found: Any) -> dict[Any, Any]:
        if not isinstance(found, dict):
            raise MalformedError(".metadata lacks a dict", where=self._where)
        return found

    def _list_of(self, found: Any) -> list[Any]:
        if not isinstance(found, list):
            raise MalformedError(".metadata lacks a list", where=self._where)
        return found

    def _text(self, found: Any) -> str:
        if not isinstance(found, str):
            raise MalformedError("a name in .metadata is not text", where=self._where)
        return found

    def _lengths(self, found: Any) -> tuple[int, ...]:
        """Return the lengths of a torch.Size, which the pickle describes as a call."""
        arguments = list(getattr(found, "arguments", ()))
        lengths = arguments[0] if len(arguments) == 1 else None
        if not isinstance(lengths, (tuple, list)) or not all(type(each) is int and each >= 0 for each in lengths):
            raise MalformedError("a size in .metadata is invalid", where=self._where)
        return tuple(lengths)

    def _dtype_of(self, properties: Any, name: str) -> torch.dtype:
        state = getattr(properties, "state", None)
        symbol = state[0] if isinstance(state, tuple) and state else self._field(properties, "dtype")
        dtype = DTYPES.get(str(getattr(symbol, "name", "")))
        if dtype is None or getattr(symbol, "module", "") != "torch":
            raise UnsupportedError("a tensor has an unknown dtype", where=f"{self._where}, {name}")
        return dtype

    def _location_of(self, info: Any) -> _Location:
        if self._field(info, "transform_descriptors"):
            raise UnsupportedError(
                "the checkpoint is compressed by an extension of torch.distributed.checkpoint",
                where=self._where,
                todo="load it with torch, and save it without extensions",
            )
        file, offset, nbytes = (self._field(info, name) for name in ("relative_path", "offset", "length"))
        if type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
            raise MalformedError(".metadata contains an invalid location", where=self._where)
        return _Location(self._text(file), offset, nbytes)


def _with_lists(node: Any, *, is_root: bool = False) -> Any:
    """Return the tree with a list in place of each dict with the keys 0, 1, 2 and so on, which DCP made of lists."""
    if not isinstance(node, dict):
        return node
    nested = {key: _with_lists(child) for key, child in node.items()}
    # In planner data an int is always a position in a list. Keys of dicts are text.
    if not is_root and nested and all(type(key) is int for key in nested):
        if min(nested) < 0 or max(nested) > _LIST_LENGTH_MAX:
            raise MalformedError("a list in .metadata has an invalid length", where=METADATA_FILE)
        # DCP omits an empty dict in a list. torch puts None in its place too.
        return [nested.get(index) for index in range(max(nested) + 1)]
    return nested
