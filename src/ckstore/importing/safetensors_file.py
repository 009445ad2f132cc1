"""A safetensors file as a state: a flat dict of its tensors, whose bytes are read from it as a commit asks for them.

Neither torch nor a child process is needed: the format holds no code, and its header is checked before it is believed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckstore.capture import Captured
from ckstore.errors import NotFoundError
from ckstore.importing.storable import Loaded, skipped_by
from ckstore.importing.storages import FileStorage, OpenFile
from ckstore.tensor import HostStorage, TensorSpec
from ckstore.tree import DictNode, TensorNode, format_path


def open_safetensors(path: Path, *, key: str = "", skip: Sequence[str] = ()) -> Loaded:
    """Return the tensors of a file; they keep it open.

    Args:
        path: The file.
        key: The key that it gets in the state; empty: it is the whole state.
        skip: Globs over dotted paths of tensors that are left out.

    Raises:
        CorruptError: It is damaged.
        UnsupportedError: A tensor has a dtype that cannot be stored.
    """
    from ckstore.adapters.safetensors_header import read_header

    try:
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), str(path))
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=path) from None
    header = read_header(file.read, file.nbytes, where=path)
    warnings = (
        [
            f"The metadata of {path.name} has the names of tensors as texts ({', '.join(header.perhaps_same[:5])}). "
            "If these are tied tensors, restore into a model that ties them; no tensors were made of them."
        ]
        if header.perhaps_same
        else []
    )
    tensors: list[TensorSpec] = []
    storages: list[HostStorage] = []
    index_of: dict[str, int] = {}
    prefix: tuple[str, ...] = (key,) if key else ()
    left_out: dict[str, str] = {}
    for entry in header.entries:
        why = skipped_by((*prefix, entry.name), skip)
        if why is not None:
            left_out[format_path((*prefix, entry.name))] = why
            continue
        index_of[entry.name] = len(tensors)
        strides = _strides(entry.shape, 1 if entry.library == "torch" else entry.itemsize)
        tensors.append(TensorSpec(entry.library, entry.dtype, entry.shape, strides, len(storages), 0))
        storages.append(FileStorage(file, entry.offset, entry.nbytes, entry.element_width, entry.is_float))
    for name, other in header.same.items():
        if other in index_of and skipped_by((*prefix, name), skip) is None:
            index_of[name] = index_of[other]
    # Sorted by name: the order in the file follows dtypes, and says nothing of the model.
    names = tuple(sorted(index_of))
    nodes = tuple(TensorNode(index_of[name]) for name in names)
    return Loaded(Captured(DictNode("dict", names, nodes), [], tensors, storages, warnings), left_out)


def _strides(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    strides: list[int] = []
    for length in reversed(shape):
        strides.append(unit)
        unit *= max(1, length)
    return tuple(reversed(strides))
