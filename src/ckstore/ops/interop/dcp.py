"""Load folders that torch.distributed.checkpoint wrote, whatever the number of ranks; for a child process to do.

Their ``.metadata`` is a pickle: it is read without being run, and says where in which ``.distcp`` file the parts of
each tensor lie. Each part is a small file of torch.save of its own.

Invariants:
- A tensor is put together only if its parts cover it exactly; nothing that was not read is ever handed on.
- Memory is taken for as many bytes as the files are long, and for no more.

Undo what torch.distributed.checkpoint does to keys: it writes each key of a dict as text, and no empty dict.

Where torch itself says what a dict's keys must be, they become that again: those of an optimizer's ``state`` are the
numbers that its ``param_groups`` list, and a scheduler's ``milestones`` count steps. Elsewhere text stays text, since
a key of the user may have been the text ``"0"``.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ckstore.errors import CorruptError, MalformedError, NotFoundError, UnsupportedError
from ckstore.ops.interop.stand_ins import StandIns
from ckstore.ops.interop.torch_save import check_torch, load_stream
from ckstore.state.torch_adapter import DTYPES


def with_keys_of_torch(state: Any) -> Any:
    """Return the state with the keys that optimizers and schedulers need; dicts are changed where they are."""
    if isinstance(state, dict):
        if _is_optimizer(state):
            _mend_optimizer(state)
        if "last_epoch" in state and isinstance(state.get("milestones"), dict):
            _mend_milestones(state)
        for child in state.values():
            with_keys_of_torch(child)
    elif isinstance(state, (list, tuple)):
        for child in state:
            with_keys_of_torch(child)
    return state


def _is_optimizer(state: dict[Any, Any]) -> bool:
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not groups:
        return False
    return all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)


def _mend_optimizer(state: dict[Any, Any]) -> None:
    numbers = {number for group in state["param_groups"] for number in group["params"] if type(number) is int}
    # Before its first step, and for ever without momentum, an optimizer's state is empty, and was not written.
    moments = state.setdefault("state", {})
    if isinstance(moments, dict) and numbers:
        names = {str(number): number for number in numbers}
        mended = {names.get(key, key): value for key, value in moments.items()}
        moments.clear()
        moments.update(mended)


def _mend_milestones(state: dict[Any, Any]) -> None:
    milestones = state["milestones"]
    if all(isinstance(key, str) and key.isascii() and key.isdigit() for key in milestones):
        state["milestones"] = Counter({int(key): count for key, count in milestones.items()})


def keys_left_as_text(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of dicts whose keys are numbers as text: nothing says whether they were numbers once."""
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


class InertRecord(Protocol):
    """What the pickle says of an object; see ops/interop/unpickle.py."""

    kind: Any
    arguments: tuple[Any, ...]

    def field(self, name: str) -> Any:
        """Return a field of its state, or None."""
        ...


class ReadInert(Protocol):
    """Reads a pickle without running it."""

    def __call__(self, content: bytes, *, where: object = None) -> Any:
        """Return what it describes."""
        ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one part lies."""

    file: str
    offset: int
    nbytes: int


def load_dcp(folder: str, stand_ins: StandIns, *, read_inert: ReadInert, is_peek: bool = False) -> Any:
    """Return the state in a folder, nested as it was saved.

    Args:
        folder: Holds ``.metadata`` and ``.distcp`` files.
        stand_ins: Takes the stand-ins of what only code can make.
        read_inert: What reads a pickle without running it.
        is_peek: Leave out tensors.

    Raises:
        CorruptError: A file is missing, damaged, or contradicts the others.
        UnsupportedError: It was written in a form that is not read here.
    """
    check_torch()
    return with_keys_of_torch(_Folder(Path(folder), stand_ins, read_inert).load(is_peek=is_peek))


class _Folder:
    """One checkpoint."""

    def __init__(self, path: Path, stand_ins: StandIns, read_inert: ReadInert) -> None:
        self._path = path
        self._stand_ins = stand_ins
        self._where = str(path / METADATA_FILE)
        metadata = self._read_metadata(read_inert)
        self._entries = self._dict_of(self._field(metadata, "state_dict_metadata"))
        self._paths = self._field(metadata, "planner_data")
        self._places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        for index, info in self._dict_of(self._field(metadata, "storage_data")).items():
            offset = self._field(index, "offset")
            key = (self._text(self._field(index, "fqn")), None if offset is None else self._lengths(offset))
            self._places[key] = self._place_of(info)
        sizes = [file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()]
        # What is stored without compression cannot be longer than the files that hold it.
        self._nbytes_left = sum(sizes)

    def load(self, *, is_peek: bool) -> Any:
        """Return the state."""
        flat: dict[str, Any] = {}
        for name, entry in self._entries.items():
            kind = self._kind_of(entry)
            if kind == "TensorStorageMetadata":
                if not is_peek:
                    flat[self._text(name)] = self._tensor(name, entry)
            elif kind == "BytesStorageMetadata":
                flat[self._text(name)] = self._value(name)
            else:
                raise UnsupportedError(f"entry {name!r} is a {kind}", where=self._where)
        return self._nested(flat, is_peek=is_peek)

    def _read_metadata(self, read_inert: ReadInert) -> InertRecord:
        file = Path(self._where)
        if not file.is_file():
            raise NotFoundError("there is no .metadata: the checkpoint was not finished", where=self._path)
        if file.stat().st_size > METADATA_NBYTES_MAX:
            raise MalformedError("the .metadata is longer than can be", where=file)
        metadata: InertRecord = read_inert(file.read_bytes(), where=file)
        if self._kind_of(metadata) != "Metadata":
            raise MalformedError("the .metadata is none of torch.distributed.checkpoint", where=file)
        return metadata

    def _tensor(self, name: str, entry: InertRecord) -> torch.Tensor:
        shape = self._lengths(self._field(entry, "size"))
        dtype = self._dtype_of(self._field(entry, "properties"), name)
        chunks = [(self._lengths(self._field(chunk, "offsets")), self._lengths(self._field(chunk, "sizes")))
                  for chunk in self._list_of(self._field(entry, "chunks"))]  # fmt: skip
        nbytes = math.prod(shape) * dtype.itemsize
        self._nbytes_left -= nbytes
        if self._nbytes_left < 0:
            raise MalformedError(
                "the tensors of a checkpoint are longer than its files; it is damaged, or compressed",
                where=f"{self._where}, tensor {name}",
            )
        self._check_cover(name, shape, chunks)
        whole = torch.empty(shape, dtype=dtype)
        for offsets, sizes in chunks:
            part = self._part(name, offsets)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
                raise MalformedError("a part of a tensor is not what .metadata says", where=f"{self._path}, {name}")
            box = tuple(slice(begin, begin + length) for begin, length in zip(offsets, sizes, strict=True))
            with torch.no_grad():
                whole[box] = part
        return whole

    def _check_cover(
        self, name: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> None:
        """Refuse parts that leave a gap, overlap or lie outside: what they do not cover was never written."""
        where = f"{self._where}, tensor {name}"
        for offsets, sizes in chunks:
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise MalformedError("a part of a tensor has another rank", where=where)
            if any(begin + length > end for begin, length, end in zip(offsets, sizes, shape, strict=True)):
                raise MalformedError("a part of a tensor lies outside of it", where=where)
        if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(shape):
            raise MalformedError("the parts of a tensor leave a gap, or overlap", where=where)
        if len(chunks) > 1:
            # As many elements as the tensor has: they cover it exactly if none is covered twice.
            seen = torch.zeros(shape, dtype=torch.bool)
            for offsets, sizes in chunks:
                seen[tuple(slice(begin, begin + length) for begin, length in zip(offsets, sizes, strict=True))] = True
            if not bool(seen.all()):
                raise MalformedError("the parts of a tensor overlap", where=where)

    def _part(self, name: str, offsets: tuple[int, ...] | None) -> Any:
        place = self._places.get((name, offsets)) or self._places.get((name, None))
        if place is None:
            raise CorruptError("the .metadata does not say where a part lies", where=f"{self._where}, {name}")
        path = self._path / place.file
        if Path(place.file).name != place.file or not path.is_file():
            raise CorruptError(f"the file {place.file!r} is missing", where=self._path, todo="copy the whole folder")
        with path.open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.nbytes)
        if len(content) != place.nbytes:
            raise CorruptError("the file ends early", where=path)
        return load_stream(io.BytesIO(content), self._stand_ins, where=f"{path}, offset {place.offset} ({name})")

    def _value(self, name: str) -> Any:
        return self._part(name, None)

    def _nested(self, flat: Mapping[str, Any], *, is_peek: bool) -> Any:
        """Return the state as it was before it was made flat, by the paths that the planner kept."""
        paths = self._paths
        if not isinstance(paths, dict) or not all(name in paths for name in flat):
            return dict(flat)
        root: dict[Any, Any] = {}
        for name, value in flat.items():
            path = paths[name]
            if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
                raise MalformedError("the .metadata has an impossible path", where=f"{self._where}, {name}")
            here = root
            for key in path[:-1]:
                here = here.setdefault(key, {})
                if not isinstance(here, dict):
                    raise MalformedError("the .metadata has contradicting paths", where=f"{self._where}, {name}")
            here[path[-1]] = value
        return root if is_peek else _with_lists(root, is_root=True)

    # What the pickle says, checked

    def _kind_of(self, record: Any) -> str:
        module, name = (getattr(getattr(record, "kind", None), part, "") for part in ("module", "name"))
        return str(name) if str(module).startswith(_MODULE) else ""

    def _field(self, record: Any, name: str) -> Any:
        field = getattr(record, "field", None)
        if field is None:
            raise MalformedError("the .metadata has another thing where a record must be", where=self._where)
        return field(name)

    def _dict_of(self, found: Any) -> dict[Any, Any]:
        if not isinstance(found, dict):
            raise MalformedError("the .metadata lacks a table", where=self._where)
        return found

    def _list_of(self, found: Any) -> list[Any]:
        if not isinstance(found, list):
            raise MalformedError("the .metadata lacks a list", where=self._where)
        return found

    def _text(self, found: Any) -> str:
        if not isinstance(found, str):
            raise MalformedError("a name in the .metadata is no text", where=self._where)
        return found

    def _lengths(self, found: Any) -> tuple[int, ...]:
        """Return a torch.Size, which is the record of a call."""
        arguments = list(getattr(found, "arguments", ()))
        lengths = arguments[0] if len(arguments) == 1 else None
        if not isinstance(lengths, (tuple, list)) or not all(type(each) is int and each >= 0 for each in lengths):
            raise MalformedError("a size in the .metadata is none", where=self._where)
        return tuple(lengths)

    def _dtype_of(self, properties: Any, name: str) -> torch.dtype:
        state = getattr(properties, "state", None)
        symbol = state[0] if isinstance(state, tuple) and state else self._field(properties, "dtype")
        dtype = DTYPES.get(str(getattr(symbol, "name", "")))
        if dtype is None or getattr(symbol, "module", "") != "torch":
            raise UnsupportedError("a tensor has a dtype that is not known here", where=f"{self._where}, {name}")
        return dtype

    def _place_of(self, info: Any) -> _Place:
        if self._field(info, "transform_descriptors"):
            raise UnsupportedError(
                "the checkpoint is compressed by an extension of torch.distributed.checkpoint",
                where=self._where,
                todo="load it and save it without extensions",
            )
        file, offset, nbytes = (self._field(info, name) for name in ("relative_path", "offset", "length"))
        if type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
            raise MalformedError("the .metadata names an impossible place", where=self._where)
        return _Place(self._text(file), offset, nbytes)


def _with_lists(node: Any, *, is_root: bool = False) -> Any:
    """Return the tree with a list for every dict that has the keys 0, 1, 2 and so on, as the planner took it apart."""
    if not isinstance(node, dict):
        return node
    made = {key: _with_lists(child) for key, child in node.items()}
    # In a path of the planner only a position in a list is an int; keys of dicts were turned into text.
    if not is_root and made and all(type(key) is int for key in made):
        if min(made) < 0 or max(made) > _LIST_LENGTH_MAX:
            raise MalformedError("a list in the .metadata has an impossible length", where=METADATA_FILE)
        # An empty dict in a list leaves nothing behind when a state is made flat; torch puts None in its place too.
        return [made.get(index) for index in range(max(made) + 1)]
    return made
