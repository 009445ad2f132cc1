"""A safetensors file as a state: a flat dict of its tensors, whose bytes are read from it as a commit asks for them.

Neither torch nor a child process is needed: the format holds no code, and its header is checked before it is believed.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckstore.capture import Captured
from ckstore.errors import NotFoundError
from ckstore.importing.storages import FileStorage, OpenFile
from ckstore.tensor import HostStorage, TensorSpec
from ckstore.tree import DictNode, TensorNode


def open_safetensors(path: Path) -> Captured:
    """Return the tensors of a file; they keep it open.

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
    tensors: list[TensorSpec] = []
    storages: list[HostStorage] = []
    index_of: dict[str, int] = {}
    for entry in header.entries:
        index_of[entry.name] = len(tensors)
        strides = _strides(entry.shape, 1 if header.library == "torch" else entry.itemsize)
        tensors.append(TensorSpec(header.library, entry.dtype, entry.shape, strides, len(storages), 0))
        storages.append(FileStorage(file, entry.offset, entry.nbytes, entry.element_width, entry.is_float))
    for name, other in header.same.items():
        index_of[name] = index_of[other]
    # Sorted by name: the order in the file follows dtypes, and says nothing of the model.
    names = tuple(sorted(index_of))
    nodes = tuple(TensorNode(index_of[name]) for name in names)
    return Captured(DictNode("dict", names, nodes), [], tensors, storages, [])


def _strides(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    strides: list[int] = []
    for length in reversed(shape):
        strides.append(unit)
        unit *= max(1, length)
    return tuple(reversed(strides))
